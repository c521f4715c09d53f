"""For the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ftcomm.control import dropped, links
from tests.rigs.stopped_processes import DEADLINE, MEMBER, Peer


@pytest.fixture
def time_for_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time: who is counted is counted for what it says."""
    for name in ("HANDSHAKE_TIMEOUT", "ARRIVAL_TIMEOUT"):
        monkeypatch.setattr(links, name, DEADLINE)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """How many of a kind were dropped in this test."""
    monkeypatch.setattr(dropped, "_tallies", {})
    return lambda kind: dropped.counts().get(kind, 0)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as made:
        yield made


@pytest.fixture
def member() -> Iterator[Peer]:
    with Peer(MEMBER) as made:
        yield made
