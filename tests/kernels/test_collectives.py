"""The collectives that are no all-reduce, by the same kernel in real processes: what they move, and what is left of
them when one is killed in the middle. Views are changed by the code of the host that does it in jobs."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcomm.collective.inflight import Inflight
from ftcomm.collective.plan import GroupView
from ftcomm.engines.base import CollectiveCall
from ftcomm.engines.gpu_kernel.collective import CALLS, CollectiveOperation
from ftcomm.engines.gpu_kernel.launch import account, task_words
from ftcomm.errors import LostError
from ftcomm.kernels.device import INTERPRETED
from ftcomm.kernels.device import allreduce as module
from ftcomm.kernels.device import words as w
from tests.rigs import results_of_collectives as results
from tests.rigs.results_of_collectives import REDUCING, ROOTED

from .ranks import CHUNK, LANES, Rank, group, join, running, seed, start, until, view_change
from .test_allreduce import arrays, expected, until_stopped

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.skipif(not INTERPRETED, reason="its ranks are processes that share host memory"),
]

MOVING = ("broadcast", "allgather", "gather", "scatter", "alltoall")


class Case:
    """One call among `size` ranks, of `count` elements of each: the op of each rank, with arrays of its own."""

    def __init__(
        self, kind: str, size: int, count: int, *, dtype: torch.dtype = torch.float32, op: str = "sum", root: int = 0,
        in_place: bool = False, offset: int = 0, counts: results.Counts = (),
    ) -> None:  # fmt: skip
        self.kind, self.size, self.count, self.in_place, self.root = kind, size, count, in_place, root
        self.op = op if kind in REDUCING else ""
        self.counts = counts
        lengths = [results.lengths(kind, size, count, rank, root, counts) for rank in range(size)]
        self.given = [arrays(offset + given, dtype, size)[rank][offset:] for rank, (given, _) in enumerate(lengths)]
        self.inputs = [x.clone() for x in self.given]
        self.out = [arrays(offset + taken, dtype, size)[0][offset:].zero_() for _, taken in lengths]
        if kind in ("broadcast", "reduce"):
            self.out = self.given
        elif in_place:
            for rank, (given, out) in enumerate(zip(self.given, self.out, strict=True)):
                part = slice(rank * count, (rank + 1) * count)
                if kind in ("allgather", "gather") and len(out):
                    self.given[rank] = out[part].copy_(given)
                elif kind in ("reduce_scatter", "scatter") and len(given):
                    self.out[rank] = given[part]
        self.ops = [self._op(rank) for rank in range(size)]

    def _op(self, rank: int) -> CollectiveOperation:
        array, source, roster = self.out[rank], self.given[rank], tuple(range(self.size))
        dtype = str(array.dtype).removeprefix("torch.")
        call = CollectiveCall(self.kind, roster, rank, self.root if self.kind in ROOTED else None, self.op, self.counts)
        addresses = array.data_ptr(), source.data_ptr()
        return CollectiveOperation(call, array, source, dtype, self.count, array.element_size(), CHUNK, addresses)

    def wanted(self, rank: int, contributing: Sequence[int] | None = None) -> torch.Tensor:
        who = range(self.size) if contributing is None else contributing
        reduced = functools.partial(expected, op=self.op)
        return results.wanted(self.kind, self.inputs, self.count, rank, self.root, who, reduced, self.counts)

    def right(self, rank: int, contributing: Sequence[int] | None = None) -> bool:
        return self.kind == "barrier" or same(self.out[rank], self.wanted(rank, contributing))


def uneven(counts: results.Counts, **how: Any) -> Case:
    """An alltoall of unequal parts."""
    return Case("alltoall", len(counts), 0, counts=counts, **how)


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.numel() == 0 or torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def play(*cases: Case | list[torch.Tensor], size: int, contributing: list[int] | None = None, grid: int = 1) -> None:
    """One after the other in one group, a list for an all-reduce of it; all are right on all ranks."""
    ranks = group(size, contributing)
    who = range(size) if contributing is None else contributing
    sums = [None if isinstance(case, Case) else expected([case[i].clone() for i in who], "sum") for case in cases]

    def body(me: int) -> None:
        for case in cases:
            if isinstance(case, Case):
                ranks[me].run(case.ops[me], grid=grid, sources=len(who))
            else:
                ranks[me].launch(case[me], grid=grid)
            assert ranks[me].status == w.OK

    join(start(*[functools.partial(body, me) for me in range(size)]))
    assert [rank.returned for rank in ranks] == [len(cases)] * size
    for case, want in zip(cases, sums, strict=True):
        for rank in range(size):
            if want is None:
                assert case.right(rank, contributing), (case.kind, rank, case.count)
            else:
                assert same(case[rank], want)


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_moved(size: int) -> None:
    """Of no element, one, one row, several lanes and several rows of a lane; mixed with all-reduces, whose counters go
    on."""
    chance = random.Random(seed())
    kinds = [kind for kind in CALLS if kind != "barrier"]
    cases: list[Case | list[torch.Tensor]] = [
        Case(kind, size, 601, root=chance.randrange(size), in_place=kind != "alltoall" and chance.random() < 0.5)
        for kind in kinds
    ]
    cases += [Case(kind, size, chance.choice((1, 200)), root=size - 1) for kind in chance.sample(kinds, 4)]
    cases += [Case(kind, size, 0) for kind in ("barrier", *chance.sample(kinds, 3))]
    if size == 3:
        cases += [uneven([[chance.choice((0, 1, 80, 200, 500)) for _ in range(3)] for _ in range(3)]) for _ in "12"]
        cases += [uneven([[0, 0, 700], [0, 0, 0], [0, 0, 0]])]
    cases += [arrays(count, torch.float32, size) for count in (100, 1500)]
    chance.shuffle(cases)
    play(*cases, size=size)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float16, torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.sweep)]
)
def test_types_and_alignments(dtype: torch.dtype) -> None:
    """What is only moved goes in elements as wide as addresses and sizes allow."""
    cases = [
        Case(kind, 2, count, dtype=dtype, offset=offset) for kind in MOVING for count, offset in ((301, 3), (64, 0))
    ]
    cases += [uneven([[64, 8], [0, 16]], dtype=dtype), uneven([[64, 7], [0, 300]], dtype=dtype, offset=1)]
    assert len({case.ops[0].width for case in cases}) > 1 or dtype == torch.float64
    ops = ("avg", "max") if dtype.is_floating_point else ("avg", "bxor")
    reduced = [Case(kind, 2, 133, dtype=dtype, op=op, offset=1) for kind in REDUCING for op in ops]
    play(*cases, *reduced, size=2)


def test_programs_share_the_lanes() -> None:
    """The interpreter runs the programs of a launch one after the other, which no other waits for, if all lanes are
    claimed by the first."""
    play(*[Case(kind, 2, 601) for kind in CALLS if kind != "barrier"], size=2, grid=LANES)


@pytest.mark.parametrize("contributing", [[0, 2], [1]])
def test_who_catches_up_gives_what_moves_and_nothing_that_is_reduced(contributing: list[int]) -> None:
    reduced = [Case("reduce_scatter", 3, 500, op="avg"), *(Case("reduce", 3, 500, root=root) for root in range(2))]
    play(Case("allgather", 3, 200), *reduced, Case("alltoall", 3, 200), size=3, contributing=contributing)


def test_a_barrier_waits_for_all() -> None:
    ranks, case = group(2), Case("barrier", 2, 0)
    with running(lambda: ranks[0].run(case.ops[0])) as processes:
        until("it waits", lambda: ranks[0].flags[w.POSTED] & 0xFFFF == 1)
        time.sleep(0.05)  # nothing is awaited here: time for one that does not wait
        assert ranks[0].returned == 0
        join([*processes, *start(lambda: ranks[1].run(case.ops[1]))])
    assert [rank.returned for rank in ranks] == [1, 1]


DIFFERENT = {
    "kind": (Case("allgather", 3, 700), Case("alltoall", 3, 700)),
    "root": (Case("broadcast", 3, 700), Case("broadcast", 3, 700, root=1)),
    "size": (Case("reduce_scatter", 3, 1200), Case("reduce_scatter", 3, 5)),
    "all-reduce": (Case("reduce_scatter", 3, 700), [x[:700] for x in arrays(701, torch.float32, 3)]),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_calls_that_differ_end_the_op_everywhere_and_touch_nothing(what: str) -> None:
    most, other = DIFFERENT[what]
    ranks, then = group(3), Case("allgather", 3, 300)
    before = [x.clone() for x in most.out]

    def body(me: int) -> None:
        if me < 2:
            ranks[me].run(most.ops[me])
        elif isinstance(other, Case):
            ranks[me].run(other.ops[me])
        else:
            ranks[me].launch(other[me], call=700 << 16)
        ranks[me].run(then.ops[me])

    with running(*[functools.partial(body, me) for me in range(3)]) as processes:
        until("all have ended the op", lambda: all(rank.ctl[w.FINISHED] == 1 for rank in ranks))
        assert [rank.status for rank in ranks] == [w.MISMATCH] * 3
        for rank in ranks:
            rank.ctl[w.HEARD] = 1
        join(processes)
    assert all(same(x, y) for x, y in zip(most.out[:2], before, strict=False))
    assert [then.right(rank) for rank in range(3)] == [True] * 3


# -- losses ------------------------------------------------------------------------------------------------------------


class Host:
    """What the host of a rank knows, by the code of the product: its op in flight, and what of it is FINAL."""

    def __init__(self, rank: Rank, op: CollectiveOperation, members: Sequence[int]) -> None:
        self.rank, self.op = rank, op
        self.flight: Inflight[CollectiveOperation] = Inflight()
        self.flight.add(op)
        self.view = self._view(1, members)
        op.prepare(self.view)

    def _view(self, epoch: int, members: Sequence[int]) -> GroupView:
        return GroupView(epoch, self.rank.replica, tuple(members), frozenset(members))

    def freeze(self) -> Any:
        """-> Progress"""
        rank, op = self.rank, self.op
        rank.freeze()
        if rank.returned:
            for task in op.tasks:
                op.took(task, self.view)
            self.flight.return_first()
        elif rank.begun:
            words = memoryview(rank.words.numpy()).cast("B").cast("Q")
            account(op, words, SimpleNamespace(lanes=LANES), self.view, int(rank.ctl[w.BASE_OF]))  # type: ignore[arg-type]
        return self.flight.progress(int(rank.ctl[w.STARTED]))

    def enter(self, epoch: int, members: Sequence[int], progress: dict[int, Any]) -> None:
        """All but OPEN; the table of the members and what is left of the op."""
        self.view = self._view(epoch, members)
        self.flight.resume(progress, tuple(members))
        while self.flight.ops and not self.flight.ops[0].tasks:
            self.flight.return_first()
        if self.flight.ops and self.rank.begun:
            words = task_words(self.op, self.view)
            self.rank.tasks[: len(words)] = torch.tensor(words)
            self.rank.left = len(words)

    def end(self) -> None:
        """The op has returned."""
        for task in self.op.tasks if self.flight.ops else ():
            self.op.took(task, self.view)


def lose(case: Case, victim: int, when: Callable[[list[Rank], list[Any]], None]) -> tuple[list[Host], list[Rank]]:
    """One op, in which `victim` is killed `when` that returns; the others go on without it. -> their hosts"""
    everybody = list(range(case.size))
    survivors = [who for who in everybody if who != victim]
    ranks = group(case.size)
    hosts = {who: Host(ranks[who], case.ops[who], everybody) for who in survivors}
    with running(*[functools.partial(ranks[who].run, case.ops[who]) for who in everybody]) as processes:
        when(ranks, processes)
        processes[victim].kill()
        processes[victim].join()
        progress = {who: hosts[who].freeze() for who in survivors}
        for who in survivors:
            hosts[who].enter(2, survivors, progress)
        number = hosts[survivors[0]].flight.returned
        assert all(host.flight.returned == number for host in hosts.values())
        view_change([ranks[who] for who in survivors], list(range(len(survivors))), 2, number)
        join([processes[who] for who in survivors])
    for host in hosts.values():
        host.end()
    return list(hosts.values()), ranks


def check(case: Case, hosts: list[Host]) -> None:
    """All survivors have the same outcome, and what they have is right."""
    errors = {str(host.op.error) for host in hosts}
    assert len(errors) == 1, errors
    if hosts[0].op.error is not None:
        assert isinstance(hosts[0].op.error, LostError)
        assert case.kind in MOVING
        return
    part = hosts[0].op.part
    for host in hosts:
        rank = host.rank.replica
        assert None not in host.op.finals
        if case.kind == "barrier":
            continue
        if case.kind not in REDUCING or (case.kind == "reduce" and rank != case.root):
            assert case.right(rank), rank
            continue
        for row, who in enumerate(host.op.finals):
            assert who is not None
            here = slice(row * part // 4, (row + 1) * part // 4)
            assert same(case.out[rank][here], case.wanted(rank, who)[here]), (rank, row, who)


@pytest.mark.parametrize("kind", [*CALLS, "uneven"])
def test_the_survivors_finish_the_op(kind: str) -> None:
    """One is killed at any moment."""
    chance = random.Random(seed())
    for size, in_place in ((2, chance.random() < 0.5), (3, kind != "alltoall")):
        count = 0 if kind == "barrier" else chance.choice((200, 1000))
        if kind == "uneven":
            case = uneven([[chance.choice((0, 80, 500)) for _ in range(size)] for _ in range(size)])
        else:
            case = Case(kind, size, count, root=chance.randrange(size), in_place=in_place and kind != "alltoall")
        victim = chance.randrange(size)

        def some_time(ranks: list[Rank], processes: list[Any], victim: int = victim) -> None:
            until("begun", lambda: ranks[victim].begun or ranks[victim].returned)
            time.sleep(chance.random() * 0.1)

        hosts, _ = lose(case, victim, some_time)
        check(case, hosts)


def stopping(run: Callable[[], None], name: str, before: int) -> Callable[[], None]:
    """It stops before it does `name` for the time number `before`, from 0 on. A wait ends then, as it does if it looks
    at OPEN before it looks at the flags once more."""

    def body() -> None:
        does, left = getattr(module, name), [before]

        def stops(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGSTOP)
                if name == "await_flags":
                    return module.ABORTED
            return does(*arguments)

        setattr(module, name, stops)  # of this process
        run()

    return body


def stopped(case: Case, at: dict[int, tuple[str, int]], victim: int) -> list[Host]:
    """Ranks stop `at` their places, then `victim` is killed, and the others go on."""
    everybody = list(range(case.size))
    survivors = [who for who in everybody if who != victim]
    ranks = group(case.size)
    hosts = {who: Host(ranks[who], case.ops[who], everybody) for who in survivors}
    bodies = [functools.partial(ranks[who].run, case.ops[who]) for who in everybody]
    with running(*[stopping(bodies[who], *at[who]) if who in at else bodies[who] for who in everybody]) as processes:
        for who in at:
            until_stopped(processes[who])
        processes[victim].kill()
        processes[victim].join()
        for who in survivors:
            ranks[who].ctl[w.OPEN] = 0
            os.kill(processes[who].pid, signal.SIGCONT)
        progress = {who: hosts[who].freeze() for who in survivors}
        for who in survivors:
            hosts[who].enter(2, survivors, progress)
        number = hosts[survivors[0]].flight.returned
        view_change([ranks[who] for who in survivors], list(range(len(survivors))), 2, number)
        join([processes[who] for who in survivors])
    for host in hosts.values():
        host.end()
    return list(hosts.values())


@pytest.mark.parametrize("kind", ["broadcast", "allgather"])
def test_what_one_survivor_has_the_other_gets_from_it(kind: str) -> None:
    """Rank 0, the root, is lost when 1 has both rows, and 2 the first one alone."""
    case = Case(kind, 3, 2 * CHUNK // 4 if kind == "broadcast" else 2 * 320 // 4)
    hosts = stopped(case, {0: ("stable", 1), 1: ("stable", 1), 2: ("await_flags", 1)}, victim=0)
    assert [host.op.error for host in hosts] == [None, None]
    assert [(task.chunk, task.holder) for task in hosts[1].op.tasks] == [(1, 1)]
    check(case, hosts)


@pytest.mark.parametrize("kind", MOVING)
def test_what_only_a_lost_one_had_fails_the_call_on_all(kind: str) -> None:
    """It had posted nothing yet."""
    case = Case(kind, 3, 700, root=int(kind == "gather"))
    hosts = stopped(case, {0: ("give", 0)}, victim=0)
    assert all(isinstance(host.op.error, LostError) for host in hosts)
    assert "replica 0 was lost before the data were with any survivor" in str(hosts[0].op.error)
    check(case, hosts)


@pytest.mark.parametrize("kind", ["reduce", "gather"])
def test_without_its_root_a_call_moves_nothing_and_returns(kind: str) -> None:
    case = Case(kind, 3, 700)
    hosts = stopped(case, {0: ("give", 0)}, victim=0)
    assert [host.op.error for host in hosts] == [None, None]
    assert [host.op.spans() for host in hosts] == [(), ()]
    check(case, hosts)


ROW = 320 // 4  # elements of a piece in a row, among three


@pytest.mark.parametrize(
    ("make", "fails"),
    [
        *((functools.partial(Case, "gather", 3, 2 * ROW, root=root), root == 2) for root in (1, 2)),
        *((functools.partial(Case, "scatter", 3, 2 * ROW, root=root), root == 0) for root in (0, 1)),
        (functools.partial(uneven, [[0, 2 * ROW, ROW], [5, 0, 2 * ROW], [0, 2 * ROW, 0]]), False),
        (functools.partial(uneven, [[0, 2 * ROW, ROW + 1], [5, 0, 2 * ROW], [0, 2 * ROW, 0]]), True),
    ],
)
def test_only_data_that_somebody_still_needs_are_lost(make: Callable[[], Case], fails: bool) -> None:
    """0 is lost when 1 has taken what it takes of both rows, and 2 of the first one alone."""
    case = make()
    hosts = stopped(case, {0: ("stable", 1), 1: ("stable", 1), 2: ("await_flags", 1)}, victim=0)
    assert [isinstance(host.op.error, LostError) for host in hosts] == [fails, fails]
    check(case, hosts)


@pytest.mark.parametrize(("kind", "part"), [("reduce_scatter", 320), ("reduce", 1024)])
def test_parts_keep_those_who_contributed_to_them(kind: str, part: int) -> None:
    """0 is lost when 2 has its parts of two rows, with the input of 0, and 1 that of the first one alone. So the second
    is reduced once more for 1 alone, and the third for both. In a reduce, of which 1 is the root, 2 has nothing to take
    of rows."""
    case = Case(kind, 3, 3 * part // 4, root=1, in_place=True)
    hosts = stopped(case, {0: ("receive", 1), 1: ("await_flags", 1), 2: ("stable", 1)}, victim=0)
    assert [host.op.finals for host in hosts] == [[(0, 1, 2), (1, 2), (1, 2)], [(0, 1, 2), (0, 1, 2), (1, 2)]]
    check(case, hosts)


@pytest.mark.parametrize(
    ("kind", "root", "lost"),
    [
        *(("allgather", 0, True), ("alltoall", 0, True), ("reduce_scatter", 0, False)),
        *(("broadcast", 0, True), ("broadcast", 1, False), ("scatter", 0, True), ("scatter", 1, False)),
        *(("gather", 0, False), ("gather", 1, True), ("reduce", 0, False), ("reduce", 1, False)),
        *((((9, 0, 0), (1, 2, 300), (9, 9, 9)), 0, False), (((0, 0, 1), (1, 2, 300), (9, 9, 9)), 0, True)),
    ],
)
def test_an_op_that_was_not_begun_knows_by_itself_whether_data_are_lost(
    kind: str | results.Counts, root: int, lost: bool
) -> None:
    """Its launch was there before the view, which 0 is not in; it finds the same as the host does."""
    ranks = group(3)
    case = Case(kind, 3, 700, root=root) if isinstance(kind, str) else uneven(kind)
    before = [x.clone() for x in case.out]
    for rank in ranks:
        rank.freeze()
    survivors = ranks[1:]
    view_change(survivors, [0, 1], 2, 0)
    join(start(*[functools.partial(rank.run, case.ops[rank.replica]) for rank in survivors]))
    assert [rank.returned for rank in survivors] == [1, 1]
    for op in case.ops[1:]:
        op.prepare(GroupView(2, op.rank, (1, 2), frozenset((1, 2))))
        assert (op.doom is not None) == lost
        assert (len(op.tasks) == 1) == lost
    longest = -(-len(case.ops[1].tasks) // LANES)
    assert [int(rank.state[w.BASE]) for rank in survivors] == [longest] * 2
    for rank in (1, 2):
        assert same(case.out[rank], before[rank]) if lost else case.right(rank, [1, 2])
