"""`ftcomm bench allreduce`: what is measured, and what comes of the timings of all ranks."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ftcomm.bench.allreduce_rank import GLOO_DTYPES, GLOO_REDOPS, Block, Size, Task
from ftcomm.bench.data import FLOATS, INTEGERS, REDOPS, Pattern
from ftcomm.bench.header import available_memory
from ftcomm.bench.job import Job, Tail
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import algbw, busbw_factor, median, percentile, slowest
from ftcomm.errors import SettingsError
from ftcomm.launch import RunOptions

RANK_MEMORY = 400 << 20  # bytes of a rank before any message: torch, and ftcomm's staging
MAX_RANKS = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """One sweep. `iterations` and `warmup` None: by size."""

    sizes: Sequence[int]  # bytes
    ranks: Sequence[int]
    dtype: str = "float32"
    redop: str = "sum"
    rounds: int = 5
    iterations: int | None = None
    warmup: int | None = None
    transport: str = "auto"
    compare: Sequence[str] = ()

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("ftcomm", *self.compare)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if self.dtype not in FLOATS + INTEGERS:
            raise SettingsError(f"-d {self.dtype}: expected one of {', '.join(FLOATS + INTEGERS)}.")
        if self.redop not in REDOPS or (self.redop == "avg" and self.dtype not in FLOATS):
            raise SettingsError(
                f"-o {self.redop} of {self.dtype}: expected one of {', '.join(REDOPS)}, and avg only of floats."
            )
        if "gloo" in self.compare and (self.redop not in GLOO_REDOPS or self.dtype not in GLOO_DTYPES):
            raise SettingsError(
                f"gloo has no {self.redop} of {self.dtype}, only {', '.join(GLOO_REDOPS)} of {', '.join(GLOO_DTYPES)}; "
                "leave --compare gloo away."
            )
        if min(self.sizes) < item_size(self.dtype):
            raise SettingsError(f"{min(self.sizes)} bytes are less than one element of {self.dtype}; raise -b.")
        if min(self.rounds, 1 if self.iterations is None else self.iterations) < 1 or (self.warmup or 0) < 0:
            raise SettingsError("--rounds and -n have to be at least 1, -w at least 0.")
        for ranks in self.ranks:
            if not 2 <= ranks <= MAX_RANKS:
                raise SettingsError(f"--ranks {ranks}: expected 2 to {MAX_RANKS}.")
            need = ranks * (RANK_MEMORY + (2 + ("atomic" in self.compare)) * max(self.sizes))
            if need > available_memory():
                raise SettingsError(
                    f"{ranks} ranks with messages of {format_size(max(self.sizes))} need about {need / 1e9:.1f} GB, "
                    f"{available_memory() / 1e9:.1f} GB are free; lower --ranks or -e."
                )

    def task(self, ranks: int, folder: str) -> Task:
        most = Pattern(ranks, self.dtype, self.redop).max_ops()
        sizes = []
        for size in self.sizes:
            iterations, warmup = _iterations(size)
            warmup = min(warmup if self.warmup is None else self.warmup, most - 2)
            sizes.append(Size(size, size // item_size(self.dtype), self.iterations or iterations, warmup))
        return Task(ranks, self.dtype, self.redop, self.libraries, tuple(sizes), self.rounds, folder)


class Row(msgspec.Struct, frozen=True):
    """One library at one size. Times are of the slowest rank of each op; p50 is the median over rounds of medians."""

    op: str
    library: str
    device: str
    transport: str
    ranks: int
    dtype: str
    redop: str
    bytes: int
    count: int
    rounds: int
    iterations: int  # in all rounds together
    time_us_p50: float
    time_us_p99: float
    time_us_mean: float  # of the whole loop, as nccl-tests has it
    algbw_gbps: float
    busbw_gbps: float
    wrong: int  # elements, over all ranks and checks
    round_us: list[float]  # median of each round
    ratio: float | None  # time over ftcomm's, median over rounds: how many times slower; None for ftcomm itself
    round_ratio: list[float]


async def measure(
    request: Request, on_rows: Callable[[list[Row]], None], progress: Callable[[str, float], None]
) -> None:
    """Start ranks, and hand over the rows of one size (a row a library) as soon as every rank has measured it.

    `progress(words, fraction)` is called a few times a second. Raises `FtcommError` when a rank fails; no process is
    left, whether this returns, raises or is cancelled.
    """
    for turn, ranks in enumerate(request.ranks):
        with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
            task = request.task(ranks, folder)
            path = Path(folder) / "task.json"
            path.write_bytes(msgspec.json.encode(task))
            tail = Tail([Path(folder) / f"rank-{rank}.jsonl" for rank in range(ranks)], Block)
            blocks: list[Block] = []
            done = 0
            total = ranks * len(task.sizes) * task.rounds * len(task.libraries)
            async with Job(_options(request, ranks, str(path))) as job:
                runs = True
                while runs:
                    progress(f"{ranks} ranks", (turn + len(blocks) / total) / len(request.ranks))
                    runs = await job.runs(0.2)
                    blocks += tail.read()
                    while done < len(task.sizes) and _complete(blocks, task, task.sizes[done]):
                        on_rows(rows(blocks, task, task.sizes[done], request.transport))
                        done += 1
                await job.finish()


def _options(request: Request, ranks: int, task_file: str) -> RunOptions:
    return RunOptions(
        replicas=ranks,
        script="ftcomm.bench.allreduce_rank",
        module=True,
        args=(task_file,),
        min_replicas=ranks,  # a measurement among fewer would be another one: no restart, the job fails
        max_restarts=0,
        transport=request.transport,
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def rows(blocks: Iterable[Block], task: Task, size: Size, transport: str) -> list[Row]:
    """All ranks' blocks of one size -> a row for each library, ftcomm first."""
    medians: dict[str, list[float]] = {}
    found = []
    for library in task.libraries:
        mine = [b for b in blocks if b.bytes == size.bytes and b.library == library]
        by_round = [[b for b in mine if b.round == number] for number in range(task.rounds)]
        slow = [slowest([b.times for b in one]) for one in by_round]
        medians[library] = [median(times) / 1e3 for times in slow]
        ratios = [a / b for a, b in zip(medians[library], medians["ftcomm"], strict=True)]
        p50 = median(medians[library])
        whole = [max(b.elapsed for b in one) / size.iterations / 1e3 for one in by_round]
        bandwidth = algbw(size.count * item_size(task.dtype), p50 / 1e6)
        found.append(
            Row(
                op="allreduce",
                library=library,
                device="cpu",
                transport="tcp" if library == "gloo" else transport,
                ranks=task.ranks,
                dtype=task.dtype,
                redop=task.redop,
                bytes=size.bytes,
                count=size.count,
                rounds=task.rounds,
                iterations=task.rounds * size.iterations,
                time_us_p50=p50,
                time_us_p99=percentile([t for times in slow for t in times], 99) / 1e3,
                time_us_mean=median(whole),
                algbw_gbps=bandwidth,
                busbw_gbps=bandwidth * busbw_factor(task.ranks),
                wrong=sum(b.wrong for b in mine),
                round_us=medians[library],
                ratio=None if library == "ftcomm" else median(ratios),
                round_ratio=[] if library == "ftcomm" else ratios,
            )
        )
    return found


def item_size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else int(dtype.lstrip("uintfloa")) // 8


def _complete(blocks: Sequence[Block], task: Task, size: Size) -> bool:
    return sum(b.bytes == size.bytes for b in blocks) == task.ranks * task.rounds * len(task.libraries)


def _iterations(size: int) -> tuple[int, int]:
    """-> (timed ops, ops before them) in a block: about a second for the slowest peer known, at any size."""
    if size <= 64 << 10:
        return 100, 5
    if size <= 4 << 20:
        return 40, 3
    return 10, 1
