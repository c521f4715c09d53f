"""What the words of the lanes say of an op: which of its chunks are FINAL, and for whom it waits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE, Task, all_reduce
from ftcomm.engines.gpu_kernel.device import Reached
from ftcomm.engines.gpu_kernel.graphs import replay_of
from ftcomm.engines.gpu_kernel.launch import account, lane_word, missing, task_words, variant, view_words
from ftcomm.engines.gpu_kernel.layout import INTERPRETED
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.kernels.device import words
from ftcomm.kernels.epochs import COUNTER

LAYOUT = dataclasses.replace(INTERPRETED, chunk=64, lanes=3)
VIEW = GroupView(7, 1, (0, 1, 4), frozenset((0, 4)))


def lanes(epoch: int, *counters: tuple[int, int, int]) -> memoryview:
    """The words of a member whose lanes have posted, reduced and taken so much."""
    memory = np.zeros(words.LANES_AT + LAYOUT.lanes * words.LINE, np.uint64)
    for lane, values in enumerate(counters):
        for word, value in zip((words.POSTED, words.REDUCED, words.TAKEN), values, strict=True):
            memory[lane_word(lane, word)] = epoch << COUNTER | value
    return memoryview(memory)


def an_op(chunks: int) -> KernelOperation:
    return KernelOperation(np.zeros(16 * chunks, np.float32), "float32", "sum", LAYOUT.chunk)


def test_the_first_tasks_of_each_lane_are_final() -> None:
    op = an_op(8)  # lanes have tasks 0 3 6, 1 4 7, 2 5
    account(op, lanes(7, (13, 0, 12), (12, 0, 10), (13, 0, 11)), LAYOUT, VIEW, base=10)
    assert [chunk for chunk, who in enumerate(op.finals) if who] == [0, 2, 3]
    assert op.finals[0] == (0, 4)


@pytest.mark.parametrize(("epoch", "base"), [(6, 0), (8, 0), (7, 20)])
def test_words_of_another_epoch_or_op_say_nothing(epoch: int, base: int) -> None:
    """An op that has not gone on: the words have been raised, or stand where the op before it has left them."""
    op = an_op(8)
    account(op, lanes(epoch, (13, 0, 12), (13, 0, 12), (13, 0, 12)), LAYOUT, VIEW, base)
    assert op.finals == [None] * 8


def test_what_is_left_of_an_op_are_tasks_of_their_own() -> None:
    op = an_op(8)
    op.finals[5] = op.finals[6] = (0, 1, 4)
    op.tasks = (Task(2, REDUCE, ()), Task(5, 4, (0, 1, 4)), Task(3, 0, (0, 1, 4)), Task(7, 1, (0, 1, 4)))
    chunk, holder, skip = 1, 1 << words.HOLDER, 1 << words.SKIP
    assert task_words(op, VIEW) == (2 * chunk, 5 | 3 * holder | skip, 3 | holder, 7 | 2 * holder)
    account(op, lanes(7, (2, 0, 2), (1, 0, 0), (1, 0, 1)), LAYOUT, VIEW, base=0)
    held = {chunk: who for chunk, who in enumerate(op.finals) if who}
    assert held == {2: (0, 4), 3: (0, 1, 4), 5: (0, 1, 4), 6: (0, 1, 4), 7: (0, 1, 4)}


def test_few_chunks_use_few_lanes() -> None:
    op = an_op(2)
    account(op, lanes(7, (1, 0, 1), (1, 0, 0), (9, 0, 9)), LAYOUT, VIEW, base=0)
    assert op.finals == [(0, 4), None]
    op.tasks = all_reduce(2)


def test_who_is_waited_for() -> None:
    op = an_op(6)  # two tasks a lane
    done = (12, 12, 12)

    def late(mine: tuple[int, int, int], *others: tuple[int, int, int]) -> tuple[int, ...]:
        theirs = {m: lanes(7, done, words, done) for m, words in zip((0, 4), others, strict=True)}
        return missing(op, lanes(7, done, mine, done), theirs, LAYOUT, VIEW, base=10)

    assert late((12, 10, 10), (12, 10, 10), (10, 10, 10)) == (4,)  # who has not posted
    assert late((12, 11, 10), (12, 10, 10), (12, 11, 11)) == (0,)  # who has not reduced
    assert late((12, 10, 10), (12, 10, 10), (12, 10, 10)) == ()  # one-shot: nobody reduces into staging
    assert late((12, 10, 11), (11, 10, 11), (12, 10, 11)) == (0,)  # the second task
    assert late(done, (12, 12, 11), (12, 12, 12)) == (0,)  # who has not taken the last
    assert late(done, (12, 12, 11), (12, 12, 10)) == (0, 4)
    assert late((10, 10, 10), (12, 12, 12), (12, 12, 12)) == ()  # nobody: we have not come to it ourselves


def test_who_is_in_another_epoch_is_waited_for() -> None:
    op = an_op(3)
    mine = lanes(7, (1, 0, 0), (1, 0, 0), (1, 0, 0))
    theirs = {0: lanes(6, (9, 9, 9), (9, 9, 9), (9, 9, 9)), 4: lanes(8, (0, 0, 0), (0, 0, 0), (0, 0, 0))}
    assert missing(op, mine, theirs, LAYOUT, VIEW, base=0) == (0, 4)


def test_the_table_of_members() -> None:
    reached = {m: Reached(8000 + m, 2000 + m, 1000 + m, memoryview(b"")) for m in VIEW.members}
    table = view_words(VIEW, reached, 17)
    head = [table[i] for i in (words.EPOCH, words.MEMBERS, words.ME, words.SOURCES, words.CONTRIBUTES, words.SOLE)]
    assert head == [7, 3, 1, 2, False, -1]
    assert table[words.RESUMED] == 17
    assert table[words.COPY] == 8001 + 8 * words.LANES_AT
    assert table[words.FLAGS_OF : words.FLAGS_OF + 4] == [1000, 1001, 1004, 0]
    assert table[words.STAGING_OF : words.STAGING_OF + 4] == [2000, 2001, 2004, 0]
    assert table[words.SOURCE_STAGING : words.SOURCE_STAGING + 3] == [2000, 2004, 0]
    alone = GroupView(7, 1, (0, 1, 4), frozenset((4,)), one_host=False)
    assert [view_words(alone, reached, 0)[i] for i in (words.SOLE, words.ONE_HOST)] == [2, 0]


def test_an_op_whose_elements_travel_coded_is_another_call_with_a_kernel_of_its_own() -> None:
    array = np.zeros(1000, np.float32)
    plain, coded = (KernelOperation(array, "float32", "avg", 4096, compression=how) for how in ("input", "fp8"))
    assert plain.call != coded.call
    assert (len(plain.finals), plain.elements) == (len(coded.finals), coded.elements) == (1, 1024)
    assert [variant(op, 16, LAYOUT, VIEW).CODED for op in (plain, coded)] == [False, True]
    views = [dataclasses.replace(VIEW, contributing=frozenset(some)) for some in ((1,), (0, 4), (0, 1, 4))]
    assert {variant(coded, 16, LAYOUT, view).W for view in views} == {0}, "a kernel for each number of contributors"
    assert len({id(variant(coded, 16, LAYOUT, view)) for view in views}) == 1, "it is loaded again after a loss"
    loops = [variant(plain, 16, LAYOUT, view) for view in views if len(view.contributors) not in (2, 4, 8)]
    assert len(set(map(id, loops))) == 1


@pytest.mark.parametrize("how", ["input", "fp32", "fp8"])
def test_a_replay_is_the_call_that_was_captured(how: str) -> None:
    """Else what is said of it, when members have captured different ones, were of another call."""
    op = KernelOperation(np.zeros(1000, np.float32), "float32", "avg", 4096, atomic=True, compression=how)
    replay = replay_of(op, 4096)
    assert (replay.call, replay.compression, len(replay.finals)) == (op.call, how, len(op.finals))
