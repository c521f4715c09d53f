"""What measurements of the ranks of one job have in common: what they refuse, the job, its blocks, and the table.

Where an all-reduce is measured beside a yardstick, which carries the same bytes and does nothing else, the ranks time
each library in turn, within rounds; a library's share is of what the yardstick carried in the same round, and the
median of these shares is what counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ftcomm.bench.job import Job, Tail
from ftcomm.bench.limits import check_at_least_one, check_memory, check_replicas
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, slowest
from ftcomm.errors import SettingsError
from ftcomm.launch import RunOptions

RANK_MEMORY = 400 << 20  # bytes of a rank before any array
DEADLINE = 60.0  # seconds that a connection, or a neighbour that stands still, may take


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the command, read by each rank."""

    ranks: int
    sizes: tuple[int, ...]  # bytes
    iterations: int
    rounds: int
    libraries: tuple[str, ...] = ()
    folder: str = ""  # each rank appends its blocks to rank-N.jsonl here


class Block(msgspec.Struct, frozen=True, tag=True):
    rank: int
    bytes: int
    round: int
    library: str
    times: list[int]  # ns of each op
    sent: int = 0  # bytes that left the host of the rank in all of these ops, if that was counted


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
        need = count * (RANK_MEMORY + arrays * max(sizes))
        check_memory(f"{count} ranks with arrays of {format_size(max(sizes))}", need, "--ranks or --sizes")


Progress = Callable[[str, float], None]  # what runs now, and the share that is done


def part(progress: Progress, number: int, of: int) -> Progress:
    """That of one of several jobs, which run one after the other."""
    return lambda what, share: progress(what, (number + share) / of)


async def run_ranks(
    script: str,
    task: Any,
    ranks: int,
    kind: Any,
    total: int,
    progress: Progress,
    look: Callable[[Job, list[Any]], object] = lambda job, records: None,
    *,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """A job of so many ranks that run the module `script` with `task`, a struct with a `folder`, and append records of
    `kind` to rank-N.jsonl there, about `total` of them, which are returned. `look` is called a few times a second with
    those that have come so far. Further `options` are those of `RunOptions`. Raises `FtcommError` if a rank fails; no
    process is left."""
    records: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(task, folder=folder)))
        tail = Tail([Path(folder) / f"rank-{rank}.jsonl" for rank in range(ranks)], kind)
        job_options = RunOptions(
            replicas=ranks,
            script=script,
            module=True,
            args=(str(path),),
            min_replicas=ranks,
            max_restarts=0,
            env={"OMP_NUM_THREADS": "1", **(env or {})},
            **options,
        )
        async with Job(job_options) as job:
            runs = True
            while runs:
                progress(f"{ranks} ranks", min(1.0, len(records) / total))
                runs = await job.runs(0.2)
                records += tail.read()
                look(job, records)
            await job.finish()
    return records


def run(
    task: Task,
    group: Any,
    ops: Callable[[int], Mapping[str, Callable[[], Any]]],
    *,
    turn: Callable[[str], object] = lambda library: None,
    count: Callable[[], int] = lambda: 0,
) -> None:
    """In a rank: time the `ops` of each size, by library, and write blocks. Each begins with one that is not timed.
    `turn` is called before that, alike on all ranks; `count` tells how many bytes have left this host so far."""
    token = np.zeros(1, np.float32)
    encoder = msgspec.json.Encoder()
    with (Path(task.folder) / f"rank-{group.replica}.jsonl").open("ab", buffering=0) as out:
        for size in task.sizes:
            of_size = ops(size)
            for number in range(task.rounds):
                for library in task.libraries:
                    turn(library)
                    op, times = of_size[library], []
                    op()
                    group.allreduce(token)  # all begin together
                    before = count()
                    for _ in range(task.iterations):
                        begin = perf_counter_ns()
                        op()
                        times.append(perf_counter_ns() - begin)
                    group.allreduce(token)  # what ranks of one host send is counted together: all have ended,
                    sent = count() - before
                    group.allreduce(token)  # and none begins with the next before all have counted
                    block = Block(group.replica, size, number, library, times, sent)
                    out.write(encoder.encode(block) + b"\n")


def whole(blocks: Iterable[Block], task: Task, size: int) -> bool:
    """Whether all ranks have measured all libraries at this size in all rounds."""
    return sum(block.bytes == size for block in blocks) >= task.ranks * task.rounds * len(task.libraries)


def rounds_us(blocks: Iterable[Block], task: Task, size: int) -> dict[str, list[float]]:
    """All ranks' blocks -> by library, for each round the median time (us) of the slowest rank."""
    mine = [block for block in blocks if block.bytes == size]
    return {
        library: [
            median(slowest([b.times for b in mine if (b.library, b.round) == (library, number)])) / 1e3
            for number in range(task.rounds)
        ]
        for library in task.libraries
    }


def share(yardstick: Sequence[float], times: Sequence[float]) -> float:
    """How fast against the yardstick: the median over rounds."""
    return median([one / other for one, other in zip(yardstick, times, strict=True)])


class Column(NamedTuple):
    """Of a table, of which each line is a row."""

    name: str
    unit: str
    width: int  # negative: to the left
    text: Callable[[Any], str]

    def place(self, text: str) -> str:
        return text.rjust(self.width) if self.width > 0 else text.ljust(-self.width)


def heading(columns: Iterable[Column]) -> list[str]:
    columns = list(columns)
    return [
        f"# {' '.join(column.place(text) for column, text in zip(columns, texts, strict=True))}".rstrip()
        for texts in ([column.name for column in columns], [column.unit for column in columns])
    ]


def line(columns: Iterable[Column], row: Any) -> str:
    return f"  {' '.join(column.place(column.text(row)) for column in columns)}".rstrip()
