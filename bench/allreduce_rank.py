"""One rank of `ftcomm bench allreduce`: python -m ftcomm.bench.allreduce_rank TASK_FILE, under the launcher.

Every library runs in the same process, on the same tensor, one after the other: A B A B for each size and round, so
that a machine that changes its speed changes it for both.

    fill, one op, check exactly | a few ops to warm up | timed ops, back to back | check        = one block

Nothing but ops lies between two timed ops: the time of an op then contains no waiting for a rank that came late from
somewhere else. Values grow with each sum; where they could overflow, a block is cut and the array filled again.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import torch

import ftcomm
from ftcomm.bench.data import Pattern

GLOO_REDOPS = ("sum", "min", "max", "product")
GLOO_DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "int32", "int64", "uint8")


class Size(msgspec.Struct, frozen=True):
    bytes: int
    count: int
    iterations: int
    warmup: int


class Task(msgspec.Struct, frozen=True):
    """What all ranks do, in this order; written by the command, read by each rank."""

    ranks: int
    dtype: str
    redop: str
    libraries: tuple[str, ...]
    sizes: tuple[Size, ...]
    rounds: int
    folder: str  # each rank appends its blocks to rank-N.jsonl here


class Block(msgspec.Struct, frozen=True):
    """Timings of one rank; nanoseconds."""

    rank: int
    bytes: int
    round: int
    library: str
    times: list[int]  # of each timed op
    elapsed: int  # from the first timed op's start to the last one's end, without what lies between cuts
    wrong: int


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    torch.set_num_threads(1)
    group = ftcomm.init()
    rank = group.replica
    if len(group.members) != task.ranks:
        raise SystemExit(f"the job began with ranks {group.members}, expected {task.ranks} of them.")
    reduce = {library: _library(library, task, rank) for library in task.libraries}
    pattern = Pattern(task.ranks, task.dtype, task.redop)
    encoder = msgspec.json.Encoder()
    with (Path(task.folder) / f"rank-{rank}.jsonl").open("ab", buffering=0) as out:
        for size in task.sizes:
            x = torch.empty(size.count, dtype=getattr(torch, task.dtype))
            for number in range(task.rounds):
                for library in task.libraries:
                    times, elapsed, wrong = _block(reduce[library], x, size, pattern, rank)
                    block = Block(rank, size.bytes, number, library, times, elapsed, wrong)
                    out.write(encoder.encode(block) + b"\n")
    if "gloo" in task.libraries:
        torch.distributed.destroy_process_group()
    ftcomm.shutdown()


def _library(name: str, task: Task, rank: int) -> Callable[[torch.Tensor], Any]:
    redop = task.redop
    if name == "ftcomm":
        return lambda x: ftcomm.allreduce(x, op=redop)
    if name == "atomic":
        return lambda x: ftcomm.allreduce(x, op=redop, atomic=True)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{task.folder}/rendezvous", rank=rank, world_size=task.ranks)
    reduce_op = getattr(dist.ReduceOp, redop.upper())
    return lambda x: dist.all_reduce(x, op=reduce_op)


def _block(
    reduce: Callable[[torch.Tensor], Any], x: torch.Tensor, size: Size, pattern: Pattern, rank: int
) -> tuple[list[int], int, int]:
    """-> (ns of each timed op, ns of all of them, wrong elements)"""
    times: list[int] = []
    elapsed = wrong = 0
    most = pattern.max_ops() - 1 - size.warmup
    gc.collect()
    gc.disable()  # a collection in the middle would be charged to whoever runs
    try:
        while len(times) < size.iterations:
            timed = min(size.iterations - len(times), most)
            pattern.fill(x, rank)
            reduce(x)
            wrong += pattern.wrong(x, 1)
            for _ in range(size.warmup):
                reduce(x)
            stamps = [perf_counter_ns()]
            for _ in range(timed):
                reduce(x)
                stamps.append(perf_counter_ns())
            times += [after - before for before, after in itertools.pairwise(stamps)]
            elapsed += stamps[-1] - stamps[0]
            wrong += pattern.wrong(x, 1 + size.warmup + timed)
    finally:
        gc.enable()
    return times, elapsed, wrong


if __name__ == "__main__":
    main(sys.argv)
