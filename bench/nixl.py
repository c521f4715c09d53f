"""`ftcomm bench nixl`: how much of what NIXL alone puts an all-reduce over NIXL carries, in the same run."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ftcomm.bench.job import Job, Tail
from ftcomm.bench.limits import check_at_least_one, check_memory, check_replicas
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import busbw_factor, median, slowest
from ftcomm.bench.wire import RANK_MEMORY
from ftcomm.bench.wire_rank import Block, Task
from ftcomm.errors import SettingsError
from ftcomm.launch import RunOptions

LIBRARIES = ("puts", "one way", "ftcomm")


@dataclasses.dataclass(frozen=True)
class Request:
    sizes: Sequence[int] = (64 << 20, 256 << 20)  # bytes
    ranks: int = 2
    iterations: int = 5
    rounds: int = 5

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_at_least_one("-n", self.iterations)
        check_at_least_one("--rounds", self.rounds)
        if min(self.sizes) < 1 << 10 or any(size % 4 for size in self.sizes):
            raise SettingsError(f"--sizes {min(self.sizes)}: expected multiples of 4 bytes from 1K on.")
        check_replicas(self.ranks)
        if self.ranks % 2:
            raise SettingsError(f"--ranks {self.ranks}: expected an even number, as every other one puts to its right.")
        need = self.ranks * (RANK_MEMORY + max(self.sizes))
        check_memory(f"{self.ranks} ranks with arrays of {format_size(max(self.sizes))}", need, "--ranks or --sizes")


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
    """Hand over the rows of all sizes when the ranks have ended. Raises `FtcommError` if one fails."""
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        task = Task(request.ranks, tuple(request.sizes), request.iterations, request.rounds, LIBRARIES, folder)
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(task))
        tail = Tail([Path(folder) / f"rank-{rank}.jsonl" for rank in range(request.ranks)], Block)
        blocks: list[Block] = []
        total = request.ranks * len(task.sizes) * task.rounds * len(LIBRARIES)
        options = RunOptions(
            replicas=request.ranks,
            script="ftcomm.bench.nixl_rank",
            module=True,
            args=(str(path),),
            min_replicas=request.ranks,
            max_restarts=0,
            transport="nixl",
            env={"OMP_NUM_THREADS": "1"},
        )
        async with Job(options) as job:
            runs = True
            while runs:
                progress(f"{request.ranks} ranks", len(blocks) / total)
                runs = await job.runs(0.2)
                blocks += tail.read()
            await job.finish()
    for size in task.sizes:
        on_rows(rows(blocks, task, size))


def rows(blocks: Iterable[Block], task: Task, size: int) -> list[Row]:
    """All ranks' blocks of one size -> a row for each library, the yardstick first."""
    medians: dict[str, list[float]] = {}
    for library in task.libraries:
        mine = [block for block in blocks if block.bytes == size and block.library == library]
        medians[library] = [
            median(slowest([block.times for block in mine if block.round == number])) / 1e3
            for number in range(task.rounds)
        ]
    found = []
    for library, times in medians.items():
        shares = [puts / time for puts, time in zip(medians["puts"], times, strict=True)]
        rate = size * busbw_factor(task.ranks) / median(times) / 1e3
        found.append(Row(library, task.ranks, size, median(times), rate, median(shares), times))
    return found


def heading() -> list[str]:
    return ["# what       ranks     size     time (us)   rate (GB/s)    of puts"]


def line(row: Row) -> str:
    return (
        f"  {row.library:<10} {row.ranks:>5} {format_size(row.bytes):>8} {row.time_us:>13.0f} {row.rate_gbps:>13.2f} "
        f"{row.of_puts:>10.0%}"
    )
