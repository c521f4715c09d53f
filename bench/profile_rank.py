"""One rank of `ftcomm bench profile`: python -m ftcomm.bench.profile_rank TASK_FILE, under the launcher.

    plain      so many ops, timed one by one; what the kernel counted of them
    watched    as many, with a clock around every wait, every reduction and every wake-up
    traced     a few, with a count of the interpreter's instructions

A clock costs as much as ten of those, so the times of waits and reductions are taken as shares of the watched ops.
"""

from __future__ import annotations

import gc
import itertools
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from types import FrameType
from typing import Any
from unittest import mock

import msgspec
import numpy as np

import ftcomm
from ftcomm.bench.yardstick import Task
from ftcomm.collective import express, stream
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.kernels.wait import Waiter

TRACED = 20  # ops
WAITS = ("until", "doze")  # of a Waiter; their instructions depend on how long they wait


class Block(msgspec.Struct, frozen=True):
    """Of one rank, size and round. Times are ns of an op, counts are of an op."""

    rank: int
    bytes: int
    round: int
    times: list[int]
    watched: float
    waits: float
    reductions: float
    copy: float  # of an array of this size, once
    wakes: float  # calls that wake somebody
    sleeps: float  # switches of its own accord
    preempted: float
    faults: float
    instructions: float  # of the interpreter, without those of waits
    calls: float  # of Python functions


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    group = ftcomm.init()
    encoder = msgspec.json.Encoder()
    with (Path(task.folder) / f"rank-{group.replica}.jsonl").open("ab", buffering=0) as out:
        for size, number in itertools.product(task.sizes, range(task.rounds)):
            block = _block(group, size, number, task.iterations if size <= 1 << 20 else max(5, task.iterations // 10))
            out.write(encoder.encode(block) + b"\n")
    ftcomm.shutdown()


def _block(group: Any, size: int, number: int, iterations: int) -> Block:
    x, y = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
    for _ in range(max(3, iterations // 10)):
        group.allreduce(x)
        np.copyto(y, x)
    gc.collect()
    gc.disable()
    try:
        before = resource.getrusage(resource.RUSAGE_THREAD)
        times = _times(lambda: group.allreduce(x), iterations)
        after = resource.getrusage(resource.RUSAGE_THREAD)
        copy = sorted(_times(lambda: np.copyto(y, x), iterations))[iterations // 2]
        with _watch(group) as spent:
            watched = _times(lambda: group.allreduce(x), iterations)
        instructions, calls = _trace(lambda: group.allreduce(x))
    finally:
        gc.enable()
    counted = (getattr(after, name) - getattr(before, name) for name in ("ru_nvcsw", "ru_nivcsw", "ru_minflt"))
    each = {name: value / iterations for name, value in spent.items()}
    return Block(
        *(group.replica, size, number, times, sum(watched) / iterations, each["waits"], each["reductions"], copy),
        each["wakes"],
        *(count / iterations for count in counted),
        *(instructions / TRACED, calls / TRACED),
    )


def _times(call: Callable[[], Any], count: int) -> list[int]:
    stamps = [perf_counter_ns()]
    for _ in range(count):
        call()
        stamps.append(perf_counter_ns())
    return [after - before for before, after in itertools.pairwise(stamps)]


@contextmanager
def _watch(group: Any) -> Iterator[dict[str, float]]:
    """What waits and reductions take, in ns, and how often somebody is woken, until the block ends."""
    spent = {"waits": 0.0, "reductions": 0.0, "wakes": 0.0}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            begin = perf_counter_ns()
            try:
                return call(*args, **more)
            finally:
                spent[name] += perf_counter_ns() - begin

        return run

    def woken(address: int, **more: Any) -> None:
        spent["wakes"] += 1
        wake(address, **more)

    get, wake = Reducer.get, stream.wake
    with (
        mock.patch.multiple(Waiter, **{name: timed("waits", getattr(Waiter, name)) for name in WAITS}),
        mock.patch.object(Reducer, "get", lambda *args: timed("reductions", get(*args))),
        mock.patch.object(stream, "wake", woken),
        mock.patch.object(express, "wake", woken),
    ):
        _forget(group)
        yield spent
    _forget(group)


def _forget(group: Any) -> None:
    """What reduces small ops is looked up once, and kept."""
    for kept in group._exchange._stream._express._shots:
        kept.clear()


def _trace(call: Callable[[], Any]) -> tuple[int, int]:
    """Instructions of the interpreter and calls of functions in `TRACED` calls. They follow from the code alone, where
    times follow from whoever shares the machine."""
    found = [0, 0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name in WAITS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found[0] += event == "opcode"
        found[1] += event == "call"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(TRACED):
            call()
    finally:
        sys.settrace(before)
    return found[0], found[1]


if __name__ == "__main__":
    main(sys.argv)
