"""One rank of `ftcomm bench tune`: python -m ftcomm.bench.tune_rank TASK_FILE, under the launcher; and what a rank of
any other job measures.

The ways take turns within each round, in one set of processes: all members change their switch points between the same
two ops. The time of an op is that of its slowest member, which they find by an all-reduce.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

import ftcomm
from ftcomm.collective.exchange import Exchange
from ftcomm.group import Group
from ftcomm.launch.hosts import settle
from ftcomm.settings import Settings
from ftcomm.tuning import EVER, MEMBERS, Tuning

ALWAYS, NEVER = ((MEMBERS, EVER),), ((MEMBERS, 0),)
ONE, TWO, RING, LEVELS = "one-shot", "two-shot", "ring", "two levels"
WAYS = {
    ONE: Tuning(ALWAYS, ALWAYS, ALWAYS, ALWAYS, source=ONE),
    TWO: Tuning(NEVER, NEVER, ALWAYS, ALWAYS, source=TWO),
    RING: Tuning(NEVER, NEVER, NEVER, ALWAYS, source=RING),
    LEVELS: Tuning(NEVER, NEVER, ALWAYS, NEVER, source=LEVELS),
}
WARMUP = 2  # ops
FULL, FEWEST = 128 << 10, 5  # bytes up to which all iterations are made; and iterations


class Task(msgspec.Struct, frozen=True):
    """`pairs`: (first way, second way, sizes in bytes of fp32), for each switch point that is looked for."""

    pairs: tuple[tuple[str, str, tuple[int, ...]], ...]
    iterations: int
    rounds: int
    folder: str = ""  # the lowest replica appends what it finds to rank-N.jsonl here
    per_host: int = 0  # so many replicas are on each host, in the order of their numbers; 0: all are where they are


class Block(msgspec.Struct, frozen=True):
    """The timings of one turn. All members find the same."""

    members: int
    one_host: bool
    first: str  # of the pair that is compared
    second: str
    way: str
    bytes: int
    round: int
    times: list[float]  # us of each op


def turns(task: Task) -> int:
    return sum(2 * len(sizes) for *_, sizes in task.pairs) * task.rounds


def iterations(size: int, most: int) -> int:
    """Fewer of large ones, which take long and vary less."""
    return max(min(most, FEWEST), min(most, most * FULL // size))


def ways(group: Group) -> tuple[str, ...]:
    """Those that an all-reduce may take here beyond one-shot, for `Request.task`. On all members alike."""
    group.allreduce(np.zeros(1, np.float32))
    view = _exchange(group).view
    return (TWO, *((RING,) if len(view.ring) > 2 else ()), *((LEVELS,) if view.hosts else ()))


def _exchange(group: Group) -> Exchange:
    exchange = group._exchange
    assert isinstance(exchange, Exchange)  # the switch points are of this engine
    return exchange


def measure(group: Group, task: Task, on_block: Callable[[Block], None]) -> None:
    """On all members alike. Blocks; raises what an all-reduce raises."""
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
                    on_block(Block(len(view.members), view.one_host, first, second, way, size, number, found))
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


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    if task.per_host:
        settle(f"host-{Settings.from_env().replica // task.per_host}")
    group = ftcomm.init()
    encoder = msgspec.json.Encoder()
    with (Path(task.folder) / f"rank-{group.replica}.jsonl").open("ab", buffering=0) as out:

        def write(block: Block) -> None:
            if group.replica == group.roster[0]:
                out.write(encoder.encode(block) + b"\n")

        measure(group, task, write)
    ftcomm.shutdown()


if __name__ == "__main__":
    main(sys.argv)
