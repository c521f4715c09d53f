"""An epoch goes on beyond 2^32 tasks, by every transport, and at its end all are told so."""

from __future__ import annotations

import fcntl
import sys
import termios
import time

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import LAST, Pipeline
from ftcomm.control import limits
from ftcomm.errors import FtcommError
from ftcomm.kernels.epochs import COUNTER, COUNTS, EPOCHS
from ftcomm.transport.base import MirrorWriter
from ftcomm.transport.nixl import frames as frames
from ftcomm.transport.segment import CHUNK, POSTED, REDUCED, TAKEN
from ftcomm.transport.tcp.mirror import TcpMirror
from tests.rigs.exchange import DEADLINE, Caller, Rig

MEMBERS = (0, 1, 2, 3)
SIZES = (8, 3 * CHUNK // 4, 8, 8, 6 * CHUNK // 4, 8)  # elements of 4 bytes: one task, and several


def reduce(rig: Rig, sizes: tuple[int, ...]) -> dict[int, list[FtcommError | None]]:
    """All-reduces of these sizes on all members; the errors of each."""
    errors: dict[int, list[FtcommError | None]] = {m: [] for m in rig.members}

    def body(me: int) -> None:
        for size in sizes:
            op = Operation(np.full(size, 2.0**me, np.float32), "float32", "sum")
            rig.members[me].exchange.run(op)
            errors[me].append(op.error)  # type: ignore[arg-type]
            assert op.error is not None or (op.array == 15.0).all()

    callers = [Caller.start(body, m) for m in rig.members]
    for caller in callers:
        caller.join()
    return errors


def words_of(pipeline: Pipeline) -> tuple[int, ...]:
    return POSTED, REDUCED, TAKEN, *pipeline.algorithms.readers


def is_under_way(rig: Rig) -> bool:
    """Something of a connection is still to be sent, or was not taken in before."""
    for member in rig.members.values():
        stream = member.exchange.core.stream
        assert stream is not None
        if any(w._queue or queued(w, termios.TIOCOUTQ) for w in stream.publisher._readers):  # type: ignore[attr-defined]
            return True
    mirrors = [p for m in rig.members.values() for p in m.exchange.member.peers.values() if isinstance(p, TcpMirror)]
    raised = [mirror.pump() for mirror in mirrors]  # a driver without an op leaves words where they are
    return any(raised) or any(mirror.is_open and queued(mirror, termios.FIONREAD) for mirror in mirrors)


def queued(connection: MirrorWriter | TcpMirror, which: int) -> int:
    return int.from_bytes(fcntl.ioctl(connection.fileno(), which, bytes(4)), sys.byteorder)


def settle(rig: Rig) -> None:
    """An op is over for its callers before all have heard that all have taken it. Twice, as members relay."""
    deadline = time.monotonic() + DEADLINE
    while is_under_way(rig) or is_under_way(rig):
        assert time.monotonic() < deadline, "words are under way for ever"
        for member in rig.members.values():
            member.exchange.wake()
        time.sleep(0.001)


def go_to(rig: Rig, count: int) -> None:
    """As if so many tasks had been done in this epoch. Nothing is in flight."""
    settle(rig)
    for member in rig.members.values():
        stream = member.exchange.core.stream
        assert stream is not None
        pipeline = stream.pipeline
        pipeline.posted = pipeline.arrived = pipeline.taken = count
        for word in words_of(pipeline):
            member.segment.words[word] = stream.view.epoch << COUNTER | count
    for member in rig.members.values():
        stream = member.exchange.core.stream
        assert stream is not None
        for peer in member.exchange.member.peers.values():
            theirs = rig.members[peer.replica].segment.words
            if isinstance(peer, TcpMirror):
                for word in words_of(rig.members[peer.replica].exchange.core.stream.pipeline):  # type: ignore[union-attr]
                    peer.words[word] = theirs[word]
                if peer.heard is not peer.words:
                    peer.heard[POSTED] = peer.heard[TAKEN] = theirs[POSTED]
        for _, told in stream.publisher.relayed:
            told[POSTED] = told[TAKEN] = count


WAYS = ("shm", "tcp", "mixed", "ring", "mixed ring", "hosts", "tcp hosts", "rows")


@pytest.mark.parametrize(
    ("how", "count"),
    [
        *((how, (1 << 32) - 3) for how in WAYS),
        ("mixed ring", LAST - 100),
        *(pytest.param(how, LAST - 100, marks=pytest.mark.sweep) for how in WAYS if how != "mixed ring"),
    ],
)
def test_sums_are_right_beyond(how: str, count: int) -> None:
    with Rig(MEMBERS, how) as rig:
        rig.view(MEMBERS)
        reduce(rig, SIZES)
        go_to(rig, count)
        assert reduce(rig, SIZES) == {m: [None] * len(SIZES) for m in MEMBERS}
        assert all(member.exchange.core.stream.pipeline.posted > count + 6 for member in rig.members.values())  # type: ignore[union-attr]
        rig.view(MEMBERS)
        assert reduce(rig, SIZES) == {m: [None] * len(SIZES) for m in MEMBERS}
        assert not any(member.stalls or member.lost for member in rig.members.values())


@pytest.mark.parametrize("how", ["shm", "tcp"])
def test_at_the_end_of_an_epoch_all_are_told(how: str) -> None:
    with Rig(MEMBERS, how) as rig:
        rig.view(MEMBERS)
        reduce(rig, (8,))
        go_to(rig, LAST - 2)
        for errors in reduce(rig, (8, 8, 8)).values():
            assert errors[:2] == [None, None]
            assert "tasks were done in epoch 1" in str(errors[2])
        assert not any(member.stalls for member in rig.members.values())


def test_a_word_has_room_for_both() -> None:
    assert (EPOCHS - 1) << COUNTER | COUNTS - 1 == (1 << 63) - 1  # kernels take words as signed
    assert limits.EPOCHS == EPOCHS


def test_nixl_numbers_its_frames_beyond_32_bits() -> None:
    value = 7 << COUNTER | 1 << 40
    message = frames.pack(POSTED, 1, 3 << 40, 0, 0, 0, value, (1, 2, 3))
    (frame,) = frames.unpack(message)
    assert (frame.number, frame.value) == (3 << 40, value)
    frames.check(frame, {POSTED}, value - 1, 7)
