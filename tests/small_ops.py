"""What a small all-reduce takes in a group of many members on this machine, through a tree and without.

    python -m tests.small_ops --members 12,16,17,24 --bytes 1024,65536 --mode tcp --fans 0,4 --json FILE

A fan of 0 is no tree: every member reads from every other. By "loopback" members of one host reach each other by TCP,
by "tcp" such as take each other for unlike hosts, so that without a tree each sums a slice. Rounds are in turn. For an
op, the median of its slowest member; and of all members together the seconds of the processor, and the frames by TCP.
Of rounds, the medians.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from pathlib import Path
from typing import NamedTuple

import click

from ftcomm.bench.header import header
from ftcomm.settings.tuning import BUILT_IN, MEMBERS, Tuning
from tests.process.test_exchange_kills import Job


class Point(NamedTuple):
    us: float
    cpu_us: float
    frames: float


def tuned(fan: int, nbytes: int) -> Tuning:
    points = ((MEMBERS, nbytes if fan else 0),)
    return dataclasses.replace(BUILT_IN, tree=points, tree_on_one_host=points, tree_fan=max(fan, 1))


def measured(job: Job, nbytes: int, times: int) -> Point:
    job.start_all("repeat", nbytes // 4, times)
    took, *sums = zip(*(job.receive(replica, "done") for replica in job.processes), strict=True)
    slowest = [max(each) for each in zip(*took, strict=True)][times // 5 :]
    worked, frames = (sum(each) / times for each in sums)
    return Point(1e6 * statistics.median(slowest), 1e6 * worked, frames)


def middle(points: list[Point]) -> Point:
    return Point(*(statistics.median(values) for values in zip(*points, strict=True)))


@click.command()
@click.option("--members", default="16,24,32", show_default=True, metavar="N,N")
@click.option("--bytes", "sizes", default="1024", show_default=True, metavar="B,B")
@click.option("--fans", default="0,4", show_default=True, metavar="F,F")
@click.option("--mode", type=click.Choice(["shm", "loopback", "tcp"]), default="shm", show_default=True)
@click.option("--times", default=200, show_default=True, help="Ops of each round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all rounds there.")
def main(members: str, sizes: str, fans: str, mode: str, times: int, rounds: int, file: Path | None) -> None:
    begun = header()
    rows: list[dict[str, object]] = []
    for count in map(int, members.split(",")):
        job = Job(count, mode)
        found: dict[tuple[int, int], list[Point]] = {}
        loads: list[float] = []
        try:
            for replica in job.processes:
                (job.addresses[replica],) = job.receive(replica, "hello")
            for _ in range(rounds):
                for fan in map(int, fans.split(",")):
                    job.start_all("tune", tuned(fan, 1 << 20))
                    job.view()
                    for nbytes in map(int, sizes.split(",")):
                        found.setdefault((nbytes, fan), []).append(measured(job, nbytes, times))
                        loads.append(round(os.getloadavg()[0], 2))
        finally:
            job.close()
        for (nbytes, fan), each in sorted(found.items()):
            one = middle(each)
            where = {"members": count, "mode": mode, "bytes": nbytes, "fan": fan, "loads": loads}
            rows.append({**where, **one._asdict(), "rounds": [point._asdict() for point in each]})
            click.echo(
                f"{count} members by {mode}, {nbytes} bytes, {f'fan {fan}' if fan else 'no tree'}: {one.us:.0f} us, "
                f"{one.cpu_us:.0f} us of the processor, {one.frames:.0f} frames"
            )
        if file is not None:
            file.write_text(json.dumps({"header": begun, "points": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
