"""`ftcomm bench wire`: how much of what plain sockets carry an all-reduce over TCP carries, in the same run."""

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
from ftcomm.bench.wire_rank import Block, Task
from ftcomm.errors import SettingsError
from ftcomm.launch import RunOptions

RANK_MEMORY = 400 << 20  # bytes of a rank before any array


@dataclasses.dataclass(frozen=True)
class Request:
    sizes: Sequence[int] = (64 << 20, 256 << 20)  # bytes
    ranks: Sequence[int] = (2, 4)
    iterations: int = 5
    rounds: int = 5
    algorithm: str = "direct"
    gloo: bool = True

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("sockets", "ftcomm", "gloo") if self.gloo else ("sockets", "ftcomm")

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_at_least_one("-n", self.iterations)
        check_at_least_one("--rounds", self.rounds)
        if min(self.sizes) < 1 << 10 or any(size % 4 for size in self.sizes):
            raise SettingsError(f"--sizes {min(self.sizes)}: expected multiples of 4 bytes from 1K on.")
        for ranks in self.ranks:
            check_replicas(ranks)
            need = ranks * (RANK_MEMORY + 2 * max(self.sizes))
            check_memory(f"{ranks} ranks with arrays of {format_size(max(self.sizes))}", need, "--ranks or --sizes")


class Row(msgspec.Struct, frozen=True):
    """One library at one size. The time of an op is that of the slowest rank; medians over rounds of medians."""

    library: str
    ranks: int
    bytes: int
    time_us: float
    busbw_gbps: float  # what each rank has to send and receive over the time
    of_sockets: float  # the share of what the sockets carried in the same round, median over rounds
    round_us: list[float]


async def measure(
    request: Request, on_rows: Callable[[list[Row]], None], progress: Callable[[str, float], None]
) -> None:
    """Hand over the rows of each size as soon as so many ranks have measured all. Raises `FtcommError` if one fails."""
    for turn, ranks in enumerate(request.ranks):
        with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
            task = Task(ranks, tuple(request.sizes), request.iterations, request.rounds, request.libraries, folder)
            path = Path(folder) / "task.json"
            path.write_bytes(msgspec.json.encode(task))
            tail = Tail([Path(folder) / f"rank-{rank}.jsonl" for rank in range(ranks)], Block)
            blocks: list[Block] = []
            total = ranks * len(task.sizes) * task.rounds * len(task.libraries)
            async with Job(_options(request, ranks, str(path))) as job:
                runs = True
                while runs:
                    progress(f"{ranks} ranks", (turn + len(blocks) / total) / len(request.ranks))
                    runs = await job.runs(0.2)
                    blocks += tail.read()
                await job.finish()
        for size in task.sizes:
            on_rows(rows(blocks, task, size))


def _options(request: Request, ranks: int, task_file: str) -> RunOptions:
    return RunOptions(
        replicas=ranks,
        script="ftcomm.bench.wire_rank",
        module=True,
        args=(task_file,),
        min_replicas=ranks,
        max_restarts=0,
        transport="tcp",
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FTCOMM_ALGORITHM": request.algorithm},
    )


def rows(blocks: Iterable[Block], task: Task, size: int) -> list[Row]:
    """All ranks' blocks of one size -> a row for each library, sockets first."""
    medians: dict[str, list[float]] = {}
    for library in task.libraries:
        mine = [block for block in blocks if block.bytes == size and block.library == library]
        medians[library] = [
            median(slowest([block.times for block in mine if block.round == number])) / 1e3
            for number in range(task.rounds)
        ]
    found = []
    for library, times in medians.items():
        shares = [sockets / time for sockets, time in zip(medians["sockets"], times, strict=True)]
        busbw = size * busbw_factor(task.ranks) / median(times) / 1e3
        found.append(Row(library, task.ranks, size, median(times), busbw, median(shares), times))
    return found


def heading() -> list[str]:
    return ["# library    ranks     size     time (us)  busbw (GB/s)  of sockets"]


def line(row: Row) -> str:
    return (
        f"  {row.library:<10} {row.ranks:>5} {format_size(row.bytes):>8} {row.time_us:>13.0f} {row.busbw_gbps:>13.2f} "
        f"{row.of_sockets:>10.0%}"
    )
