"""`ftcomm bench tune`: up to which size which way of an all-reduce is quicker, here, in which order a ring is, and the
file that says so."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.limits import check_at_least_one
from ftcomm.bench.neighbours import Links
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median
from ftcomm.bench.tune_rank import LEVELS, ONE, RING, TWO, Block, Task, turns
from ftcomm.bench.yardstick import Progress, check, part, run_ranks
from ftcomm.errors import SettingsError
from ftcomm.tuning_file import File

SMALL = tuple(1 << power for power in range(12, 23))  # 4K to 4M
LARGE = tuple(1 << power for power in range(14, 23, 2))  # 16K to 4M


@dataclasses.dataclass(frozen=True)
class Request:
    """`hosts`: "shared", ranks of this host; "netns", hosts of their own on this machine, of `ranks_per_host` each."""

    ranks: Sequence[int] = (3, 4)
    hosts: Sequence[str] = ("shared",)
    ranks_per_host: int = 1
    iterations: int = 20
    rounds: int = 7
    small: Sequence[int] = SMALL  # bytes; one-shot or two-shot
    large: Sequence[int] = LARGE  # each with each, or around a ring or by two levels

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check((*self.small, *self.large), self.ranks, self.iterations, self.rounds, arrays=1)
        check_at_least_one("--ranks-per-host", self.ranks_per_host)
        if self.ranks_per_host > 1 and (tuple(self.hosts) != ("netns",) or min(self.ranks) <= self.ranks_per_host):
            raise SettingsError(
                f"--ranks-per-host {self.ranks_per_host}: expected --hosts netns, and --ranks for two hosts or more."
            )

    def sizes(self, second: str) -> Sequence[int]:
        """In ascending order, at which this way is compared with the one for smaller ones."""
        return self.small if second == TWO else self.large

    def task(self, *seconds: str, per_host: int = 0) -> Task:
        """Compare each of these ways with the one for smaller sizes."""
        pairs = tuple((ONE if second == TWO else TWO, second, tuple(self.sizes(second))) for second in seconds)
        return Task(pairs, self.iterations, self.rounds, per_host=per_host)


class Point(msgspec.Struct, frozen=True):
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
    """How many of the sizes, from the smallest on, go the first way, so that the least is lost over all of them: one
    size at which the machine was disturbed moves nothing. Pure."""

    def lost(taken: int) -> float:
        return sum(math.log(a if i < taken else b) for i, (a, b) in enumerate(zip(first, second, strict=True)))

    return min(range(len(first) + 1), key=lost)


def points(blocks: Iterable[Block], request: Request) -> list[Point]:
    """Of all pairs of ways that were measured at all sizes and in all rounds. Pure."""
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
        made.append(Point(members, one_host, first, second, last, list(wanted), first_us, second_us))
    return made


def to_file(points: Iterable[Point], links: Links | None, before: File, header: Mapping[str, Any]) -> File:
    """What the file says from now on: what was measured, and of the rest what it said before. Pure."""
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
    return File(1, one, far, ring, levels, racks, hosts, measured)


def before(path: Path) -> File:
    """What is in the file now, or nothing. Raises `SettingsError` if it is another file."""
    if not path.exists() or not path.stat().st_size:
        return File(1)
    try:
        return msgspec.json.decode(path.read_bytes(), type=File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--file {path} is no tuning file ({error}); choose another, or remove it.") from None


async def measure(request: Request, on_blocks: Callable[[list[Block]], object], progress: Progress) -> None:
    """Jobs of all numbers of ranks, one after the other; hand over all that was measured so far, again and again.
    Raises `FtcommError` if one fails; no process is left."""
    jobs = [(hosts, ranks) for hosts in request.hosts for ranks in request.ranks]
    blocks: list[Block] = []
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
            "ftcomm.bench.tune_rank",
            task,
            ranks,
            Block,
            turns(task),
            part(progress, number, len(jobs)),
            functools.partial(_look, on_blocks, tuple(blocks)),
            env={"FTCOMM_TUNING": "", "FTCOMM_ALGORITHM": algorithm},
            transport=transport,
            hosts=hosts,
            replicas_per_host=per_host,
        )


def _look(on_blocks: Callable[[list[Block]], object], earlier: Sequence[Block], job: object, came: list[Block]) -> None:
    on_blocks([*earlier, *came])
