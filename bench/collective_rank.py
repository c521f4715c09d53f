"""One rank of `ftcomm bench allreduce` and its like: python -m ftcomm.bench.collective_rank TASK_FILE JOB

    fill, one op, check exactly | a few ops to warm up | timed ops, back to back | check        = one block

Nothing but ops lies between two timed ops: the time of an op then contains no waiting for a rank that came late from
somewhere else. Sums in place grow with each op; where they could overflow, a block is cut and the array filled again.
On a GPU events of its stream tell the times, and with a graph one op is captured and replayed.
"""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import torch

from ftcomm.bench.collectives import COLLECTIVES, IN, Case
from ftcomm.bench.data import Pattern
from ftcomm.bench.libraries import Library, Mpi, Op, open_library, rank_of_environment
from ftcomm.bench.turns import Block, Seat, Turn
from ftcomm.collective.wire import FP8

MPI_JOB = "mpi"


class Size(msgspec.Struct, frozen=True):
    bytes: int
    count: int  # of the whole array
    iterations: int
    warmup: int


class Task(msgspec.Struct, frozen=True):
    """What the ranks of all libraries measure; written by the command, read by each rank."""

    collective: str
    ranks: int
    dtype: str
    redop: str
    device: str  # cpu or cuda
    sizes: tuple[Size, ...]
    check: bool
    graph: bool
    folder: str  # where the socket is

    @property
    def socket(self) -> str:
        return f"{self.folder}/turns"


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    job, rank = argv[2], rank_of_environment()
    torch.set_num_threads(1)
    device = "cpu"
    if task.device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    library: Library
    try:
        if job == MPI_JOB:
            library = Mpi(task.ranks)
            rank = library.rank
        else:
            library = open_library(job, rank, task.ranks, task.folder, device)
    except Exception as error:
        Seat(task.socket, job, rank, f"{type(error).__name__}: {error}")
        raise
    seat = Seat(task.socket, job, rank)
    for turn in seat.turns():
        seat.answer(_answer(library, turn, task, rank, device))
    library.close()


def _answer(library: Library, turn: Turn, task: Task, rank: int, device: str) -> Block:
    size = task.sizes[turn.size]
    name, _, wire = turn.library.partition(" ")
    pattern = Pattern(task.ranks, task.dtype, task.redop, coded=wire == FP8)
    case = Case(COLLECTIVES[task.collective], pattern, rank, size.count, turn.place, device)
    try:
        op = library.op(name, case, wire or None)
    except NotImplementedError as error:
        return Block(rank, error=str(error), refused=True)
    try:
        return _block(library, op, case, size, task, turn.library == "copy")
    except Exception as error:
        return Block(rank, error=f"rank {rank}: {type(error).__name__}: {error}"[:500])


def _block(library: Library, op: Op, case: Case, size: Size, task: Task, bare: bool) -> Block:
    times: list[int] = []
    elapsed = wrong = 0
    check = task.check and not bare
    feeds_on_itself = case.collective.name == "allreduce" and case.place == IN and not bare
    most = case.pattern.max_ops() - 1 - size.warmup if feeds_on_itself else size.iterations
    gc.collect()
    gc.disable()  # a collection in the middle would be charged to whoever runs
    try:
        while len(times) < size.iterations:
            timed = min(size.iterations - len(times), most)
            case.fill()
            library.begin()
            op()
            if check:
                wrong += case.wrong(1)
            if check and case.repeats:
                case.fill()  # before the ops to warm up: they are what all ranks meet in again
            for _ in range(size.warmup):
                op()
            new, whole = _time_on_gpu(library, op, timed, task.graph) if task.device == "cuda" else _time(op, timed)
            times += new
            elapsed += whole
            if check and (case.repeats or feeds_on_itself):
                wrong += case.wrong(1 + size.warmup + timed)
            library.end()
    finally:
        gc.enable()
    return Block(case.rank, times, elapsed, wrong)


def _time(op: Op, timed: int) -> tuple[list[int], int]:
    stamps = [perf_counter_ns()]
    for _ in range(timed):
        op()
        stamps.append(perf_counter_ns())
    return [after - before for before, after in itertools.pairwise(stamps)], stamps[-1] - stamps[0]


def _time_on_gpu(library: Library, op: Op, timed: int, graph: bool) -> tuple[list[int], int]:
    replay: Any = op
    if graph:
        captured = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(captured):
            op()
        replay = captured.replay
        library.begin()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    times = [round(1e6 * before.elapsed_time(after)) for before, after in itertools.pairwise(events)]
    return times, sum(times)


if __name__ == "__main__":
    main(sys.argv)
