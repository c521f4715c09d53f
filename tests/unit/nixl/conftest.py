"""For the tests of two endpoints of NIXL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ftcomm.transport.nixl.context import Nixl
from ftcomm.transport.nixl.mirror import NixlMirror
from ftcomm.transport.nixl.writer import NixlMirrorWriter
from tests.rigs import nixl_queues
from tests.unit.nixl.rig import Link


@pytest.fixture(params=[1, 2], ids=["one rail", "two rails"], scope="module")
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = Link(request.param)
    for side in (made.writer, made.reader):
        side.endpoint()  # both in one environment, whichever test is the first
    yield made
    made.writer.close()
    made.reader.close()
    made.segment.close()


@pytest.fixture
def pair(link: Link) -> Iterator[tuple[NixlMirrorWriter, NixlMirror]]:
    link.lost, link.heard = [], []  # those of an earlier test may still be told
    reader, peer = link.connect()
    yield reader, peer
    reader.close()
    peer.close()


@pytest.fixture
def fresh_link() -> Iterator[tuple[Link, dict[Nixl, set[int]]]]:
    """One whose agents nobody else has met, and the queues of each side."""
    made = Link(1)
    of: dict[Nixl, set[int]] = {}
    for side in (made.writer, made.reader):
        before = set(nixl_queues.queues())
        side.endpoint()
        of[side] = set(nixl_queues.queues()) - before
    yield made, of
    made.writer.close()
    made.reader.close()
    made.segment.close()
