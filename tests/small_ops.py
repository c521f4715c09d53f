"""What a small all-reduce takes in a group of many members on this machine, through a tree and without.

    python -m tests.small_ops --members 16,24,32 --mode loopback --fans 0,2,4,8

A fan of 0 is no tree: every member reads from every other. By "loopback" members of one host reach each other by TCP,
by "tcp" such as take each other for unlike hosts. Each line has the median of the slowest member of each op,
and the seconds of the processor that an op took, of all members together; of rounds in turn, the medians.
"""

from __future__ import annotations

import dataclasses
import statistics

import click

from ftcomm.settings.tuning import BUILT_IN, MEMBERS, Tuning
from tests.process.test_exchange_kills import Job


def tuned(fan: int, nbytes: int) -> Tuning:
    points = ((MEMBERS, nbytes if fan else 0),)
    return dataclasses.replace(BUILT_IN, tree=points, tree_on_one_host=points, tree_fan=max(fan, 1))


def measured(job: Job, nbytes: int, times: int) -> tuple[float, float]:
    job.start_all("repeat", nbytes // 4, times)
    took, worked = zip(*(job.receive(replica, "done") for replica in job.processes), strict=True)
    slowest = [max(each) for each in zip(*took, strict=True)][times // 5 :]
    return 1e6 * statistics.median(slowest), 1e6 * sum(worked) / times


@click.command()
@click.option("--members", default="16,24,32", show_default=True, metavar="N,N")
@click.option("--bytes", "sizes", default="1024", show_default=True, metavar="B,B")
@click.option("--fans", default="0,4", show_default=True, metavar="F,F")
@click.option("--mode", type=click.Choice(["shm", "loopback", "tcp"]), default="shm", show_default=True)
@click.option("--times", default=200, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(members: str, sizes: str, fans: str, mode: str, times: int, rounds: int) -> None:
    for count in map(int, members.split(",")):
        job = Job(count, mode)
        found: dict[tuple[int, int], list[tuple[float, float]]] = {}
        try:
            for replica in job.processes:
                (job.addresses[replica],) = job.receive(replica, "hello")
            for _ in range(rounds):
                for fan in map(int, fans.split(",")):
                    job.start_all("tune", tuned(fan, 1 << 20))
                    job.view()
                    for nbytes in map(int, sizes.split(",")):
                        found.setdefault((nbytes, fan), []).append(measured(job, nbytes, times))
        finally:
            job.close()
        for (nbytes, fan), each in sorted(found.items()):
            us, worked = (statistics.median(values) for values in zip(*each, strict=True))
            click.echo(
                f"{count} members by {mode}, {nbytes} bytes, {f'fan {fan}' if fan else 'no tree'}: "
                f"{us:.0f} us, {worked:.0f} us of the processor"
            )


if __name__ == "__main__":
    main()
