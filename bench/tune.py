"""`ftcomm bench tune`: the sizes at which one algorithm of an all-reduce becomes quicker than another, here, the order
of a ring, and the file that says so.

The algorithms take turns within each round, in one set of processes: all members change their switch points between the
same two ops. The time of an op is that of its slowest member, which they find by an all-reduce.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import ftcomm
from ftcomm.bench import bandwidth
from ftcomm.bench.bandwidth import Links
from ftcomm.bench.baseline import check
from ftcomm.bench.checks import check_at_least_one
from ftcomm.bench.harness import FILE, INTS, BenchReport, Experiment, Table, option, write_json, written_at_the_end
from ftcomm.bench.job import Records, part, run_ranks
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median
from ftcomm.collective.exchange import Exchange
from ftcomm.errors import SettingsError
from ftcomm.groups.group import Group
from ftcomm.lab.netns.hosts import NamespaceHosts
from ftcomm.lab.netns.slow_network import settle
from ftcomm.launch.commands.option_types import choices
from ftcomm.settings import Settings
from ftcomm.settings.tuning import EVER, MEMBERS, Tuning
from ftcomm.settings.tuning_file import File

SMALL = tuple(1 << power for power in range(12, 23))  # 4K to 4M
LARGE = tuple(1 << power for power in range(14, 23, 2))  # 16K to 4M
ALWAYS, NEVER = ((MEMBERS, EVER),), ((MEMBERS, 0),)
ONE, TWO, RING, LEVELS = "one-shot", "two-shot", "ring", "two levels"
WAYS = {
    ONE: Tuning(ALWAYS, ALWAYS, ALWAYS, ALWAYS, tree=NEVER, tree_on_one_host=NEVER, source=ONE),
    TWO: Tuning(NEVER, NEVER, ALWAYS, ALWAYS, tree=NEVER, tree_on_one_host=NEVER, source=TWO),
    RING: Tuning(NEVER, NEVER, NEVER, ALWAYS, tree=NEVER, tree_on_one_host=NEVER, source=RING),
    LEVELS: Tuning(NEVER, NEVER, ALWAYS, NEVER, tree=NEVER, tree_on_one_host=NEVER, source=LEVELS),
}
WARMUP = 2  # ops
FULL, FEWEST = 128 << 10, 5  # bytes up to which all iterations are made; and iterations


@dataclasses.dataclass(frozen=True)
class TuneRequest:
    """Find the switch points of all-reduces on this machine, or between the hosts of a job.

    Small ones are reduced by each member itself (one-shot), larger ones in slices (two-shot); still larger ones go
    around, with FTCOMM_ALGORITHM=ring, or by two levels, where members share hosts. The file that is written says up to
    which size; give it to all ranks with FTCOMM_TUNING. Of other numbers of members, and of what was not measured, it
    keeps what it said before.

    Started as a rank of a job (FTCOMM_COORDINATOR is set), as by `srun ftcomm bench tune`, it measures among the
    members of that job, where they are and by the transport that they have; the lowest replica writes the file. With
    four hosts and more it also measures what each two of them exchange a second, 8 MB at a time: the file then says in
    which order a ring goes through them, so that its slowest link is as fast as it can be.
    """

    file: Path = option(  # noqa: RUF009 - a field
        Path("ftcomm-tuning.json"), kind=FILE, help="Written, or brought up to date."
    )
    ranks: Sequence[int] = option((3, 4), kind=INTS, help="Members.")
    hosts: Sequence[str] = option(
        ("shared",),
        kind=choices("shared", "netns"),
        help="Ranks of this host; hosts of their own on this machine, over TCP and by root.",
    )
    ranks_per_host: int = option(1, help="With netns: they share hosts.")
    iterations: int = option(20, "-n", "--iters", help="Timed ops in a turn; fewer of large ones.")
    rounds: int = option(7, help="Turns of each algorithm at each size.")
    small: Sequence[int] = SMALL  # bytes; one-shot or two-shot
    large: Sequence[int] = LARGE  # each with each, or around a ring or by two levels

    def smoke(self) -> TuneRequest:
        """Two sizes and a few ops, to see that it runs."""
        few = dict(ranks=self.ranks[:1], iterations=3, rounds=2, small=SMALL[2:7:4], large=LARGE[:2])
        return dataclasses.replace(self, **few)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check((*self.small, *self.large), self.ranks, self.iterations, self.rounds, arrays=1)
        check_at_least_one("--ranks-per-host", self.ranks_per_host)
        if self.ranks_per_host > 1 and (tuple(self.hosts) != ("netns",) or min(self.ranks) <= self.ranks_per_host):
            raise SettingsError(
                f"--ranks-per-host {self.ranks_per_host}: expected --hosts netns, and --ranks for two hosts or more."
            )

    def sizes(self, second: str) -> Sequence[int]:
        """Returns the sizes, ascending, at which this way is compared with the one for smaller ones."""
        return self.small if second == TWO else self.large

    def task(self, *seconds: str, per_host: int = 0) -> TuneTask:
        """Compare each of these ways with the one for smaller sizes."""
        pairs = tuple((ONE if second == TWO else TWO, second, tuple(self.sizes(second))) for second in seconds)
        return TuneTask(pairs, self.iterations, self.rounds, per_host=per_host)


class SwitchPoint(msgspec.Struct, frozen=True):
    """The first way up to `bytes`, the second above; by medians over rounds of medians."""

    members: int
    one_host: bool
    first: str
    second: str
    bytes: int  # 0: the second at every size that was measured
    sizes: list[int]
    first_us: list[float]  # at each size
    second_us: list[float]

    def __str__(self) -> str:
        where = "on one host" if self.one_host else "between hosts"
        if not self.bytes:
            at, said = 0, f"{self.second} at every size"
        else:
            at, said = self.sizes.index(self.bytes), f"{self.first} up to {format_size(self.bytes)}B"
        times = f"{self.first_us[at]:.0f} us against {self.second_us[at]:.0f} us at {format_size(self.sizes[at])}B"
        if at + 1 < len(self.sizes) and self.bytes:
            times += f", {self.first_us[at + 1]:.0f} against {self.second_us[at + 1]:.0f} at "
            times += f"{format_size(self.sizes[at + 1])}B"
        return f"{said} with {self.members} members {where}: {times}"


def switch(first: Sequence[float], second: Sequence[float]) -> int:
    """Returns how many of the sizes, from the smallest on, go the first way, so that the least is lost over all of
    them: one size at which the machine was disturbed moves nothing. Pure."""

    def lost(taken: int) -> float:
        return sum(math.log(a if i < taken else b) for i, (a, b) in enumerate(zip(first, second, strict=True)))

    return min(range(len(first) + 1), key=lost)


def points(blocks: Iterable[TurnBlock], request: TuneRequest) -> list[SwitchPoint]:
    """Returns the switch points of all pairs of ways that were measured at all sizes and in all rounds. Pure."""
    found: dict[tuple[int, bool, str, str], dict[int, dict[str, list[float]]]] = {}
    for block in blocks:
        sizes = found.setdefault((block.members, block.one_host, block.first, block.second), {})
        sizes.setdefault(block.bytes, {}).setdefault(block.way, []).append(median(block.times))
    made = []
    for (members, one_host, first, second), sizes in found.items():
        wanted = request.sizes(second)
        if any(len(sizes.get(size, {}).get(way, ())) < request.rounds for size in wanted for way in (first, second)):
            continue
        first_us, second_us = ([median(sizes[size][way]) for size in wanted] for way in (first, second))
        taken = switch(first_us, second_us)
        last = wanted[taken - 1] if taken else 0
        made.append(SwitchPoint(members, one_host, first, second, last, list(wanted), first_us, second_us))
    return made


def to_file(points: Iterable[SwitchPoint], links: Links | None, before: File, header: Mapping[str, Any]) -> File:
    """Returns what the file says from now on: what was measured, and of the rest what it said before. Pure."""
    measured = dict(before.measured)
    one, far, ring, levels = (
        dict(sizes)
        for sizes in (
            before.one_shot_on_one_host,
            before.one_shot_between_hosts,
            before.direct_before_ring,
            before.direct_before_two_levels,
        )
    )
    for point in points:
        into = {RING: ring, LEVELS: levels}.get(point.second, one if point.one_host else far)
        into[point.members] = point.bytes
        where = "one host" if point.one_host else "hosts"
        measured[f"{point.first} or {point.second}, {point.members} members, {where}"] = {
            "header": dict(header),
            "sizes": point.sizes,
            f"{point.first} us": point.first_us,
            f"{point.second} us": point.second_us,
        }
    racks, hosts = before.ring_through_racks, before.ring_through_hosts
    if links is not None:
        order = links.order()
        racks = list(dict.fromkeys([*(host.rack for host in order), *racks]))
        hosts = list(dict.fromkeys([*(host.address for host in order), *hosts]))
        measured["bandwidth between hosts"] = {
            "header": dict(header),
            "MB/s": {
                f"{links.hosts[a].address} {links.hosts[b].address}": round(rate / 1e6, 1)
                for (a, b), rate in links.rates.items()
            },
        }
    return File(1, one, far, ring, levels, before.tree_between_hosts, before.tree_on_one_host, racks, hosts, measured)


def before(path: Path) -> File:
    """Returns what is in the file now, or nothing. Raises `SettingsError` if it is another file."""
    if not path.exists() or not path.stat().st_size:
        return File(1)
    try:
        return msgspec.json.decode(path.read_bytes(), type=File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--file {path} is no tuning file ({error}); choose another, or remove it.") from None


async def run(request: TuneRequest, report: BenchReport) -> None:
    """Measure in jobs of this command, or as a rank of one."""
    earlier, links = before(request.file), None

    def write(path: Path) -> None:
        write_json(path, to_file(report["points"], links, earlier, report.fields))

    with written_at_the_end("--file", request.file if report.speaks else None, write):
        if not in_job():
            await run_jobs(request, report)
            return
        group = ftcomm.default_group()
        blocks: list[TurnBlock] = []
        measure(group, request.task(*ways(group)), blocks.append)
        for point in points(blocks, request):
            report.add(point)
        links = bandwidth.measure(group, lambda text: report.line(f"# {text}"))
        if links is not None:
            report.line(str(links))
        ftcomm.shutdown()


def in_job() -> bool:
    return "FTCOMM_COORDINATOR" in os.environ


def speaks() -> bool:
    """Whether this process is the command, or of the ranks of a job the one that speaks for all."""
    group = ftcomm.init() if in_job() else None
    return group is None or (group.shard == 0 and group.replica == group.roster[0])


EXPERIMENT = Experiment(
    "tune",
    TuneRequest,
    run,
    [Table("points", SwitchPoint, line=str)],
    footer=lambda report: [f"# {report.request.file}; use it with FTCOMM_TUNING={report.request.file} on all ranks"],
    speaks=speaks,
)


class TuneTask(msgspec.Struct, frozen=True):
    """The switch points to look for; `pairs` has (first way, second way, sizes in bytes of fp32) for each."""

    pairs: tuple[tuple[str, str, tuple[int, ...]], ...]
    iterations: int
    rounds: int
    folder: str = ""
    per_host: int = 0  # so many replicas are on each host, in the order of their numbers; 0: all are where they are


class TurnBlock(msgspec.Struct, frozen=True):
    """The timings of one turn. All members find the same."""

    members: int
    one_host: bool
    first: str  # of the pair that is compared
    second: str
    way: str
    bytes: int
    round: int
    times: list[float]  # us of each op


async def run_jobs(request: TuneRequest, report: BenchReport) -> None:
    """Jobs of all numbers of ranks, one after the other. Raises `FtcommError` if one fails; no process is left."""
    jobs = [(hosts, ranks) for hosts in request.hosts for ranks in request.ranks]
    blocks: list[TurnBlock] = []

    def look(job: object, came: list[TurnBlock]) -> None:
        for point in points([*blocks, *came], request)[len(report["points"]) :]:
            report.add(point)

    for number, (hosts, ranks) in enumerate(jobs):
        if hosts == "shared":
            task, transport, algorithm, per_host = request.task(TWO), "shm", "direct", 1
        elif request.ranks_per_host == 1:
            seconds = (TWO, RING) if ranks > 2 else (TWO,)
            task, transport, algorithm, per_host = request.task(*seconds, per_host=1), "tcp", "ring", 1
        else:
            per_host = request.ranks_per_host
            task, transport, algorithm = request.task(LEVELS, per_host=per_host), "auto", "auto"
        blocks += await run_ranks(
            rank,
            task,
            ranks,
            TurnBlock,
            turns(task),
            part(report.progress, number, len(jobs)),
            look,
            env={"FTCOMM_TUNING": "", "FTCOMM_ALGORITHM": algorithm},
            transport=transport,
            hosts=NamespaceHosts(per_host) if hosts == "netns" else None,
        )


# -- in a rank ---------------------------------------------------------------------------------------------------------


def turns(task: TuneTask) -> int:
    return sum(2 * len(sizes) for *_, sizes in task.pairs) * task.rounds


def iterations(size: int, most: int) -> int:
    """Returns how many: fewer of large ones, which take long and vary less."""
    return max(min(most, FEWEST), min(most, most * FULL // size))


def ways(group: Group) -> tuple[str, ...]:
    """Returns the algorithms that an all-reduce may take here beyond one-shot, for `TuneRequest.task`. The same on all
    members."""
    group.allreduce(np.zeros(1, np.float32))
    view = _exchange(group).view
    return (TWO, *((RING,) if len(view.ring) > 2 else ()), *((LEVELS,) if view.hosts else ()))


def _exchange(group: Group) -> Exchange:
    exchange = group.internals.exchange
    assert isinstance(exchange, Exchange)  # the switch points are of this engine
    return exchange


def measure(group: Group, task: TuneTask, on_block: Callable[[TurnBlock], None]) -> None:
    """Measure, on all members alike. Blocks; raises what an all-reduce raises."""
    exchange = _exchange(group)
    token = np.zeros(1, np.float32)
    group.allreduce(token)
    view = exchange.view
    for first, second, sizes in task.pairs:
        for size in sizes:
            x = np.zeros(size // 4, np.float32)
            for number in range(task.rounds):
                for way in (first, second):
                    exchange.tune(WAYS[way])
                    times = _time(lambda x=x: group.allreduce(x), iterations(size, task.iterations))
                    group.allreduce(times, op="max")
                    found = [float(each) for each in times]
                    on_block(TurnBlock(len(view.members), view.one_host, first, second, way, size, number, found))
    exchange.tune(view.tuning)


def _time(op: Callable[[], object], iterations: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    for _ in range(WARMUP):
        op()
    times = np.empty(iterations)
    for i in range(iterations):
        begin = time.perf_counter_ns()
        op()
        times[i] = (time.perf_counter_ns() - begin) / 1e3
    return times


def rank(task: TuneTask) -> None:
    if task.per_host:
        settle(f"host-{Settings.from_env().replica // task.per_host}")
    group = ftcomm.init()
    records = Records(task.folder, group.replica)
    measure(group, task, records.write if group.replica == group.roster[0] else lambda block: None)
    ftcomm.shutdown()
