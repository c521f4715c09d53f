"""`ftcomm bench wire`: how much of what plain sockets carry an all-reduce over TCP carries, in the same run.

On loopback, or on a slow link between hosts of their own; and what it costs to wait.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ftcomm.bench.job import Job
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import busbw_factor, median
from ftcomm.bench.wire_rank import DIRECT, TWO_LEVELS, Task, Waited
from ftcomm.bench.yardstick import Block, Column, Progress, check, part, rounds_us, run_ranks, share, whole
from ftcomm.errors import SettingsError
from ftcomm.launch.hosts import SlowNetwork
from ftcomm.launch.network import CABLE
from ftcomm.launch.relay import Counts


@dataclasses.dataclass(frozen=True)
class Request:
    sizes: Sequence[int] = (64 << 20, 256 << 20)  # bytes
    ranks: Sequence[int] = (2, 4)
    iterations: int = 5
    rounds: int = 5
    algorithm: str = "direct"  # auto: where ranks share hosts, both that and two levels
    gloo: bool = True
    idle: float = 5.0  # seconds that a group waits, to see what that costs
    ranks_per_host: int = 0  # on hosts of their own, see `ftcomm.launch.hosts`; 0: all on this one
    rate: float | None = None  # of the network between these: bits a second; None: what the kernel can
    delay: float = 0.0  # s, one way

    @property
    def libraries(self) -> tuple[str, ...]:
        ours = (TWO_LEVELS, DIRECT) if self.algorithm == "auto" and self.ranks_per_host > 1 else ("ftcomm",)
        return ("sockets", *ours, "gloo") if self.gloo else ("sockets", *ours)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check(self.sizes, self.ranks, self.iterations, self.rounds, arrays=2)
        if self.idle <= 0:
            raise SettingsError(f"--idle {self.idle:g}s: expected a positive time.")
        if not self.ranks_per_host and (self.rate is not None or self.delay):
            raise SettingsError("--rate and --delay are of a network between hosts; say --hosts in place of --ranks.")
        for ranks in self.ranks if self.ranks_per_host else ():
            if ranks <= self.ranks_per_host:
                raise SettingsError(f"--hosts {ranks // self.ranks_per_host}: expected at least 2 hosts.")

    def task(self, ranks: int) -> Task:
        return Task(
            ranks=ranks,
            sizes=tuple(self.sizes),
            iterations=self.iterations,
            rounds=self.rounds,
            libraries=self.libraries,
            ranks_per_host=self.ranks_per_host,
            idle=self.idle,
        )


class Row(msgspec.Struct, frozen=True):
    """One library at one size. The time of an op is that of the slowest rank; medians over rounds of medians."""

    library: str
    ranks: int
    hosts: int  # 0: all on one, and by loopback
    bytes: int
    time_us: float
    busbw_gbps: float  # what each rank has to send and receive over the time
    of_sockets: float  # the share of what the sockets carried in the same round, median over rounds
    of_link: float | None  # the share of what the link could carry at its rate, if it has one
    cable_bytes: int | None  # what left the host that sent most in an op, headers of packets included
    round_us: list[float]


class Idle(msgspec.Struct, frozen=True):
    """A group of which one member comes late to an op."""

    ranks: int
    seconds: float
    cpu_pct: float  # of a core, of the member that took most of those that waited


class Line(msgspec.Struct, frozen=True):
    """What the process that stands for the network did, which must not be the limit."""

    ranks: int
    forwarded: int  # packets
    dropped: int  # at a full queue
    busy_pct: float  # of a core, in its busiest second


async def measure(
    request: Request,
    on_rows: Callable[[list[Row]], None],
    on_idle: Callable[[Idle], None],
    on_line: Callable[[Line], None],
    progress: Progress,
) -> None:
    """Hand over the rows of each size as soon as so many ranks have measured all. Raises `FtcommError` if one fails."""
    for turn, ranks in enumerate(request.ranks):
        task = request.task(ranks)
        watched = Watched(ranks)
        records = await run_ranks(
            "ftcomm.bench.wire_rank",
            task,
            ranks,
            Block | Waited,
            ranks * (len(task.sizes) * task.rounds * len(task.libraries) + 1),
            part(progress, turn, len(request.ranks)),
            functools.partial(_look, task, list(task.sizes), request.rate, watched, on_rows),
            env={
                "GLOO_SOCKET_IFNAME": CABLE if request.ranks_per_host else "lo",
                "FTCOMM_ALGORITHM": request.algorithm,
            },
            transport="auto" if request.ranks_per_host > 1 else "tcp",
            hosts="netns" if request.ranks_per_host else "shared",
            replicas_per_host=max(1, request.ranks_per_host),
            rate=request.rate,
            delay=request.delay,
        )
        on_idle(idle([record for record in records if isinstance(record, Waited)]))
        if watched.line is not None:
            on_line(watched.line)


def _look(
    task: Task,
    left: list[int],
    rate: float | None,
    watched: Watched,
    on_rows: Callable[[list[Row]], None],
    job: Job,
    records: list[Any],
) -> None:
    """Hand over the rows of those of the sizes that are `left` which all ranks have measured."""
    if isinstance(job.launcher.network, SlowNetwork):
        watched.saw(time.monotonic(), job.launcher.network.counts())
    blocks = [record for record in records if isinstance(record, Block)]
    while left and whole(blocks, task, left[0]):
        on_rows(rows(blocks, task, left.pop(0), rate))


class Watched:
    """What has been seen of a relay, by now."""

    def __init__(self, ranks: int) -> None:
        self.line: Line | None = None
        self._ranks = ranks
        self._since, self._cpu = 0.0, 0.0

    def saw(self, now: float, counts: Counts) -> None:
        """`now` is in seconds."""
        busiest = 0.0 if self.line is None else self.line.busy_pct
        if now - self._since >= 1:
            if self._since:
                busiest = max(busiest, 100 * (counts.cpu - self._cpu) / (now - self._since))
            self._since, self._cpu = now, counts.cpu
        self.line = Line(self._ranks, counts.forwarded, counts.crowded, busiest)


def idle(waited: Sequence[Waited]) -> Idle:
    """Of all ranks; all but the first have waited for that one."""
    took = max((one for one in waited if one.rank), key=lambda one: one.cpu / one.seconds)
    return Idle(len(waited), took.seconds, 100 * took.cpu / took.seconds)


def rows(blocks: Iterable[Block], task: Task, size: int, rate: float | None = None) -> list[Row]:
    """All ranks' blocks of one size -> a row for each library, sockets first. `rate`: bits a second of the link.

    The link of a host has to carry 2 (hosts - 1) / hosts of the array, however many ranks it has."""
    mine = [block for block in blocks if block.bytes == size]
    found = rounds_us(mine, task, size)
    busbw = size * busbw_factor(task.ranks) / 1e3  # GB a second, over us
    least = None if rate is None else 8e6 * size * busbw_factor(task.hosts or task.ranks) / rate  # us
    made = []
    for library, times in found.items():
        us = median(times)
        cable = max(b.sent for b in mine if b.library == library) // task.iterations if task.hosts else None
        of_link = None if least is None else least / us
        of_sockets = share(found["sockets"], times)
        made.append(Row(library, task.ranks, task.hosts, size, us, busbw / us, of_sockets, of_link, cable, times))
    return made


COLUMNS = (
    Column("library", "", -10, lambda row: row.library),
    Column("hosts", "", 5, lambda row: str(row.hosts or "-")),
    Column("ranks", "", 5, lambda row: str(row.ranks)),
    Column("size", "(B)", 8, lambda row: format_size(row.bytes)),
    Column("time", "(us)", 11, lambda row: f"{row.time_us:.0f}"),
    Column("busbw", "(GB/s)", 8, lambda row: f"{row.busbw_gbps:.3f}"),
    Column("of sockets", "", 10, lambda row: f"{row.of_sockets:.0%}"),
    Column("of the link", "", 11, lambda row: "-" if row.of_link is None else f"{row.of_link:.0%}"),
    Column("a host sent", "(MB)", 11, lambda row: "-" if row.cable_bytes is None else f"{row.cable_bytes / 1e6:.2f}"),
)


def idle_line(one: Idle) -> str:
    return f"# {one.ranks} ranks: waiting for {one.seconds:.1f} s in an op takes {one.cpu_pct:.2f}% of a core, at most"


def network_line(one: Line) -> str:
    return (
        f"# {one.ranks} ranks: the network took up to {one.busy_pct:.0f}% of a core; {one.dropped} of {one.forwarded} "
        "packets dropped at full queues"
    )
