"""`ftcomm bench nixl`: how much of what NIXL alone puts an all-reduce over NIXL carries, in the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ftcomm.bench.job import Job
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import busbw_factor, median
from ftcomm.bench.yardstick import Block, Column, Task, check, rounds_us, run_ranks, share, whole
from ftcomm.errors import SettingsError

LIBRARIES = ("puts", "large puts", "in cache", "one way", "with sum", "ftcomm")


@dataclasses.dataclass(frozen=True)
class Request:
    sizes: Sequence[int] = (64 << 20, 256 << 20)  # bytes
    ranks: int = 2
    iterations: int = 5
    rounds: int = 5

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check(self.sizes, (self.ranks,), self.iterations, self.rounds, arrays=3)
        if self.ranks % 2:
            raise SettingsError(f"--ranks {self.ranks}: expected an even number, as every other one puts to its right.")


class Row(msgspec.Struct, frozen=True):
    """One of `LIBRARIES` at one size. The time is that of the slowest rank; medians over rounds of medians."""

    library: str
    ranks: int
    bytes: int
    time_us: float
    rate_gbps: float  # what each rank has to put over the time
    of_puts: float  # the share of what puts both ways carried in the same round, median over rounds
    round_us: list[float]


async def measure(
    request: Request, on_rows: Callable[[list[Row]], None], progress: Callable[[str, float], None]
) -> None:
    """Hand over the rows of each size as soon as the ranks have measured it. Raises `FtcommError` if one fails."""
    task = Task(
        ranks=request.ranks,
        sizes=tuple(request.sizes),
        iterations=request.iterations,
        rounds=request.rounds,
        libraries=LIBRARIES,
    )
    left = list(task.sizes)
    total = request.ranks * len(task.sizes) * task.rounds * len(LIBRARIES)

    def look(job: Job, blocks: list[Block]) -> None:
        while left and whole(blocks, task, left[0]):
            on_rows(rows(blocks, task, left.pop(0)))

    await run_ranks("ftcomm.bench.nixl_rank", task, request.ranks, Block, total, progress, look, transport="nixl")


def rows(blocks: Iterable[Block], task: Task, size: int) -> list[Row]:
    """All ranks' blocks of one size -> a row for each library, the yardstick first."""
    found = rounds_us(blocks, task, size)
    made = size * busbw_factor(task.ranks) / 1e3  # GB a second, over us
    return [
        Row(library, task.ranks, size, median(times), made / median(times), share(found["puts"], times), times)
        for library, times in found.items()
    ]


COLUMNS = (
    Column("what", "", -10, lambda row: row.library),
    Column("ranks", "", 5, lambda row: str(row.ranks)),
    Column("size", "(B)", 8, lambda row: format_size(row.bytes)),
    Column("time", "(us)", 13, lambda row: f"{row.time_us:.0f}"),
    Column("rate", "(GB/s)", 13, lambda row: f"{row.rate_gbps:.2f}"),
    Column("of puts", "", 10, lambda row: f"{row.of_puts:.0%}"),
)
