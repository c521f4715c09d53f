"""What a rank of a group of many members takes of memory, by the transport that its members reach each other by.

    python -m tests.many_members --members 4,16,24 --mode tcp

Prints by how many megabytes the memory of a rank has grown, on top of its segment, behind each thing that the group
has done; medians over all ranks. A rank is a process of its own, forked from one that has imported what all need, so
what is counted is what it alone has written (Private_Dirty of smaps_rollup).
"""

from __future__ import annotations

import statistics
from pathlib import Path

import click

from tests.process.test_exchange_kills import Job

SMALL, LARGE, EACH = 256, 4 << 20, 200_000  # elements of float32


def dirty(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def taken(job: Job) -> float:
    return statistics.median(dirty(process.pid) for process in job.processes.values())


@click.command()
@click.option("--members", default="4,16,24", show_default=True, metavar="N,N")
@click.option("--mode", type=click.Choice(["tcp", "ring"]), default="tcp", show_default=True)
def main(members: str, mode: str) -> None:
    for count in map(int, members.split(",")):
        job = Job(count, mode)
        try:
            for replica in job.processes:
                (job.addresses[replica],) = job.receive(replica, "hello")
            said = []
            before = taken(job)
            job.view()
            for name, elements in (("all-reduce of 1 KB", SMALL), ("of 16 MB", LARGE)):
                for _ in range(10 if elements == SMALL else 1):
                    job.reduce(elements)
                    job.results()
                said.append((name, taken(job) - before))
            job.start_all("call", "allgather", EACH, tuple(job.processes))
            job.results()
            said.append(("allgather of 0.8 MB from each", taken(job) - before))
        finally:
            job.close()
        click.echo(f"{count} members by {mode}: " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in said))


if __name__ == "__main__":
    main()
