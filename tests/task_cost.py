"""Counts what a large all-reduce takes of each of its ranks on this machine, with its waits.

    python -m tests.task_cost --members 4 --bytes 64M

Ranks are processes that share memory, and that nobody controls. Of an op, for each rank: its tasks, how often it found
something to do, and how often nothing, its yields of the core, its sleeps and wake-up calls, and milliseconds of the
processor. `tests.bytecodes` counts the bytecodes of an op without its waits.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import click
import numpy as np

from ftcomm.bench.sizes import parse_size
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.stream import Stream
from ftcomm.sync import futex
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import Segment
from ftcomm.transport.shm import ShmPeer
from tests.rigs.exchange import DEADLINE, LAYOUT, deadlines

WARM = 5  # ops before those that count


def counted(counts: Counter[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        counts[name] += 1
        return call(*args)

    return counting


def watched() -> Counter[str]:
    """Counts, from now on, what this process does."""
    counts: Counter[str] = Counter()
    advance = Stream.advance

    def turn(stream: Stream) -> bool:
        moved = advance(stream)
        counts["turns" if moved else "in vain"] += 1
        return moved

    Stream.advance = turn  # type: ignore[method-assign]
    os.sched_yield = counted(counts, "yields", os.sched_yield)
    futex._wait, futex._wake = counted(counts, "sleeps", futex._wait), counted(counts, "wake-ups", futex._wake)
    return counts


def rank(me: int, members: int, nbytes: int, ops: int, others: Connection) -> None:
    counts, segment = watched(), Segment(LAYOUT)
    others.send((os.getpid(), segment.fd, segment.nonce))
    there = others.recv()
    exchange = Exchange(me, segment, **deadlines(DEADLINE), on_stall=lambda stall: None)
    exchange.freeze(lambda: None)
    everybody = tuple(range(members))
    peers: dict[int, Peer] = {m: ShmPeer(m, *there[m], LAYOUT) for m in everybody if m != me}
    view = GroupView(1, me, everybody, frozenset(everybody), True)
    exchange.enter(view, peers, dict.fromkeys(everybody, exchange.progress()))
    stream = exchange.core.stream
    assert stream is not None
    array = np.ones(nbytes // 4, np.float32)
    for number in range(WARM + ops):
        if number == WARM:
            counts.clear()
            tasks, before = stream.pipeline.taken, resource.getrusage(resource.RUSAGE_SELF)
        exchange.run(Operation(array, "float32", "max"))
    now = resource.getrusage(resource.RUSAGE_SELF)
    counts["tasks"] = stream.pipeline.taken - tasks
    took = {"user ms": now.ru_utime - before.ru_utime, "system ms": now.ru_stime - before.ru_stime}
    others.send({name: 1e3 * seconds / ops for name, seconds in took.items()} | {k: n / ops for k, n in counts.items()})
    others.recv()  # the others may still read this segment


@click.command()
@click.option("--members", default=4, show_default=True)
@click.option("--bytes", "size", default="64M", show_default=True, metavar="SIZE")
@click.option("--ops", default=10, show_default=True)
def main(members: int, size: str, ops: int) -> None:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(members)]
    ranks = [
        context.Process(target=rank, args=(me, members, parse_size(size), ops, there), daemon=True)
        for me, (_, there) in enumerate(pipes)
    ]
    for each in ranks:
        each.start()

    def from_all() -> list[Any]:
        if not all(here.poll(DEADLINE) for here, _ in pipes):
            raise click.ClickException(f"a rank has said nothing for {DEADLINE:g} s")
        return [here.recv() for here, _ in pipes]

    def to_all(said: object) -> None:
        for here, _ in pipes:
            here.send(said)

    to_all(from_all())
    found = from_all()
    to_all(None)
    for each in ranks:
        each.join(DEADLINE)
    for name in ("tasks", "turns", "in vain", "yields", "sleeps", "wake-ups", "user ms", "system ms"):
        click.echo(f"{sum(of.get(name, 0) for of in found) / members:8.1f} {name}")


if __name__ == "__main__":
    main()
