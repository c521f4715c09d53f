"""Scripts: what is moved, what is left of it after a loss, and how it is packed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.collective import schedule
from ftcomm.collective.resume import REDUCE, ProtocolError, holdings
from ftcomm.collective.schedule import Batch, Lost, Schedule, batches, explained, from_start, left
from ftcomm.control.messages import Final, OpProgress, Progress
from ftcomm.kernels import call_codes

CHUNK = 1024  # bytes; elements are bytes, too

KINDS = [kind for kind in call_codes.KINDS if kind != "allreduce"]


def make(kind: str, count: int, roster: tuple[int, ...], me: int, root: int, in_place: bool = False) -> Schedule:
    n = len(roster)
    uneven = tuple(tuple((count + 7 * i + 3 * j) // n for j in range(n)) for i in range(n))
    return {
        "broadcast": lambda: schedule.broadcast(count, roster, me, root, CHUNK, 1),
        "reduce": lambda: schedule.reduce(count, roster, me, root, CHUNK, 1),
        "allgather": lambda: schedule.allgather(count, roster, me, in_place, CHUNK, 1),
        "gather": lambda: schedule.gather(count, roster, me, root, CHUNK, 1),
        "scatter": lambda: schedule.scatter(count, roster, me, root, CHUNK, 1),
        "reduce_scatter": lambda: schedule.reduce_scatter(count, roster, me, in_place, CHUNK, 1),
        "alltoall": lambda: schedule.alltoall(uneven, roster, me, CHUNK, 1),
        "barrier": lambda: schedule.barrier(roster, me),
    }[kind]()


ROSTERS = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True).map(lambda m: tuple(sorted(m)))


@given(st.sampled_from(KINDS), st.integers(0, 5000), ROSTERS, st.data())
@settings(max_examples=150, deadline=None)
def test_all_members_have_the_same_script_and_every_element_goes_where_it_belongs(
    kind: str, count: int, roster: tuple[int, ...], data: st.DataObject
) -> None:
    root, in_place = data.draw(st.integers(0, len(roster) - 1)), data.draw(st.booleans())
    plans = [make(kind, count, roster, me, root, in_place) for me in range(len(roster))]
    assert len({(plan.detail, tuple((p.size, p.holder, p.takers) for p in plan.parts)) for plan in plans}) == 1
    for me, plan in enumerate(plans):
        assert [who is None for who in plan.begin] == [part.dest >= 0 for part in plan.parts]
        for part in plan.parts:
            assert (part.dest >= 0) == (part.takers is None or roster[me] in part.takers)
            assert (part.source >= 0) == (part.holder in (REDUCE, roster[me]))
            assert 0 < part.size <= CHUNK
        taken = sorted((part.dest, part.dest + part.size) for part in plan.parts if part.dest >= 0)
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(taken))  # no gap, no overlap


@given(st.sampled_from(KINDS), st.integers(0, 5000), ROSTERS, st.data())
@settings(max_examples=150, deadline=None)
def test_batches_fit_the_slots_and_hold_every_part_once(
    kind: str, count: int, roster: tuple[int, ...], data: st.DataObject
) -> None:
    members = tuple(sorted(data.draw(st.sets(st.sampled_from(roster), min_size=1))))
    plan = make(kind, count, roster, 0, data.draw(st.integers(0, len(roster) - 1)))
    held = {
        m: {(9,): sum(1 << i for i, part in enumerate(plan.parts) if has(part, m) and data.draw(st.booleans()))}
        for m in members
    }
    tasks = left(plan, members, held)
    made = batches(plan, tasks, members, 1)
    needed = {i for i, part in enumerate(plan.parts) if any(has(part, m) and not held[m][9,] >> i & 1 for m in members)}
    assert {task.chunk for task in tasks} == needed
    for task in tasks:
        holders = [m for m in members if held[m][9,] >> task.chunk & 1]
        assert task.holder == (holders[0] if holders else plan.parts[task.chunk].holder)
        assert task.contributors == ((9,) if holders else ())
    missing = {task.holder for task in tasks} - {REDUCE} - set(members)
    if missing:
        assert made == Lost(tuple(sorted(missing)))
        return
    assert not isinstance(made, Lost)
    assert [move.part for batch in made for move in batch.moves] == [task.chunk for task in tasks]
    for batch in made:
        for giver in members:
            used = [False] * plan.room
            for move in batch.moves:
                if move.holder in (giver, REDUCE) and move.takers != (giver,):
                    place = slice(move.at, move.at + move.size)
                    assert not any(used[place])
                    assert len(used[place]) == move.size
                    used[place] = [True] * move.size
            for taker in members:
                a, b = batch.span(giver, True, taker)
                read = [move for move in batch.moves if taker in move.takers and move.holder in (giver, REDUCE)]
                assert all(a <= move.at and move.at + move.size <= b for move in read)
                assert b <= plan.room


def has(part: schedule.Part, member: int) -> bool:
    return part.takers is None or member in part.takers


def test_all_give_and_take_at_the_same_time() -> None:
    """Two slots full of data from each of three members are two batches, not six tasks."""
    roster = (2, 5, 7)
    plan = schedule.allgather(2 * CHUNK, roster, 0, True, CHUNK, 1)
    made = from_start(plan, roster, 1)
    assert not isinstance(made, Lost)
    assert [[move.holder for move in batch.moves] for batch in made] == [[2, 5, 7], [2, 5, 7]]
    plan = schedule.reduce_scatter(CHUNK // 4, roster, 0, False, CHUNK, 1)
    made = from_start(plan, roster, 1)
    assert not isinstance(made, Lost)
    assert [[move.takers for move in batch.moves] for batch in made] == [[(2,), (5,), (7,)]]


def test_what_a_lost_member_would_have_taken_is_left_out() -> None:
    plan = schedule.gather(3000, (0, 1, 2), 0, 1, CHUNK, 1)
    assert left(plan, (0, 2), {}) == ()
    assert from_start(plan, (0, 2), 1) == schedule.NOTHING  # calls are compared all the same


def test_an_op_without_elements_has_one_task() -> None:
    assert from_start(schedule.barrier((0, 1), 0), (0, 1), 1) == (Batch((), 1),)
    assert from_start(schedule.broadcast(0, (0, 1), 0, 1, CHUNK, 1), (0, 1), 1) == (Batch((), 1),)


def test_an_empty_piece_of_a_lost_member_is_not_missed() -> None:
    plan = schedule.alltoall(((1, 1), (0, 1)), (0, 1), 0, CHUNK, 1)
    assert from_start(plan, (0,), 1) != schedule.NOTHING
    assert isinstance(from_start(schedule.alltoall(((1, 1), (2, 1)), (0, 1), 0, CHUNK, 1), (0,), 1), Lost)


def test_a_word_tells_kind_root_members_and_sizes_apart() -> None:
    words = {
        make(kind, count, roster, 0, root).detail
        for kind in KINDS
        for count in (99, 100)
        for roster in ((0, 1), (0, 2), (0, 1, 2))
        for root in (0, 1)
    }
    rooted = {"broadcast", "reduce", "gather", "scatter"}
    assert len(words) == 3 * sum((2 if kind in rooted else 1) * (1 if kind == "barrier" else 2) for kind in KINDS)
    kind, said = explained(make("scatter", 3, (0, 4), 1, 1).detail)
    assert (kind, said.startswith("root=1, members and sizes ")) == ("scatter", True)
    assert explained(0) == ("allreduce", "")
    assert explained(77)[0] == "collective 77"


def test_what_is_final_in_part_and_not_called_somewhere_is_a_defect() -> None:
    told = {0: Progress(4, (OpProgress(4, (Final((0,), b"\1"),)),)), 1: Progress(4, ())}
    with pytest.raises(ProtocolError, match=r"replicas \[1\] have not called it"):
        holdings(4, told)
    assert holdings(5, told) == {0: {}, 1: {}}


@pytest.mark.parametrize("kind", KINDS)
def test_copies_alone_give_what_numpy_gives(kind: str) -> None:
    """The parts of all members, carried out one by one, are the collective."""
    roster, root, count = (1, 4, 6), 1, 2500
    plans = [make(kind, count, roster, me, root) for me in range(3)]
    given = [np.random.default_rng(m).integers(0, 200, 3 * count).astype(np.int64) for m in roster]
    got = [np.full(3 * count, -1) for _ in roster]
    for i in range(len(plans[0].parts)):
        for me, plan in enumerate(plans):
            part = plan.parts[i]
            if part.dest >= 0:
                givers = range(3) if part.holder == REDUCE else [roster.index(part.holder)]
                begins = [plans[g].parts[i].source for g in givers]
                parts = [given[g][begin : begin + part.size] for g, begin in zip(givers, begins, strict=True)]
                got[me][part.dest : part.dest + part.size] = np.sum(parts, axis=0)
    own = [slice(me * count, (me + 1) * count) for me in range(3)]
    row = [tuple((count + 7 * i + 3 * j) // 3 for j in range(3)) for i in range(3)]
    total = np.sum(given, axis=0)
    want: list[list[np.ndarray]] = {
        "broadcast": [[given[1][:count]]] * 3,
        "reduce": [[], [total[:count]], []],
        "allgather": [[x[:count] for x in given]] * 3,
        "gather": [[], [x[:count] for x in given], []],
        "scatter": [[given[1][own[me]]] for me in range(3)],
        "reduce_scatter": [[total[own[me]]] for me in range(3)],
        "alltoall": [[given[i][sum(row[i][:j]) : sum(row[i][: j + 1])] for i in range(3)] for j in range(3)],
        "barrier": [[], [], []],
    }[kind]
    for me in range(3):
        flat = np.concatenate([np.empty(0, np.int64), *want[me]])
        assert (got[me][: len(flat)] == flat).all()
        assert (got[me][len(flat) :] == -1).all()
