"""The resume plan: whatever the members hold, their streams of tasks agree, and each chunk gets the right task."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.collective.chunks import pack
from ftcomm.collective.inflight import Inflight
from ftcomm.collective.operation import Operation
from ftcomm.collective.resume import (
    REDUCE,
    ProtocolError,
    Task,
    all_reduce,
    base,
    failure,
    resume_tasks,
    side_by_side,
)
from ftcomm.control.messages import FailedOp, Final, OpProgress, Progress
from ftcomm.transport.segment import CHUNK
from tests.rigs.examples import drawn


@dataclasses.dataclass(frozen=True)
class Situation:
    """What the protocol allows: ops return in order, and only when all hold them; FINAL only what all have called."""

    chunks: tuple[int, ...]  # of each op
    held: dict[int, tuple[frozenset[int], ...]]  # by replica, for each op that it has called
    returned: dict[int, int]
    who: dict[tuple[int, int], tuple[int, ...]]  # contributors of (op, chunk)

    def progress(self) -> dict[int, Progress]:
        return {m: self._of(m) for m in self.held}

    def _of(self, member: int) -> Progress:
        ops = []
        for number in range(self.returned[member], len(self.held[member])):
            finals: dict[tuple[int, ...], list[int]] = {}
            for chunk in sorted(self.held[member][number]):
                finals.setdefault(self.who[number, chunk], []).append(chunk)
            total = self.chunks[number]
            ops.append(OpProgress(number, tuple(Final(w, pack(c, total)) for w, c in finals.items())))
        return Progress(self.returned[member], tuple(ops))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    members = draw(st.sets(st.integers(0, 9), min_size=1, max_size=5))
    chunks = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    called = {m: draw(st.integers(0, len(chunks))) for m in members}
    common = min(called.values())
    complete = draw(st.integers(0, common))  # all members hold these
    sets = [st.frozensets(st.integers(0, total - 1)) for total in chunks]
    held = {
        m: tuple(
            frozenset(range(chunks[op])) if op < complete else draw(sets[op]) if op < common else frozenset()
            for op in range(called[m])
        )
        for m in members
    }
    returned = {m: draw(st.integers(0, complete)) for m in members}
    lost = draw(st.sets(st.integers(10, 12)))
    who = {
        (op, chunk): tuple(sorted(members | (lost if draw(st.booleans()) else set())))
        for op in range(len(chunks))
        for chunk in range(chunks[op])
    }
    return Situation(chunks, held, returned, who)


def streams(situation: Situation, only: tuple[int, ...] | None = None) -> dict[int, list[tuple[int, Task]]]:
    """The stream of every member, if each goes on to call all ops. With `only` the ops are atomic."""
    progress = situation.progress()
    start = base(progress.values())
    out = {}
    for member in progress:
        tasks = out[member] = []
        for number in range(start, len(situation.chunks)):
            total = situation.chunks[number]
            in_flight = number < len(situation.held[member])
            plan = resume_tasks(number, total, progress, only) if in_flight else all_reduce(total)
            tasks += [(number, task) for task in plan]
    return out


@drawn(150, 500, situations())
def test_the_streams_of_all_members_agree(situation: Situation) -> None:
    first, *others = streams(situation).values()
    assert all(other == first for other in others)


@drawn(150, 500, situations())
def test_every_chunk_gets_the_task_it_needs(situation: Situation) -> None:
    for tasks in streams(situation).values():
        planned = {(number, task.chunk): task for number, task in tasks}
        assert len(planned) == len(tasks)
        for number in range(base(situation.progress().values()), len(situation.chunks)):
            for chunk in range(situation.chunks[number]):
                holders = [m for m, ops in situation.held.items() if number < len(ops) and chunk in ops[number]]
                task = planned.get((number, chunk))
                if len(holders) == len(situation.held):
                    assert task is None
                elif holders:
                    assert task == Task(chunk, min(holders), situation.who[number, chunk])
                else:
                    assert task == Task(chunk, REDUCE, ())


def ends(situation: Situation, number: int, only: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The contributors of all chunks of an op, when all tasks are done."""
    (tasks, *_) = streams(situation, only).values()
    planned = {task.chunk: task for n, task in tasks if n == number}
    out = set()
    for chunk in range(situation.chunks[number]):
        task = planned.get(chunk)
        kept = task is None or task.holder != REDUCE
        out.add(situation.who[number, chunk] if kept else only)
    return out


@drawn(150, 500, situations(), st.booleans())
def test_all_chunks_of_an_atomic_op_end_with_one_set(situation: Situation, same: bool) -> None:
    only = tuple(sorted(situation.held)) if same else (min(situation.held),)
    first, *others = streams(situation, only).values()
    assert all(other == first for other in others)
    for number in range(base(situation.progress().values()), len(situation.chunks)):
        assert len(ends(situation, number, only)) == 1


@drawn(150, 500, situations(), st.integers(0, 4))
def test_what_an_atomic_op_need_not_reduce_again_it_keeps(situation: Situation, number: int) -> None:
    only = tuple(sorted(situation.held))
    if not base(situation.progress().values()) <= number < min(map(len, situation.held.values())):
        return  # it is returned, or there is somebody who has not called it
    total = situation.chunks[number]
    sets = {
        chunk: situation.who[number, chunk]
        for chunk in range(total)
        if any(chunk in ops[number] for ops in situation.held.values())
    }
    (tasks, *_) = streams(situation, only).values()
    reduced = {task.chunk for n, task in tasks if n == number and task.holder == REDUCE}
    if len(sets) == total and len(set(sets.values())) == 1:
        assert not reduced  # somebody may have returned it
    else:
        assert reduced == {chunk for chunk in range(total) if sets.get(chunk) != only}


@given(situations())
def test_what_somebody_has_returned_everybody_holds(situation: Situation) -> None:
    start = base(situation.progress().values())
    for ops in situation.held.values():
        assert all(held == frozenset(range(situation.chunks[number])) for number, held in enumerate(ops[:start]))


def holding(*chunks: int, contributors: tuple[int, ...] = (0, 1)) -> Progress:
    return Progress(4, (OpProgress(4, (Final(contributors, pack(chunks, 8)),)),))


def test_a_joiner_does_not_set_the_numbers() -> None:
    assert base([Progress(9, (), fresh=True), Progress(4, ())]) == 4
    assert base([Progress(0, (), fresh=True)]) == 0


def test_a_failure_is_found_wherever_it_was_seen() -> None:
    failed = Progress(3, (OpProgress(3, ()),), failed=(FailedOp(3, "no"),))
    later = Progress(3, (OpProgress(3, ()),), failed=(FailedOp(3, "for another reason", lost=True),))
    assert failure(3, {0: Progress(3, ()), 2: later, 1: failed}) == FailedOp(3, "no")  # of the lowest, on all alike
    assert failure(4, {0: Progress(3, ()), 1: failed}) is None


@pytest.mark.parametrize(
    "progress",
    [
        {0: holding(1), 1: Progress(4, ())},  # FINAL, and not called by all
        {0: holding(1), 1: holding(1, contributors=(0, 1, 2)), 2: holding()},  # two different sums
        {0: holding(5), 1: holding()},  # more chunks than the op has
    ],
)
def test_contradictions_are_found(progress: dict[int, Progress]) -> None:
    with pytest.raises(ProtocolError):
        resume_tasks(4, 3, progress)


def test_what_is_sent_again_is_counted_in_bytes() -> None:
    """Chunks that were posted and are not FINAL everywhere; the last one is shorter."""
    elements = CHUNK // 4
    for posted, held, elsewhere, again, resent in (
        (0, {}, {}, 0, 0),
        (2, {}, {}, 2, 2 * CHUNK),
        (2, {0: (0, 1)}, {}, 2, 2 * CHUNK),  # FINAL here: given to the other
        (2, {0: (0, 1)}, {0: (0, 1)}, 1, CHUNK),
        (3, {0: (0, 1)}, {0: (0, 1), 1: (0, 1)}, 1, 400),  # the other gives the second, nobody has the last
        (3, {}, {}, 3, 2 * CHUNK + 400),
    ):
        op = Operation(np.zeros(2 * elements + 100, np.float32), "float32", "sum")
        flight = Inflight()
        flight.add(op)
        op.next = posted
        for chunk, who in held.items():
            op.finals[chunk] = who
        there = (Final((0, 1), pack(elsewhere, 3)),)
        told = {0: flight.progress(), 1: Progress(0, (OpProgress(0, there),))}
        resumed = flight.resume(told, (0, 1))
        assert (resumed.again, resumed.resent) == (again, resent), posted


@pytest.mark.parametrize(
    ("tasks", "together"),
    [
        ([Task(3, REDUCE, ())], 1),
        ([Task(3, REDUCE, ()), Task(4, REDUCE, ())], 2),
        ([Task(3, REDUCE, ()), Task(5, REDUCE, ())], 1),  # the one between is FINAL everywhere
        ([Task(3, REDUCE, ()), Task(4, 0, (0, 1)), Task(5, REDUCE, ())], 1),
        ([Task(3, 0, (0, 1)), Task(4, 0, (0, 1))], 1),  # who holds the one need not lack the other
        ([Task(3, REDUCE, ()), Task(4, REDUCE, ()), Task(5, REDUCE, ())], 3),
    ],
)
def test_chunks_that_follow_each_other_are_reduced_as_one(tasks: list[Task], together: int) -> None:
    assert side_by_side(tasks) == together
