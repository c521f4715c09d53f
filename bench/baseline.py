"""An all-reduce beside a baseline that carries the same bytes and does nothing else, in the same ranks.

The ranks time each library in turn, within rounds. The share of a library is of what the baseline carried in the same
round, and the median of these shares is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter_ns, process_time_ns
from typing import Any

import msgspec
import numpy as np

from ftcomm.bench.checks import check_at_least_one, check_memory, check_replicas
from ftcomm.bench.job import Records
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, slowest
from ftcomm.errors import SettingsError

DEADLINE = 60.0  # seconds that a connection, or a neighbour that stands still, may take


class BaselineTask(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the command, read by each rank."""

    ranks: int
    sizes: tuple[int, ...]  # bytes
    iterations: int
    rounds: int
    libraries: tuple[str, ...] = ()
    folder: str = ""


class BaselineBlock(msgspec.Struct, frozen=True, tag=True):
    rank: int
    bytes: int
    round: int
    library: str
    times: list[int]  # ns of each op
    sent: int = 0  # bytes that left the host of the rank in all of these ops, if that was counted
    cpu: int = 0  # ns of the processor that the threads of the rank took for all of these ops


def check(
    sizes: Sequence[int], ranks: Iterable[int], iterations: int, rounds: int, *, arrays: int, least: int = 1 << 10
) -> None:
    """Raise `SettingsError`, with the mend, on what cannot be measured. A rank has so many `arrays` of a size, which is
    `least` bytes or more."""
    check_at_least_one("-n", iterations)
    check_at_least_one("--rounds", rounds)
    if min(sizes) < least or any(size % 4 for size in sizes):
        raise SettingsError(f"--sizes {min(sizes)}: expected multiples of 4 bytes from {format_size(least)} on.")
    for count in ranks:
        check_replicas(count)
        what = f"{count} ranks with arrays of {format_size(max(sizes))}"
        check_memory(what, count, arrays * max(sizes), "--ranks or --sizes")


def run(
    task: BaselineTask,
    group: Any,
    ops: Callable[[int], Mapping[str, Callable[[], Any]]],
    *,
    turn: Callable[[str], object] = lambda library: None,
    count: Callable[[], int] = lambda: 0,
) -> None:
    """Time the `ops` of each size in a rank, by library, and write blocks. Each begins with one that is not timed.
    `turn` is called before that, alike on all ranks; `count` tells how many bytes have left this host so far."""
    token = np.zeros(1, np.float32)
    records = Records(task.folder, group.replica)
    for size in task.sizes:
        of_size = ops(size)
        for number in range(task.rounds):
            for library in task.libraries:
                turn(library)
                op, times = of_size[library], []
                op()
                group.allreduce(token)  # all begin together
                before, cpu = count(), process_time_ns()
                for _ in range(task.iterations):
                    begin = perf_counter_ns()
                    op()
                    times.append(perf_counter_ns() - begin)
                cpu = process_time_ns() - cpu
                group.allreduce(token)  # what ranks of one host send is counted together: all have ended,
                sent = count() - before
                group.allreduce(token)  # and none begins with the next before all have counted
                records.write(BaselineBlock(group.replica, size, number, library, times, sent, cpu))


def whole(blocks: Iterable[BaselineBlock], task: BaselineTask, size: int) -> bool:
    """Whether all ranks have measured all libraries at this size in all rounds."""
    return sum(block.bytes == size for block in blocks) >= task.ranks * task.rounds * len(task.libraries)


def reporter(
    task: BaselineTask, rows: Callable[[list[BaselineBlock], int], Sequence[Any]], add: Callable[[Any], object]
) -> Callable[[Iterable[Any]], None]:
    """Returns what is called with all records so far, again and again, and adds the `rows` of each size, made of its
    blocks, as soon as all ranks have measured it."""
    left = list(task.sizes)

    def look(records: Iterable[Any]) -> None:
        blocks = [record for record in records if isinstance(record, BaselineBlock)]
        while left and whole(blocks, task, left[0]):
            for row in rows(blocks, left.pop(0)):
                add(row)

    return look


def rounds_us(blocks: Iterable[BaselineBlock], task: BaselineTask, size: int) -> dict[str, list[float]]:
    """All ranks' blocks -> by library, for each round the median time (us) of the slowest rank."""
    mine = [block for block in blocks if block.bytes == size]
    return {
        library: [
            median(slowest([b.times for b in mine if (b.library, b.round) == (library, number)])) / 1e3
            for number in range(task.rounds)
        ]
        for library in task.libraries
    }


def share(baseline: Sequence[float], times: Sequence[float]) -> float:
    """The speed relative to the baseline: the median over rounds."""
    return median([one / other for one, other in zip(baseline, times, strict=True)])
