"""`ftcomm bench profile`: where the time of an all-reduce through shared memory goes.

    plain      so many ops, timed one by one; what the kernel counted of them
    watched    as many, with a clock around every wait, every reduction and every wake-up
    traced     a few, with a count of the interpreter's instructions

A clock costs as much as ten of those, so the times of waits and reductions are taken as shares of the watched ops.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from types import FrameType
from typing import Any
from unittest import mock

import msgspec
import numpy as np

import ftcomm
from ftcomm.bench.baseline import Task, check
from ftcomm.bench.harness import INTS, SIZES, Column, Experiment, Report, Table, option
from ftcomm.bench.job import Records, part, run_ranks
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, slowest
from ftcomm.collective import fast_path, publisher
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.sync.futex import Waiter

TRACED = 20  # ops
WAITS = ("until", "poll_sleep")  # of a Waiter; their instructions depend on how long they wait


@dataclasses.dataclass(frozen=True)
class Request:
    """Say where the time of an all-reduce through shared memory goes.

    Of each op: how long it waits for other ranks, how long it reduces, and the rest, which is copies into the staging
    and the interpreter; what its bytes would take at the rate of a copy; and what can be counted where times are noisy:
    instructions of the interpreter (without those of waits, which are as many as they last), calls of functions,
    wake-ups, sleeps, times that another process was given the core, page faults.
    """

    sizes: Sequence[int] = option((1 << 10, 64 << 10, 1 << 20, 16 << 20), kind=SIZES, help="Arrays (fp32).")
    ranks: Sequence[int] = option((2, 4), kind=INTS, help="Processes.")
    iterations: int = option(300, "-n", "--iters", help="Timed ops in a round; fewer above 1M.")
    rounds: int = option(5)

    def smoke(self) -> Request:
        """Two ranks, one round at 1K, to see that it runs."""
        return Request((1 << 10,), (2,), 20, 1)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check(self.sizes, self.ranks, self.iterations, self.rounds, arrays=2, least=4)


class Block(msgspec.Struct, frozen=True):
    """Of one rank, size and round. Times are ns of an op, counts are of an op."""

    rank: int
    bytes: int
    round: int
    times: list[int]
    watched: float
    waits: float
    reductions: float
    copy: float  # of an array of this size, once
    wakes: float  # calls that wake somebody
    sleeps: float  # switches of its own accord
    preempted: float
    faults: float
    instructions: float  # of the interpreter, without those of waits
    calls: float  # of Python functions


class Row(msgspec.Struct, frozen=True):
    """One size. Microseconds of an op, and counts of an op: medians over rounds, means over ranks."""

    ranks: int
    bytes: int
    time_us: float  # of the slowest rank
    waits_us: float  # for other ranks: polls, yields, sleeps
    reductions_us: float
    rest_us: float  # copies into the staging, and the interpreter
    limit_us: float  # what the bytes that all ranks have to move take, at the rate of a copy in the same round
    instructions: float
    calls: float
    wakes: float
    sleeps: float
    preempted: float
    faults: float


async def measure(request: Request, report: Report) -> None:
    """Report the rows of each number of ranks when they have measured all. Raises `FtcommError` if one fails."""
    for number, ranks in enumerate(request.ranks):
        task = Task(ranks=ranks, sizes=tuple(request.sizes), iterations=request.iterations, rounds=request.rounds)
        total, progress = ranks * len(task.sizes) * task.rounds, part(report.progress, number, len(request.ranks))
        blocks = await run_ranks(rank, task, ranks, Block, total, progress, transport="shm")
        for size in task.sizes:
            report.add(row([block for block in blocks if block.bytes == size], ranks))


def row(blocks: Iterable[Block], ranks: int) -> Row:
    """All ranks' blocks of one size -> its row."""
    rounds: dict[int, list[Block]] = {}
    for block in blocks:
        rounds.setdefault(block.round, []).append(block)

    def over_rounds(of: Callable[[Block], float]) -> float:
        return median([sum(map(of, mine)) / len(mine) for mine in rounds.values()])

    size = next(iter(rounds.values()))[0].bytes
    times = {number: median(slowest([block.times for block in mine])) for number, mine in rounds.items()}
    time = median(list(times.values())) / 1e3
    waits = median([times[n] * sum(b.waits / b.watched for b in mine) / len(mine) for n, mine in rounds.items()]) / 1e3
    reductions = over_rounds(lambda block: block.reductions) / 1e3
    return Row(
        ranks=ranks,
        bytes=size,
        time_us=time,
        waits_us=waits,
        reductions_us=reductions,
        rest_us=max(0.0, time - waits - reductions),
        limit_us=over_rounds(lambda block: block.copy) / 1e3,  # it reads and writes what an all-reduce has to
        instructions=over_rounds(lambda block: block.instructions),
        calls=over_rounds(lambda block: block.calls),
        wakes=over_rounds(lambda block: block.wakes),
        sleeps=over_rounds(lambda block: block.sleeps),
        preempted=over_rounds(lambda block: block.preempted),
        faults=over_rounds(lambda block: block.faults),
    )


def _column(name: str, unit: str, width: int, field: str, digits: int) -> Column:
    return Column(name, unit, width, lambda row: f"{getattr(row, field):.{digits}f}")


COLUMNS = (
    Column("ranks", "", 5, lambda row: str(row.ranks)),
    Column("size", "(B)", 8, lambda row: format_size(row.bytes)),
    _column("time", "(us)", 10, "time_us", 1),
    _column("waits", "(us)", 10, "waits_us", 1),
    _column("reduction", "(us)", 10, "reductions_us", 1),
    _column("rest", "(us)", 10, "rest_us", 1),
    _column("limit", "(us)", 10, "limit_us", 1),
    _column("instructions", "(an op)", 13, "instructions", 0),
    _column("calls", "(an op)", 7, "calls", 0),
    _column("wakes", "(an op)", 7, "wakes", 2),
    _column("sleeps", "(an op)", 7, "sleeps", 2),
    _column("preempted", "(an op)", 10, "preempted", 3),
    _column("faults", "(an op)", 7, "faults", 2),
)
EXPERIMENT = Experiment("profile", Request, measure, [Table("rows", Row, COLUMNS)])


# -- in a rank ---------------------------------------------------------------------------------------------------------


def rank(task: Task) -> None:
    group = ftcomm.init()
    records = Records(task.folder, group.replica)
    for size, number in itertools.product(task.sizes, range(task.rounds)):
        iterations = task.iterations if size <= 1 << 20 else max(5, task.iterations // 10)
        records.write(_block(group, size, number, iterations))
    ftcomm.shutdown()


def _block(group: Any, size: int, number: int, iterations: int) -> Block:
    x, y = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
    for _ in range(max(3, iterations // 10)):
        group.allreduce(x)
        np.copyto(y, x)
    gc.collect()
    gc.disable()
    try:
        before = resource.getrusage(resource.RUSAGE_THREAD)
        times = _times(lambda: group.allreduce(x), iterations)
        after = resource.getrusage(resource.RUSAGE_THREAD)
        copy = sorted(_times(lambda: np.copyto(y, x), iterations))[iterations // 2]
        with _watch(group) as spent:
            watched = _times(lambda: group.allreduce(x), iterations)
        instructions, calls = _trace(lambda: group.allreduce(x))
    finally:
        gc.enable()
    counted = (getattr(after, name) - getattr(before, name) for name in ("ru_nvcsw", "ru_nivcsw", "ru_minflt"))
    each = {name: value / iterations for name, value in spent.items()}
    return Block(
        *(group.replica, size, number, times, sum(watched) / iterations, each["waits"], each["reductions"], copy),
        each["wakes"],
        *(count / iterations for count in counted),
        *(instructions / TRACED, calls / TRACED),
    )


def _times(call: Callable[[], Any], count: int) -> list[int]:
    stamps = [perf_counter_ns()]
    for _ in range(count):
        call()
        stamps.append(perf_counter_ns())
    return [after - before for before, after in itertools.pairwise(stamps)]


@contextmanager
def _watch(group: Any) -> Iterator[dict[str, float]]:
    """What waits and reductions take, in ns, and how often somebody is woken, until the block ends."""
    spent = {"waits": 0.0, "reductions": 0.0, "wakes": 0.0}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            begin = perf_counter_ns()
            try:
                return call(*args, **more)
            finally:
                spent[name] += perf_counter_ns() - begin

        return run

    def woken(address: int, **more: Any) -> None:
        spent["wakes"] += 1
        wake(address, **more)

    get, wake = Reducer.get, publisher.wake
    with (
        mock.patch.multiple(Waiter, **{name: timed("waits", getattr(Waiter, name)) for name in WAITS}),
        mock.patch.object(Reducer, "get", lambda *args: timed("reductions", get(*args))),
        mock.patch.object(publisher, "wake", woken),
        mock.patch.object(fast_path, "wake", woken),
    ):
        _forget(group)
        yield spent
    _forget(group)


def _forget(group: Any) -> None:
    """What reduces small ops is looked up once, and kept."""
    group._exchange.core.stream.fast_path.forget()
    group._exchange.core.stream.pipeline.algorithms.one_shot.forget()


def _trace(call: Callable[[], Any]) -> tuple[int, int]:
    """Instructions of the interpreter and calls of functions in `TRACED` calls. They follow from the code alone, where
    times follow from whoever shares the machine."""
    found = [0, 0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name in WAITS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found[0] += event == "opcode"
        found[1] += event == "call"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(TRACED):
            call()
    finally:
        sys.settrace(before)
    return found[0], found[1]
