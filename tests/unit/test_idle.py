"""Who has no op in flight leaves what others send in its sockets until the next op. Nothing depends on more."""

from __future__ import annotations

import fcntl
import sys
import termios
import time
from collections.abc import Callable

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.transport.segment import CHUNK, SLOTS, STAGED
from ftcomm.transport.tcp.mirror import TcpMirror
from tests.rigs.exchange import DEADLINE, Caller, Rig

MEMBERS = (0, 1, 2)
IDLE = 2
OPS = 3 * SLOTS


def ops_of(rig: Rig, who: tuple[int, ...], elements: int) -> dict[int, list[Operation]]:
    """In flight at these members; the other has not called them."""
    made = {m: [Operation(np.full(elements, 2.0**m, np.float32), "float32", "sum") for _ in range(OPS)] for m in who}
    for m, ops in made.items():
        for op in ops:
            rig.members[m].exchange.submit(op)
    return made


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def unread(mirror: TcpMirror) -> int:
    return int.from_bytes(fcntl.ioctl(mirror.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.fixture
def rig() -> Rig:
    """All have returned an op, and the idle one calls no other, while the others have."""
    rig = Rig(MEMBERS, "tcp")
    rig.view(MEMBERS)
    ops = {m: Operation(np.full(8, 2.0**m, np.float32), "float32", "sum") for m in MEMBERS}
    for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
        caller.join()
    return rig


def mirrors(rig: Rig) -> list[TcpMirror]:
    """Of the idle one."""
    return [peer for peer in rig.members[IDLE].exchange.member.peers.values() if isinstance(peer, TcpMirror)]


@pytest.mark.parametrize("elements", [8, CHUNK // 4])
def test_who_only_sends_sends_no_more_than_the_slots_hold_and_all_goes_on_later(rig: Rig, elements: int) -> None:
    with rig:
        made = ops_of(rig, (0, 1), elements)
        streams = [rig.members[m].exchange.core.stream for m in (0, 1)]
        until(lambda: all(s is not None and s.pipeline.posted == 1 + SLOTS for s in streams), "they do not go ahead")
        until(lambda: all(unread(mirror) for mirror in mirrors(rig)), "nothing has come")
        for stream in streams:
            assert stream is not None
            for writer in stream.publisher._readers:
                assert writer._under_way <= STAGED  # type: ignore[attr-defined]
                assert len(writer._queue) <= 8 * SLOTS  # type: ignore[attr-defined]
        made |= ops_of(rig, (IDLE,), elements)
        for ops in made.values():
            for op in ops:
                assert op.wait(DEADLINE)
                assert op.error is None
                assert (op.array == 7.0).all()


def test_who_is_removed_is_let_go_by_the_others_whatever_it_has_not_read(rig: Rig) -> None:
    with rig:
        made = ops_of(rig, (0, 1), 8)
        until(lambda: all(unread(mirror) for mirror in mirrors(rig)), "nothing has come")
        rig.view((0, 1))
        assert all(op.wait(DEADLINE) and (op.array == 3.0).all() for ops in made.values() for op in ops)


def test_a_connection_that_ends_is_heard_of_behind_what_was_not_read(rig: Rig) -> None:
    with rig:
        ops_of(rig, (0, 1), 8)
        until(lambda: all(unread(mirror) for mirror in mirrors(rig)), "nothing has come")
        stream = rig.members[0].exchange.core.stream
        assert stream is not None
        for writer in stream.publisher._readers:
            writer._sock.shutdown(1)  # type: ignore[attr-defined]
        until(lambda: [lost[0] for lost in rig.members[IDLE].lost] == [0], "nobody was told")


def test_a_view_is_entered_with_what_was_not_read_of_the_one_before(rig: Rig) -> None:
    with rig:
        made = ops_of(rig, (0, 1), 8)
        until(lambda: all(unread(mirror) for mirror in mirrors(rig)), "nothing has come")
        before = rig.dials
        rig.view(MEMBERS)
        assert rig.dials == before
        made |= ops_of(rig, (IDLE,), 8)
        assert all(op.wait(DEADLINE) and (op.array == 7.0).all() for ops in made.values() for op in ops)
        assert not any(member.lost for member in rig.members.values())
