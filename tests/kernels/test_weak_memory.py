"""The all-reduce kernel over memory as weak as a GPU's, in random schedules; and without each of its fences."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from ftcomm.engines.gpu_kernel.collective import CollectiveOperation
from ftcomm.kernels.device import INTERPRETED, allreduce, attempts, lane, signal
from ftcomm.kernels.device import words as w

from . import ranks as ranks_module
from .ranks import CHUNK, DEADLINE, Op, Rank, group, running, seed, shared, until, view_change
from .test_allreduce import arrays, expected
from .test_collectives import Case

if INTERPRETED:
    from .weak_memory import WeakMemory

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="its ranks are processes that share host memory"),
]

QUIET = 0.01  # s for which a rank is watched that is said to touch nothing
HANGS = 4.0  # s after which one without a fence is given up: two of its processes poll all the while
WRITE_TIMEOUT = 1.0  # s of it for a kernel that has yet to write: on a busy machine an interpreter needs tenths of them


def _launch(
    ranks: list[Rank], x: torch.Tensor | CollectiveOperation, me: int, chance: int, change: Callable[[], None] | None,
    coded: bool = False,
) -> None:  # fmt: skip
    """In the process of a rank."""
    others = [each for rank in ranks if rank is not ranks[me] for each in (rank.flags, rank.staging)]
    memory = WeakMemory([*others, ranks[me].ctl, ranks[me].tasks], chance + me)
    memory.install()
    ranks_module.ONE_SHOT = 0
    if change:
        change()
    if isinstance(x, CollectiveOperation):
        ranks[me].run(x)
    else:
        ranks[me].launch(x, coded=coded)
    memory.settle()


def play(
    chance: int, change: Callable[[], None] | None = None, *, changes: int = 3, shape: tuple[int, int] | None = None,
    coded: bool = False,
) -> str:  # fmt: skip
    """One op of two or three ranks, frozen `changes` times at any moment. Returns what is wrong, or "" if nothing."""
    draw = random.Random(chance)
    size, count = shape or draw.choice(((2, 300), (2, 700), (3, 300)))
    ranks, xs = group(size), arrays(count, torch.float32, size)
    want, everybody = expected([x.clone() for x in xs], "sum", coded), list(range(size))
    op = Op(xs, 0)
    deadline = DEADLINE if change is None else HANGS
    bodies = [functools.partial(_launch, ranks, xs[me], me, chance, change, coded) for me in everybody]
    with running(*bodies):
        for epoch in range(2, changes + 2):
            time.sleep(draw.random() * 0.1)
            for rank in ranks:
                rank.freeze()
            before = [_memory(rank) for rank in ranks]
            time.sleep(QUIET)
            if any(not torch.equal(now, then) for now, then in zip(map(_memory, ranks), before, strict=True)):
                return "it was said to be quiet, and wrote"
            for who, rank in enumerate(ranks):
                if rank.begun and rank.status not in (w.ABORTED, w.OK):
                    return f"quiet in status {rank.status}"
                op.account(who, rank, everybody)
            if max(rank.returned for rank in ranks):
                break
            op.plan(everybody, ranks)
            view_change(ranks, everybody, epoch, 0)
        else:
            try:
                until("all have returned", lambda: all(rank.returned for rank in ranks) or _differ(ranks), deadline)
            except AssertionError:
                if change is None:
                    raise
                return ""  # it hangs, or is slow: that shows nothing
        if _differ(ranks):
            return "calls that are equal were found to differ"
    for who, (rank, x) in enumerate(zip(ranks, xs, strict=True)):
        done = range(op.chunks) if rank.returned else op.finals[who]
        for chunk in done:
            part = slice(chunk * CHUNK // 4, (chunk + 1) * CHUNK // 4)
            if not torch.equal(x[part], want[part]):
                return f"chunk {chunk} of rank {who} is FINAL, and wrong"
    return ""


def move(chance: int, change: Callable[[], None] | None = None, *, kind: str = "allgather") -> str:
    """One of the other collectives, of two ranks. Returns what is wrong, or "" if nothing."""
    ranks, case = group(2), Case(kind, 2, 200)
    deadline = DEADLINE if change is None else HANGS
    bodies = [functools.partial(_launch, ranks, case.ops[me], me, chance, change) for me in range(2)]
    with running(*bodies):
        try:
            until("all have returned", lambda: all(rank.returned for rank in ranks) or _differ(ranks), deadline)
        except AssertionError:
            if change is None:
                raise
            return ""  # it hangs, or is slow: that shows nothing
    if _differ(ranks):
        return "calls that are equal were found to differ"
    return "" if case.right(0) and case.right(1) else "what was moved is wrong"


def _differ(ranks: Sequence[Rank]) -> bool:
    return any(rank.ctl[w.MISMATCHED] for rank in ranks)


def _memory(rank: Rank) -> torch.Tensor:
    """What a quiet rank leaves alone. A launch that begins then says so, looks at OPEN once more and says that it has
    ended; and the programs of one that has returned tell each other in `state` that they leave."""
    ctl = rank.ctl[: w.NEWS].clone()
    ctl[w.BEGUN] = ctl[w.FINISHED] = 0
    return torch.cat([rank.words, rank.flags, rank.staging, ctl, rank.state[[w.NUMBER, w.BASE]]])


def hold(chance: int, change: Callable[[], None] | None = None, *, changes: int = 8) -> str:
    """One of two ranks, whose peer never comes: frozen at any moment, and at last its op is returned by the host."""
    draw = random.Random(chance)
    ranks, xs = group(2), arrays(700, torch.float32, 2)
    rank = ranks[0]
    with running(functools.partial(_launch, ranks, xs[0], 0, chance, change)) as processes:
        for epoch in range(2, changes + 2):
            until("begun", lambda: rank.begun and rank.ctl[w.BEGUN] > rank.ctl[w.FINISHED])
            time.sleep(draw.random() * 0.01)
            rank.freeze()
            status, before = rank.status, _memory(rank)
            time.sleep(QUIET)
            if status != w.ABORTED or not torch.equal(_memory(rank), before):
                return f"it was said to be quiet, and wrote: status {status}, then {rank.status}"
            last = epoch == changes + 1
            view_change(ranks[:1] if last else ranks, [0] if last else [0, 1], epoch, int(last))
        processes[0].join(20.0)
        if processes[0].exitcode != 0 or rank.ctl[w.STARTED] != 1:
            return "it has begun an op that the host had returned"
    return ""


def freeze_as_it_begins(chance: int, *, fenced: bool) -> str:
    """The host freezes between the word that an attempt begins and the second look at OPEN."""
    ranks, xs = group(2), arrays(700, torch.float32, 2)
    rank, at = ranks[0], shared(1)  # 1: the kernel is there, 2: the host has frozen it

    def body() -> None:
        memory = WeakMemory([ranks[1].flags, rank.ctl], chance)
        memory.install()

        def pause() -> None:
            if fenced:
                memory.full_fence()
            if not at[0]:
                at[0] = 1
                until("the host has looked", lambda: at[0] == 2)

        attempts.full_fence = pause  # type: ignore[assignment]
        ranks[0].launch(xs[0])

    with running(body):
        until("it begins", lambda: at[0] == 1)
        rank.ctl[w.OPEN] = 0
        seen = rank.ctl[w.BEGUN] == rank.ctl[w.FINISHED]  # nothing has begun, so nothing will
        before = _memory(rank)
        at[0] = 2
        if not seen:
            rank.settle()
            before = _memory(rank)
        end = time.monotonic() + WRITE_TIMEOUT
        while time.monotonic() < end:
            if not torch.equal(_memory(rank), before):
                return "it was said to be quiet, and wrote"
            time.sleep(QUIET)
        return ""


def _first(found: Iterator[str]) -> str:
    """The first that is wrong; as the seeds are fixed, the same each time but for the pace of the processes."""
    wrong = next(filter(None, found), "")
    print(wrong)
    return wrong


@pytest.mark.protocol
def test_sums_and_view_changes_hold() -> None:
    chance = seed()
    for each in range(chance, chance + 2):
        assert play(each) == "", each
        assert play(each, coded=True) == "", each
        assert hold(each) == "", each
        assert freeze_as_it_begins(each, fenced=True) == "", each
    for kind in ("allgather", "scatter", "reduce_scatter", "reduce"):
        assert move(chance, kind=kind) == "", (chance, kind)


def _nothing() -> None:
    pass


def _store(flag: object, copy: object, value: object) -> None:
    signal.write(flag, value)
    signal.write(copy, value)


_one_shot = functools.partial(play, changes=0, shape=(2, 300))
_two_shot = functools.partial(play, changes=0, shape=(3, 300))
_coded_one_shot = functools.partial(play, changes=0, shape=(2, 300), coded=True)
_coded_two_shot = functools.partial(play, changes=0, shape=(3, 300), coded=True)


@pytest.mark.protocol
@pytest.mark.parametrize(
    ("history", "change"),
    [
        pytest.param(_one_shot, lambda: setattr(lane, "fence", _nothing), id="the fence behind flags"),
        pytest.param(_one_shot, lambda: setattr(allreduce, "announce", _store), id="the release of POSTED"),
        pytest.param(move, lambda: setattr(lane, "fence", _nothing), id="the fence behind flags, where rows are moved"),
        pytest.param(move, lambda: setattr(allreduce, "announce", _store), id="the release where rows are moved"),
        pytest.param(_two_shot, lambda: setattr(lane, "announce", _store), id="the release of REDUCED"),
        pytest.param(_coded_one_shot, lambda: setattr(lane, "fence", _nothing), id="the fence in front of codes"),
        pytest.param(_coded_one_shot, lambda: setattr(allreduce, "announce", _store), id="the release of codes"),
        pytest.param(_coded_two_shot, lambda: setattr(lane, "announce", _store), id="the release of reduced codes"),
        pytest.param(hold, lambda: setattr(attempts, "fence", _nothing), id="the fence behind OPEN"),
        pytest.param(hold, lambda: setattr(attempts, "publish", signal.write), id="the release of FINISHED"),
    ],
)
def test_without_one_of_them_something_breaks(
    history: Callable[[int, Callable[[], None]], str], change: Callable[[], None]
) -> None:
    assert _first(history(chance, change) for chance in range(40))


@pytest.mark.protocol
def test_without_the_full_fence_a_frozen_launch_goes_on() -> None:
    assert _first(freeze_as_it_begins(chance, fenced=False) for chance in range(40))
