"""The all-reduce kernel in real processes: its sums, its ends, and what its words tell a host with which it goes on."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch

from ftcomm.kernels.device import INTERPRETED, attempts
from ftcomm.kernels.device import allreduce as module
from ftcomm.kernels.device import words as w
from ftcomm.kernels.epochs import COUNTER
from ftcomm.kernels.host.reduce import Reducer, operand
from tests.rigs.fp8_results import coded as coded_result

from .ranks import CHUNK, LANES, Op, Rank, group, join, running, seed, start, until, view_change

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.skipif(not INTERPRETED, reason="its ranks are processes that share host memory"),
]


def arrays(count: int, dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    """One that holds the same in all processes, for each rank."""
    generator = torch.Generator().manual_seed(count * 31 + ranks)
    made = []
    for _ in range(ranks):
        if dtype.is_floating_point:
            x = torch.randn(count, generator=generator).to(dtype)
        else:
            x = torch.randint(0, 127, (count,), generator=generator).to(dtype)
        made.append(x.share_memory_())
    return made


def expected(sources: list[torch.Tensor], op: str, coded: bool = False) -> torch.Tensor:
    """By the host form, in the order of the ranks; of elements that travel as fp8, by the definition of that."""
    name = str(sources[0].dtype).removeprefix("torch.")
    carriers = [(x.view(torch.uint16) if name == "bfloat16" else x).numpy() for x in sources]
    if coded:
        return torch.from_numpy(coded_result(carriers, name, op)).view(sources[0].dtype)
    out = np.empty_like(carriers[0])
    Reducer().get(name, op)([operand(name, x) for x in carriers], operand(name, out))
    return torch.from_numpy(out).view(sources[0].dtype)


def reduce_all(ranks: list[Rank], *ops: tuple[list[torch.Tensor], str], coded: bool = False) -> None:
    """One op after the other; an array of each rank, and what is done with them."""

    def body(me: int) -> None:
        for xs, op in ops:
            ranks[me].launch(xs[me], op=op, coded=coded)
            assert ranks[me].status in (w.OK, w.MISMATCH)

    join(start(*[functools.partial(body, me) for me in range(len(ranks))]))


def check(
    ops: list[tuple[list[torch.Tensor], str]], size: int, contributing: list[int] | None = None, coded: bool = False
) -> None:
    """Run all in one group; every rank has the bits of the host form, and has returned them all."""
    ranks = group(size, contributing)
    who = range(size) if contributing is None else contributing
    wanted = [expected([xs[i].clone() for i in who], op, coded) for xs, op in ops]
    reduce_all(ranks, *ops, coded=coded)
    assert [rank.returned for rank in ranks] == [len(ops)] * size
    for (xs, op), want in zip(ops, wanted, strict=True):
        for x in xs:
            assert x.numel() == 0 or torch.equal(x.view(torch.uint8), want.view(torch.uint8)), (op, x.dtype, x.numel())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums(size: int) -> None:
    """One after the other in one epoch, one-shot and two-shot: the counters of the lanes go on."""
    check([(arrays(count, torch.float32, size), "sum") for count in (0, 1, 255, 257, 700, 4100, 100)], size)


@pytest.mark.parametrize(
    ("size", "dtype", "op"),
    [
        (1, "float32", "sum"),
        (2, "float16", "avg"),
        (3, "bfloat16", "sum"),
        (5, "float32", "avg"),
        pytest.param(8, "float32", "sum", marks=pytest.mark.sweep),
    ],
)
def test_coded_sums(size: int, dtype: str, op: str) -> None:
    """By the definition of the code, of all an op at once: one-shot and two-shot, of no block, a part of one and many;
    with zeros, NaN, infinities, what is subnormal and what overflows among them."""
    counts = (0, 1, 255, 257, 700, 2600) if size < 4 else (257, 2049)
    ops = [(arrays(count, getattr(torch, dtype), size), op) for count in counts]
    largest = torch.finfo(getattr(torch, dtype)).max
    odd = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), largest, -largest, 1e-40, 3e-8)
    for xs, _ in ops:
        for who, x in enumerate(xs if len(xs[0]) > 2048 else ()):
            x[256:512] = 0.0
            x[700 : 700 + len(odd) * 128 : 128] = torch.tensor(odd).roll(who).to(x.dtype)
            x[2048:] = -0.0
    check(ops, size, coded=True)


def test_counters_go_on_beyond_32_bits() -> None:
    ranks = group(3)
    reduce_all(ranks, (arrays(1, torch.float32, 3), "sum"))
    for rank in ranks:
        rank.state[w.BASE] = far = (1 << 32) - 3
        for lane in range(LANES):
            rank.flags[lane * w.LINE :][:3] = 1 << COUNTER | far
    ops = [arrays(count, torch.float32, 3) for count in (300, 2600, 300)]
    wants = [expected([x.clone() for x in xs], "sum") for xs in ops]
    reduce_all(ranks, *[(xs, "sum") for xs in ops])
    assert int(ranks[0].state[w.BASE]) > 1 << 32
    assert all(torch.equal(x, want) for xs, want in zip(ops, wants, strict=True) for x in xs)


@pytest.mark.parametrize(
    ("dtype", "ops"),
    [
        (torch.float16, ("sum", "avg")),
        (torch.bfloat16, ("max", "avg")),
        (torch.float64, ("product",)),
        (torch.int8, ("min", "avg", "band")),
        (torch.int64, ("bor",)),
        (torch.uint8, ("sum", "bxor")),
    ],
)
def test_types(dtype: torch.dtype, ops: tuple[str, ...]) -> None:
    """Each type and each op; all pairs of them are in test_reduce_kernels.py."""
    check([(arrays(701, dtype, 3), op) for op in ops], 3)


def test_members_with_other_grids() -> None:
    ranks, xs = group(2), arrays(5000, torch.float32, 2)
    want = expected([x.clone() for x in xs], "sum")
    join(start(lambda: ranks[0].launch(xs[0], grid=1), lambda: ranks[1].launch(xs[1], grid=LANES)))
    assert all(torch.equal(x, want) for x in xs)


@pytest.mark.parametrize(
    ("contributing", "coded"),
    [
        ([0, 2], False),
        ([1], True),
        *[pytest.param(*each, marks=pytest.mark.sweep) for each in (([1], False), ([0, 2], True))],
    ],
)
def test_who_catches_up_gets_the_sum_of_the_others(contributing: list[int], coded: bool) -> None:
    check([(arrays(count, torch.float32, 3), "sum") for count in (300, 2600)], 3, contributing, coded)


def test_calls_that_differ_end_the_op_everywhere_and_touch_nothing() -> None:
    ranks = group(3)
    xs = [*arrays(2600, torch.float32, 2), *arrays(300, torch.float32, 1)]  # lanes 1..3 exist on two of them only
    before = [x.clone() for x in xs]
    then = arrays(2600, torch.float32, 3)
    want = expected([x.clone() for x in then], "sum")

    def both(me: int) -> None:
        ranks[me].launch(xs[me])
        ranks[me].launch(then[me])

    with running(*[functools.partial(both, me) for me in range(3)]) as processes:
        until("all have ended the op", lambda: all(rank.ctl[w.FINISHED] == 1 for rank in ranks))
        assert [rank.status for rank in ranks] == [w.MISMATCH] * 3
        time.sleep(0.1)  # nothing is awaited here: time for a launch that does not wait until the host has heard
        assert [int(rank.ctl[w.BEGUN]) for rank in ranks] == [1] * 3
        for rank in ranks:
            rank.ctl[w.HEARD] = 1
        join(processes)
    for rank, x, kept in zip(ranks, xs, before, strict=True):
        assert (rank.returned, rank.status, int(rank.ctl[w.MISMATCHED])) == (2, w.OK, 1)
        assert [int(rank.ctl[w.SEEN + 2 * i + 1]) for i in range(3)] == [2600, 2600, 300]
        assert torch.equal(x, kept)
    assert all(torch.equal(x, want) for x in then)


def test_a_launch_holds_while_frozen_and_counts_as_not_called() -> None:
    ranks, xs = group(2), arrays(700, torch.float32, 2)
    want = expected([x.clone() for x in xs], "sum")
    for rank in ranks:
        rank.freeze()
    with running(*[lambda r=r, x=x: r.launch(x) for r, x in zip(ranks, xs, strict=True)]) as processes:
        time.sleep(0.1)  # nothing is awaited here: time for a launch that does not hold
        assert not any(rank.begun for rank in ranks)
        view_change(ranks, [0, 1], 2, 0)
        join(processes)
    assert all(torch.equal(x, want) for x in xs)


def test_a_launch_that_begins_as_the_host_freezes_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host writes OPEN between the moment that the launch says it begins and its second look."""
    (rank,), (x,) = group(1), arrays(700, torch.float32, 1)
    seen = []

    def freeze() -> None:
        if not seen:
            rank.ctl[w.OPEN] = 0

    def go_on() -> None:
        seen.append((int(rank.ctl[w.BEGUN] - rank.ctl[w.FINISHED]), int(rank.ctl[w.STARTED])))
        view_change([rank], [0], 2, 0)

    monkeypatch.setattr(attempts, "full_fence", freeze)
    monkeypatch.setattr(attempts, "rest", go_on)
    rank.launch(x)
    assert seen == [(0, 0)]
    assert (rank.returned, rank.status, int(rank.ctl[w.BEGUN]), int(rank.ctl[w.FINISHED])) == (1, w.OK, 2, 2)


@pytest.mark.parametrize("grid", [1, LANES])
def test_a_launch_ends_whose_op_the_host_has_returned(grid: int) -> None:
    """As all members hold it; nothing is touched any more, and the next op has the next number."""
    ranks, (x, y) = group(2), arrays(5000, torch.float32, 2)
    before = x.clone()

    def two() -> None:
        ranks[0].launch(x, grid=grid)
        ranks[0].launch(y, grid=grid, template=1)

    with running(two) as processes:
        until("begun", lambda: ranks[0].begun)
        ranks[0].freeze()
        view_change(ranks[:1], [0], 2, 1)
        join(processes)
    assert (ranks[0].returned, ranks[0].status, int(ranks[0].ctl[w.CALLED])) == (2, w.OK, 2)
    assert torch.equal(x, before)


def test_after_the_end_nothing_runs() -> None:
    (rank,), (x,) = group(1), arrays(700, torch.float32, 1)
    rank.ctl[w.OPEN] = w.CLOSED
    before = torch.cat((rank.words, rank.flags))
    rank.launch(x)
    assert (rank.returned, int(rank.ctl[w.BEGUN])) == (0, 0)
    assert torch.equal(torch.cat((rank.words, rank.flags)), before)


def test_a_wait_ends_by_its_deadline() -> None:
    ranks, (x, _) = group(2), arrays(700, torch.float32, 2)
    before = x.clone()
    ranks[0].launch(x, deadline=0.05)
    assert (ranks[0].returned, ranks[0].status) == (0, w.TIMED_OUT)
    assert torch.equal(x, before)


def test_a_launch_that_is_broken_off_goes_on_in_the_next_epoch() -> None:
    ranks, xs = group(2), arrays(700, torch.float32, 2)
    want = expected([x.clone() for x in xs], "sum")
    with running(lambda: ranks[0].launch(xs[0])) as processes:
        until("begun", lambda: ranks[0].begun)
        ranks[0].freeze()
        assert ranks[0].status == w.ABORTED
        time.sleep(0.1)  # nothing is awaited here: time for a launch that ends
        assert processes[0].is_alive()
        view_change(ranks, [0, 1], 2, 0)
        join([*processes, *start(lambda: ranks[1].launch(xs[1]))])
    assert all(torch.equal(x, want) for x in xs)


@pytest.mark.parametrize("coded", [False, True])
def test_what_is_reduced_again_is_reduced_from_the_copy(coded: bool) -> None:
    """An op that may only have one set of contributors: what was FINAL becomes INPUT once more."""
    (rank,), (x, kept) = group(1), arrays(700, torch.float32, 2)
    final = x.clone()
    rank.freeze()
    for i, word in enumerate((0, 1 | 1 << w.HOLDER | 1 << w.SKIP, 2)):
        rank.tasks[i] = word
    rank.left = 3
    view_change([rank], [0], 2, 0)
    rank.launch(x, kept=kept, coded=coded)
    own = slice(CHUNK // 4, 2 * CHUNK // 4)
    want = expected([kept], "sum", coded)
    want[own] = final[own]
    assert torch.equal(x, want)


def test_a_hundred_aborts_and_then_a_right_sum() -> None:
    """Frozen at any moment of its op, and entered anew; the peer of all these ops comes last."""
    chance = random.Random(seed())
    ranks, xs = group(2), arrays(5000, torch.float32, 2)
    want = expected([x.clone() for x in xs], "sum")
    rounds = 100

    with running(lambda: ranks[0].launch(xs[0])) as processes:
        for epoch in range(2, rounds + 2):
            until("begun", lambda: ranks[0].begun and ranks[0].ctl[w.BEGUN] > ranks[0].ctl[w.FINISHED])
            time.sleep(chance.random() * 0.005)
            ranks[0].freeze()
            assert ranks[0].status == w.ABORTED
            assert ranks[0].taken(20) == []
            view_change(ranks, [0, 1], epoch, 0)
        join([*processes, *start(lambda: ranks[1].launch(xs[1]))])
    assert all(torch.equal(x, want) for x in xs)


def stopping(rank: Rank, x: torch.Tensor, before: int, coded: bool = False) -> Callable[[], None]:
    """It launches, and stops before it takes its task number `before`, from 0 on."""

    def body() -> None:
        take, taken = module.take, itertools.count()

        def stops(*args: object) -> object:
            if next(taken) == before:
                os.kill(os.getpid(), signal.SIGSTOP)
            return take(*args)

        module.take = stops  # of this process
        rank.launch(x, coded=coded)

    return body


def until_stopped(process: BaseProcess) -> None:
    stat = Path(f"/proc/{process.pid}/stat")
    until("it has stopped", lambda: stat.read_text().rpartition(") ")[2].startswith("T"))


@pytest.mark.parametrize("coded", [False, True])
def test_who_was_left_behind_never_returns_and_writes_to_nobody(coded: bool) -> None:
    """Stopped in mid-op; the others go on without it, through its staging as well, before it wakes."""
    ranks, xs = group(3), arrays(4100, torch.float32, 3)
    stops = stopping(ranks[2], xs[2], 2, coded)
    others = [lambda r=r, x=x: r.launch(x, coded=coded) for r, x in zip(ranks[:2], xs[:2], strict=True)]
    with running(*others, stops) as processes:
        until_stopped(processes[2])
        assert ranks[2].flags[w.TAKEN] == 1 << COUNTER | 2
        for rank in ranks[:2]:
            rank.freeze()
        op = Op(xs, 0)
        for who in (0, 1):
            op.account(who, ranks[who], [0, 1, 2])
        op.plan([0, 1], ranks)
        view_change(ranks[:2], [0, 1], 2, 0)
        join(processes[:2])
        assert torch.equal(xs[0], xs[1])
        after = [torch.cat((ranks[who].words, ranks[who].flags)) for who in (0, 1)]
        result = xs[0].clone()
        os.kill(processes[2].pid, signal.SIGCONT)  # type: ignore[arg-type]
        time.sleep(0.2)  # nothing is awaited here: time for it to do harm
        assert ranks[2].returned == 0
        ranks[2].freeze()
        assert ranks[2].status == w.ABORTED
        assert all(torch.equal(torch.cat((ranks[who].words, ranks[who].flags)), after[who]) for who in (0, 1))
        assert torch.equal(xs[0], result)


def test_who_was_left_behind_does_not_return_what_changes_under_it() -> None:
    """Stopped in the last step of an op that the others have all of: one of them posts its next op, in the next epoch,
    where it reads."""
    ranks, xs = group(3), arrays(200, torch.float32, 3)
    (then,) = arrays(200, torch.float32, 1)
    bodies = (lambda: ranks[0].launch(xs[0]), lambda: ranks[1].launch(xs[1]), stopping(ranks[2], xs[2], 0))
    with running(*bodies) as processes:
        until_stopped(processes[2])
        until("the others have it", lambda: all(rank.flags[w.TAKEN] == 1 << COUNTER | 1 for rank in ranks[:2]))
        for rank in ranks[:2]:
            rank.freeze()
        view_change(ranks[:2], [0, 1], 2, 1)  # in which that op has returned
        join(processes[:2])
        with running(lambda: ranks[0].launch(then)):
            until("it has posted", lambda: ranks[0].flags[w.POSTED] == 2 << COUNTER | 1)
            os.kill(processes[2].pid, signal.SIGCONT)  # type: ignore[arg-type]
            until("it has taken", lambda: ranks[2].flags[w.TAKEN] == 1 << COUNTER | 1)
            time.sleep(0.2)  # nothing is awaited here: time for it to return
            assert ranks[2].returned == 0


@pytest.mark.parametrize(
    ("count", "size", "coded"),
    [
        (600, 4, False),
        (4100, 2, False),
        (600, 2, True),
        (4100, 4, True),
        *[pytest.param(*each, marks=pytest.mark.sweep) for each in ((600, 2, False), (4100, 4, False))],
        *[pytest.param(*each, marks=pytest.mark.sweep) for each in ((600, 4, True), (4100, 2, True))],
    ],
)
def test_the_survivors_finish_the_op(size: int, count: int, coded: bool) -> None:
    """One is killed at any moment. What the words of the others say, and the plan, make one result of it."""
    chance = random.Random(seed())
    ranks, xs = group(size), arrays(count, torch.float32, size)
    inputs = [x.clone() for x in xs]
    op, everybody, victim = Op(xs, 0), list(range(size)), chance.randrange(size)
    survivors = [who for who in everybody if who != victim]
    bodies = [lambda r=r, x=x: r.launch(x, coded=coded) for r, x in zip(ranks, xs, strict=True)]
    with running(*bodies) as processes:
        until("begun", lambda: ranks[victim].begun or ranks[victim].returned)
        time.sleep(chance.random() * (0.02 if count < 1000 else 0.3))
        processes[victim].kill()
        for who in survivors:
            ranks[who].freeze()
            op.account(who, ranks[who], everybody)
        number = max(ranks[who].returned for who in survivors)
        if number == 0:
            op.plan(survivors, ranks)
            view_change([ranks[who] for who in survivors], [survivors.index(who) for who in survivors], 2, 0)
            join([processes[who] for who in survivors])
            assert all(ranks[who].returned == 1 for who in survivors)
            for who in survivors:
                op.finals[who].update({t.chunk: t.contributors or tuple(survivors) for t in op.tasks})
    for who in survivors:
        assert len(op.finals[who]) == op.chunks
        assert op.finals[who] == op.finals[survivors[0]]
        assert torch.equal(xs[who], xs[survivors[0]])
    for chunk, contributors in op.finals[survivors[0]].items():
        part = slice(chunk * CHUNK // 4, (chunk + 1) * CHUNK // 4)
        want = expected([inputs[who][part].clone() for who in contributors], "sum", coded)
        assert torch.equal(xs[survivors[0]][part], want), (chunk, contributors)
