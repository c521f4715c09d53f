"""What many groups of one process take: memory to stage in, threads and descriptors.

    python -m tests.many_groups --groups 1,16,64 --bytes 1024 --transport tcp

The members are processes of their own, each of which makes so many static groups of all of them and runs one
all-reduce in each. Prints of the first of them by how much it has grown over a process without groups: its segments
(the memory that it has reserved, whoever has touched it), what it has of shared memory, its own and that of others,
what no file backs, its threads and its descriptors.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from ftcomm.groups.static_endpoint import Endpoint
from ftcomm.groups.static_group import StaticGroup
from ftcomm.transport.segment import Segment

TIMEOUT = 120.0  # s for anything that a member does


class Taken(NamedTuple):
    shared: float  # MB
    private: float  # MB
    threads: int
    descriptors: int


def taken() -> Taken:
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    status = {name: int(value.split()[0]) / 1024 for name, _, value in lines if name in ("RssShmem", "RssAnon")}
    return Taken(status["RssShmem"], status["RssAnon"], threading.active_count(), len(os.listdir("/proc/self/fd")))


def member(groups: int, nbytes: int, transport: str, pipe: Connection) -> None:
    endpoint = Endpoint()
    Segment(chunks=0).close()  # opens what a process opens once and keeps
    pipe.send(endpoint.handle)
    handles = pipe.recv()
    before = taken()
    made = [
        StaticGroup.from_handles(endpoint, f"group{number}", handles, timeout=TIMEOUT, transport=transport)
        for number in range(groups)
    ]
    for group in made:
        array = np.ones(max(1, nbytes // 4), np.float32)
        group.allreduce(array)
        if (array != len(handles)).any():
            raise AssertionError(f"a sum of {array}; expected {len(handles)}")
    reserved = sum(os.fstat(group.internals._segment.fd).st_blocks for group in made) * 512 / 2**20
    pipe.send((before, taken(), reserved))
    pipe.recv()  # the others are through, too
    for group in made:
        group.close()
    endpoint.close()


def measure(members: int, groups: int, nbytes: int, transport: str) -> tuple[Taken, Taken, float]:
    """Returns what the first member had before, and had in the end, and the MB of its segments."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(members)]
    processes = [context.Process(target=member, args=(groups, nbytes, transport, there)) for _, there in pairs]
    pipes = [here for here, _ in pairs]
    try:
        for process in processes:
            process.start()
        handles = [receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(handles)
        said = [receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(TIMEOUT)
    finally:
        for process in processes:
            process.kill()
    return said[0]


def receive(pipe: Connection) -> object:
    if not pipe.poll(TIMEOUT):
        raise click.ClickException("a member does not answer")
    return pipe.recv()


@click.command()
@click.option("--groups", default="1,16,64", show_default=True, metavar="N,N")
@click.option("--members", default=2, show_default=True)
@click.option("--bytes", "nbytes", default=1024, show_default=True)
@click.option("--transport", type=click.Choice(["shm", "tcp"]), default="shm", show_default=True)
def main(groups: str, members: int, nbytes: int, transport: str) -> None:
    for count in map(int, groups.split(",")):
        before, after, reserved = measure(members, count, nbytes, transport)
        more = Taken(*(now - then for now, then in zip(after, before, strict=True)))
        click.echo(
            f"{count} groups of {members} by {transport}, {nbytes} B: segments {reserved:.2f} MB, shared memory "
            f"{more.shared:.1f} MB, private {more.private:.1f} MB, threads {more.threads}, descriptors "
            f"{more.descriptors}"
        )


if __name__ == "__main__":
    main()
