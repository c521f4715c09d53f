"""Groups of one process that stage in the files of each other, see `ftcomm.transport.slab`."""

from __future__ import annotations

import errno
import functools
import gc
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.errors import SettingsError, TransportError
from ftcomm.settings.staging import BYTES, staging_bytes
from ftcomm.transport.segment import PLACE, Segment
from ftcomm.transport.slab import SLAB, StagingFile
from tests.rigs.exchange import DEADLINE, Caller, Member, Rig

WINDOW = 4 << 20  # bytes that a member stages in at most, of a group of one host


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> int:
    """The staging of this process is limited to that of four members."""
    gc.collect()
    there = SLAB.reserved
    monkeypatch.setattr(SLAB, "_limit", there + 4 * WINDOW)
    monkeypatch.setattr(SLAB, "_said", False)
    return there


def sums(rig: Rig, sizes: list[int], first: int = 0) -> None:
    """All-reduces at all members, some in the background; all sums are right."""

    def call(member: Member, ops: list[Operation]) -> None:
        for number, op in enumerate(ops):
            (member.exchange.submit if number % 3 == 1 else member.exchange.run)(op)
        for op in ops:
            op.wait()

    ops = {
        m: [
            Operation(np.full(size, first + 10 * number + m, np.float32), "float32", "sum")
            for number, size in enumerate(sizes)
        ]
        for m in rig.members
    }
    for caller in [Caller.start(call, member, ops[m]) for m, member in rig.members.items()]:
        caller.join()
    for m, of in ops.items():
        for number, op in enumerate(of):
            assert op.error is None
            expected = sum(first + 10 * number + other for other in rig.members)
            assert (op.array == expected).all(), f"member {m}, op {number}: {op.array}, expected {expected}"


def move(member: Member, other: Member) -> None:
    """Exchange what two members stage in, as if `member` were about to begin an op."""
    stream = member.exchange.core.stream
    assert stream is not None
    assert stream.unread
    assert other.segment.give(functools.partial(SLAB._exchange, member.segment, other.segment))
    stream.forget()


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def moves(*rigs: Rig) -> int:
    return sum(member.segment.words[PLACE] for rig in rigs for member in rig.members.values())


LARGE = 1 << 20  # elements: eight chunks


@pytest.mark.parametrize("how", ["shm", "loopback", "tcp", "mixed", "ring", "mixed ring", "hosts", "rows"])
def test_groups_that_are_used_in_turn_share_what_they_stage_in(how: str, limited: int) -> None:
    rigs = [Rig(range(2), how) for _ in range(10)]
    try:
        for rig in rigs:
            rig.view(rig.members)
        for turn in range(3):
            for number, rig in enumerate(rigs):
                sums(rig, [16, LARGE, 16, 1000, 200_000, 16], 100 * turn + number)
        assert moves(*rigs) >= 20
        far = 1 if how in ("shm", "loopback") else 4  # rooms that members of other hosts use are so much larger
        assert SLAB.reserved - limited <= max(4, 2 * far) * WINDOW
    finally:
        for rig in rigs:
            rig.__exit__()


@pytest.mark.parametrize("how", ["shm", "tcp"])
def test_groups_that_are_in_use_at_once_all_go_on_and_the_log_says_so_once(
    how: str, limited: int, caplog: pytest.LogCaptureFixture
) -> None:
    rigs = [Rig(range(2), how) for _ in range(8)]
    try:
        for rig in rigs:
            rig.view(rig.members)
        ops = {
            (number, m): Operation(np.full(LARGE, 1 << m, np.float32), "float32", "sum")
            for number, rig in enumerate(rigs)
            for m in rig.members
        }
        with caplog.at_level(logging.WARNING, "ftcomm"):
            for number, rig in enumerate(rigs):  # each waits for the other member
                rig.members[0].exchange.submit(ops[number, 0])
            for number, rig in reversed(list(enumerate(rigs))):
                rig.members[1].exchange.submit(ops[number, 1])
            for op in ops.values():
                assert op.wait(60)
        assert all(op.error is None and (op.array == 3).all() for op in ops.values())
        assert SLAB.reserved - limited > 4 * WINDOW
        said = [record.getMessage() for record in caplog.records if "FTCOMM_STAGING_BYTES" in record.getMessage()]
        assert len(said) == 1
        assert "They go on" in said[0]
    finally:
        for rig in rigs:
            rig.__exit__()


@pytest.mark.parametrize("sizes", [[16], [LARGE], [16, LARGE, 16]])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("how", ["shm", "mixed", "hosts"])
def test_readers_find_what_has_moved(how: str, who: tuple[int, ...], sizes: list[int]) -> None:
    """Small ops take the fast path, before and after; and who has moved once moves again, back too."""
    with Rig(range(3), how) as rig, Rig(range(3), how) as other:
        for each in (rig, other):
            each.view(each.members)
            sums(each, sizes)
        for turn in range(3):
            for m in who:
                move(rig.members[m], other.members[(m + turn) % 3])
            for each in (rig, other, rig):
                sums(each, sizes, 7 * turn)
        assert moves(rig, other) == 6 * len(who)


@pytest.mark.parametrize("sizes", [[16], [LARGE]])
def test_a_view_finds_what_has_moved_before(sizes: list[int]) -> None:
    """Of a member that was there, and of one that is new: nobody has seen the op that said so."""
    with Rig(range(3)) as rig, Rig(range(3)) as other:
        rig.view((0, 1))
        other.view(other.members)
        sums(other, sizes)
        for m in (0, 1):
            move(rig.members[m], other.members[m])
        rig.view(rig.members)
        sums(rig, sizes, 5)
        rig.view(rig.members)
        sums(rig, sizes, 6)


def test_a_view_that_comes_after_an_op_has_said_so_hides_no_move() -> None:
    """Nobody has seen the op in the epoch in which it said so; in the next one it does not, and others begin with it on
    the fast path."""
    with Rig(range(3)) as rig, Rig(range(3)) as other:
        for each in (rig, other):
            each.view(each.members)
            sums(each, [16])
        move(rig.members[0], other.members[0])
        ops = {m: Operation(np.full(16, 1 << m, np.float32), "float32", "sum") for m in rig.members}
        rig.members[0].exchange.submit(ops[0])
        until(lambda: not rig.members[0].segment.moved)
        rig.view(rig.members)
        for caller in [Caller.start(rig.members[m].exchange.run, ops[m]) for m in (1, 2)]:
            caller.join()
        assert ops[0].wait(60)
        assert all((op.array == 7).all() for op in ops.values())


@pytest.mark.parametrize("interrupted", ["map_staging", "stage_in"])
def test_an_interrupt_while_staging_moves_ends_one_group_alone(
    interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(range(2)) as rig, Rig(range(2)) as other:
        for each in (rig, other):
            each.view(each.members)
            sums(each, [16])
        of = StagingFile if interrupted == "map_staging" else Segment
        real, calls = getattr(of, interrupted), []

        def once(self: Any, *args: Any) -> None:
            real(self, *args)
            calls.append(self)
            if len(calls) == (2 if interrupted == "map_staging" else 1):
                raise KeyboardInterrupt

        monkeypatch.setattr(of, interrupted, once)
        with pytest.raises(KeyboardInterrupt):
            move(rig.members[0], other.members[0])
        monkeypatch.undo()
        sums(other, [16, LARGE, 16], 3)


def test_nobody_gives_away_what_is_in_use() -> None:
    with Rig(range(2)) as rig, Rig(range(2)) as other:
        for each in (rig, other):
            each.view(each.members)
            sums(each, [16])
        giver, taken = rig.members[0], []
        op = Operation(np.ones(16, np.float32), "float32", "sum")
        giver.exchange.submit(op)
        assert not giver.segment.give(lambda: taken.append(1))
        mine = Operation(np.ones(16, np.float32), "float32", "sum")
        rig.members[1].exchange.run(mine)
        assert op.wait(60)
        giver.exchange.freeze(lambda: None)
        assert not giver.segment.give(lambda: taken.append(2))
        rig.view(rig.members)
        sums(rig, [16])
        with giver.exchange.driver.mutex:  # somebody is about to call
            assert not giver.segment.give(lambda: taken.append(3))
        assert not taken
        assert giver.segment.give(lambda: taken.append(4))
        assert taken == [4]
    assert not Segment().give(lambda: taken.append(5))  # all of it was reserved at the start, for who knows what


def test_who_has_taken_an_op_gives_nothing_away_before_all_have() -> None:
    """The op has not returned, but that is not asked about: what counts is who still reads."""
    with Rig(range(2)) as rig:
        rig.view(rig.members)
        sums(rig, [16])
        stream = rig.members[0].exchange.core.stream
        assert stream is not None
        assert stream.unread
        pipeline = stream.pipeline
        pipeline.posted += 1
        assert not stream.unread
        pipeline.taken += 1
        assert not stream.unread
        pipeline.posted, pipeline.taken = pipeline.posted - 1, pipeline.taken - 1


def test_an_op_whose_reader_finds_the_owner_gone_goes_on_without_it() -> None:
    with Rig(range(3)) as rig, Rig(range(3)) as other:
        for each in (rig, other):
            each.view(each.members)
            sums(each, [16])
        move(rig.members[0], other.members[0])
        with open(os.devnull, "rb") as nothing:  # as if its process had ended, and another one had its number
            os.dup2(nothing.fileno(), rig.members[0].segment.staging.fd)
        ops = {m: Operation(np.full(16, 1 << m, np.float32), "float32", "sum") for m in rig.members}
        callers = {m: Caller.start(rig.members[m].exchange.run, ops[m]) for m in rig.members}
        stream = rig.members[1].exchange.core.stream
        assert stream is not None
        until(lambda: stream.missing(ops[1]) == (0,))
        assert not ops[1].done
        rig.view((1, 2))
        for m in (1, 2):
            callers[m].join()
            assert ops[m].error is None
            assert (ops[m].array == 6).all()


def test_a_reader_that_cannot_map_what_has_moved_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(range(3)) as rig, Rig(range(3)) as other:
        for each in (rig, other):
            each.view(each.members)
            sums(each, [16])
        move(rig.members[0], other.members[0])
        poor, opens = rig.members[1].exchange.member.peers[0], os.open

        def no_descriptor(*args: Any) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        follow = type(poor).follow

        def refused(self: Any) -> bool:
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(os, "open", no_descriptor if self is poor else opens)
                return follow(self)

        monkeypatch.setattr(type(poor), "follow", refused)
        ops = {m: Operation(np.full(16, 1 << m, np.float32), "float32", "sum") for m in rig.members}
        callers = {m: Caller.start(rig.members[m].exchange.run, ops[m]) for m in rig.members}
        callers[1].join()
        assert isinstance(ops[1].error, TransportError)
        assert "Too many open files" in str(ops[1].error)
        assert "ulimit -n" in str(ops[1].error)
        rig.view((0, 2))
        for m in (0, 2):
            callers[m].join()
            assert ops[m].error is None


@pytest.mark.parametrize("in_flight", [False, True])
def test_what_a_group_leaves_is_used_again_unless_others_may_read_it(in_flight: bool, limited: int) -> None:
    rig, other = Rig(range(2)), Rig(range(2))
    try:
        for each in (rig, other):
            each.view(each.members)
            sums(each, [LARGE])
        for m in (0, 1):
            move(rig.members[m], other.members[m])
        sums(rig, [LARGE])
        left = [member.segment.staging for member in rig.members.values()]
        if in_flight:
            rig.members[0].exchange.submit(Operation(np.ones(16, np.float32), "float32", "sum"))
    finally:
        rig.__exit__()
    try:
        assert [file in SLAB._unused for file in left] == [not in_flight, True]
        sums(other, [LARGE, 16])
    finally:
        other.__exit__()
    assert not SLAB._unused
    assert SLAB.reserved == limited
    assert all(file.fd < 0 for file in left)


def test_no_other_process_writes_to_what_has_moved() -> None:
    with Rig(range(2)) as rig, Rig(range(2)) as other:
        for each in (rig, other):
            each.view(each.members)
            sums(each, [16])
        move(rig.members[0], other.members[0])
        sums(rig, [16])
        file = rig.members[0].segment.staging
        assert file.fd == other.members[0].segment.fd
        with open(f"/proc/{os.getpid()}/fd/{file.fd}", "r+b") as opened, pytest.raises(PermissionError):
            os.pwrite(opened.fileno(), b"x", file.at)


def test_the_limit_is_a_number_of_bytes() -> None:
    assert staging_bytes({}) == BYTES == 64 << 20
    assert staging_bytes({"FTCOMM_STAGING_BYTES": "0"}) == 0
    with pytest.raises(SettingsError, match="FTCOMM_STAGING_BYTES='64M'; expected a number of bytes"):
        staging_bytes({"FTCOMM_STAGING_BYTES": "64M"})
