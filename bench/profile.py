"""`ftcomm bench profile`: where the time of an all-reduce through shared memory goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ftcomm.bench.collectives import COLLECTIVES, IN
from ftcomm.bench.profile_rank import Block
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, slowest
from ftcomm.bench.yardstick import Column, Progress, Task, check, part, run_ranks


@dataclasses.dataclass(frozen=True)
class Request:
    sizes: Sequence[int] = (1 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes
    ranks: Sequence[int] = (2, 4)
    iterations: int = 300
    rounds: int = 5

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check(self.sizes, self.ranks, self.iterations, self.rounds, arrays=2, least=4)


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


async def measure(request: Request, on_row: Callable[[Row], None], progress: Progress) -> None:
    """Hand over the rows of each number of ranks when they have measured all. Raises `FtcommError` if one fails."""
    for turn, ranks in enumerate(request.ranks):
        task = Task(ranks=ranks, sizes=tuple(request.sizes), iterations=request.iterations, rounds=request.rounds)
        total, told = ranks * len(task.sizes) * task.rounds, part(progress, turn, len(request.ranks))
        blocks = await run_ranks("ftcomm.bench.profile_rank", task, ranks, Block, total, told, transport="shm")
        for size in task.sizes:
            on_row(row([block for block in blocks if block.bytes == size], ranks))


def row(blocks: Iterable[Block], ranks: int) -> Row:
    """All ranks' blocks of one size -> its row."""
    rounds: dict[int, list[Block]] = {}
    for block in blocks:
        rounds.setdefault(block.round, []).append(block)

    def over_rounds(of: Callable[[Block], float]) -> float:
        return median([sum(map(of, mine)) / len(mine) for mine in rounds.values()])

    size = next(iter(rounds.values()))[0].bytes
    times = {number: median(slowest([block.times for block in mine])) for number, mine in rounds.items()}
    # A copy reads and writes its array, on all ranks at once.
    share = COLLECTIVES["allreduce"].bytes_moved(ranks, IN) / (2 * ranks)
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
        limit_us=share * over_rounds(lambda block: block.copy) / 1e3,
        instructions=over_rounds(lambda block: block.instructions),
        calls=over_rounds(lambda block: block.calls),
        wakes=over_rounds(lambda block: block.wakes),
        sleeps=over_rounds(lambda block: block.sleeps),
        preempted=over_rounds(lambda block: block.preempted),
        faults=over_rounds(lambda block: block.faults),
    )


TIMES = {
    "time": "time_us",
    "waits": "waits_us",
    "reduction": "reductions_us",
    "rest": "rest_us",
    "limit": "limit_us",
}


def _time(name: str) -> Column:
    return Column(name, "(us)", 10, lambda row: f"{getattr(row, TIMES[name]):.1f}")


COLUMNS = (
    Column("ranks", "", 5, lambda row: str(row.ranks)),
    Column("size", "(B)", 8, lambda row: format_size(row.bytes)),
    *map(_time, TIMES),
    Column("instructions", "(an op)", 13, lambda row: f"{row.instructions:.0f}"),
    Column("calls", "(an op)", 7, lambda row: f"{row.calls:.0f}"),
    Column("wakes", "(an op)", 7, lambda row: f"{row.wakes:.2f}"),
    Column("sleeps", "(an op)", 7, lambda row: f"{row.sleeps:.2f}"),
    Column("preempted", "(an op)", 10, lambda row: f"{row.preempted:.3f}"),
    Column("faults", "(an op)", 7, lambda row: f"{row.faults:.2f}"),
)
