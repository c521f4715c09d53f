"""Which peers a group has made reachable for a device, and when it says that nobody needs them any more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from ftcomm.control.liveness import boot
from ftcomm.control.views import Address, Addresses, Member, View
from ftcomm.transport import connector
from ftcomm.transport.segment import Segment
from tests.rigs.exchange import data_plane


class Rig:
    """Replica 0 of this process, and segments of others in it."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.reached: list[str] = []
        self.left: list[str] = []
        self.data_plane, self.communicator = data_plane(
            "shm",
            on_reached=lambda peer: self.reached.append(peer.nonce),
            on_left=lambda peer: self.left.append(peer.nonce),
        )

    def address(self) -> Address:
        segment = Segment()
        self.segments.append(segment)
        return Address("host", 0, boot(), os.getpid(), segment.fd, segment.nonce)

    def view(self, epoch: int, *others: Address) -> View:
        members = [(0, self.communicator.here), *((i, address) for i, address in enumerate(others, 1))]
        return View(epoch, None, tuple(Member(i, "", Addresses.of((address,)), True) for i, address in members))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.communicator.connector.close()
    for segment in rig.segments:
        segment.close()


def test_who_is_in_no_view_any_more_is_left(rig: Rig) -> None:
    one, two = rig.address(), rig.address()
    for view in (rig.view(1, one, two), rig.view(2, one)):
        rig.data_plane.reach(view)
        rig.data_plane.enter(view, {})
    assert rig.reached == [one.nonce, two.nonce]
    assert rig.left == [two.nonce]


def test_who_was_reached_for_a_view_that_was_never_entered_is_left(rig: Rig) -> None:
    one, two = rig.address(), rig.address()
    views = rig.view(1, one), rig.view(2, one, two), rig.view(3, one)
    rig.data_plane.reach(views[0])
    rig.data_plane.enter(views[0], {})
    rig.data_plane.reach(views[1])
    rig.data_plane.reach(views[2])
    assert rig.left == []
    rig.data_plane.enter(views[2], {})
    assert rig.left == [two.nonce]


def test_who_is_needed_by_a_view_to_come_is_kept(rig: Rig) -> None:
    one, two = rig.address(), rig.address()
    views = rig.view(1, one, two), rig.view(2, one), rig.view(3, one, two)
    for view in views:
        rig.data_plane.reach(view)
    for view in views[:2]:
        rig.data_plane.enter(view, {})
    assert rig.left == []
    rig.data_plane.enter(views[2], {})
    assert rig.left == []


def test_who_comes_too_late_is_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view that it was for is over when it is reached."""
    one = rig.address()
    connect = connector.connect

    def slow(*args: Any, **options: Any) -> Any:
        peer = connect(*args, **options)
        rig.data_plane.reach(rig.view(2))
        rig.data_plane.enter(rig.view(2), {})
        return peer

    monkeypatch.setattr(connector, "connect", slow)
    rig.data_plane.reach(rig.view(1, one))
    assert rig.reached == rig.left == [one.nonce]
