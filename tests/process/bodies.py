"""What the ranks of test jobs run."""

from __future__ import annotations

import ctypes
import itertools
import random
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

import ftcomm

from .job import Notes

# s between two steps of a job that waits for something: ranks that compute as fast as they can take the cores of all
# tests that run beside, and write notes that take as long to read. 0 where a fault is to fall into the middle of an op.
PAUSE = 0.04


def reduce_forever(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """An all-reduce a step. Replica r contributes 2**r, so every element of a result tells who is in it; of up to four
    also in the form `wire` = "fp8"."""
    elements = arguments["elements"]
    array = np.empty(elements, np.float32)
    wire = arguments.get("wire")
    pace = Pace(group, arguments)
    for step in ftcomm.steps(arguments["steps"]):
        pace.keep(step)
        time.sleep(arguments.get("pause", PAUSE))
        hold_interpreter(group, notes, arguments)
        array[:] = 2.0**group.replica
        if step % 2:
            atomic = step % 4 == 3
            work = group.allreduce(array, async_op=True, atomic=atomic, compression=wire)
            work.wait()
            spans = work.contributors
            if atomic and len(spans) > 1:
                notes.write(kind="wrong", step=step, spans=[list(span) for span in spans])
        else:
            group.allreduce(array, compression=wire)
            spans = seen(array)
        for start, stop, replicas in spans:
            expected = float(sum(2**replica for replica in replicas))
            wrong = np.flatnonzero(array[start:stop] != expected)
            if wrong.size:
                at = int(start + wrong[0])
                notes.write(kind="wrong", step=step, at=at, got=float(array[at]), expected=expected)
        whole = spans[0][0] == 0 and spans[-1][1] == elements
        crc = zlib.crc32(array.view(np.uint8).data)
        notes.write(
            kind="step", step=step, crc=crc, spans=[list(span) for span in spans], whole=whole, epoch=group.epoch
        )
    if group.drained:
        try:
            group.allreduce(array)
        except ftcomm.RemovedError as error:
            notes.write(kind="left", text=str(error))


def hold_interpreter(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """If the file hold-REPLICA-RANK tells of seconds: no thread of this process runs for so long, as in a compilation.
    Once."""
    path = Path(arguments["marks"]) / f"hold-{group.replica}-{group.shard}"
    if path.exists():
        seconds = float(path.read_text())
        path.unlink()
        notes.write(kind="holds", epoch=group.epoch)
        ctypes.PyDLL(None).usleep(int(1e6 * seconds))  # PyDLL keeps the interpreter lock
        notes.write(kind="held", epoch=group.epoch)


def reduce_fresh(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """New arrays in every step, several at a time and of sizes that do not repeat, so that their memory is soon that of
    others. And a part of one by itself, before all of it."""
    for step in ftcomm.steps(arguments["steps"]):
        rng = random.Random(step)
        sizes = [rng.randrange(700_000, arguments["elements"]) for _ in range(rng.randrange(1, 4))]
        arrays = [np.full(size, 2.0**group.replica, np.float32) for size in sizes]
        part = arrays[0][sizes[0] // 4 : sizes[0] // 2]
        group.allreduce(part)
        part[:] = 2.0**group.replica
        for work in [group.allreduce(array, async_op=True) for array in arrays]:
            work.wait()
        crc = zlib.crc32(b"".join(array.view(np.uint8).data for array in arrays))
        notes.write(kind="fresh", step=step, crc=crc)


class Pace:
    """Keeps the ranks of a replica about in step, as the collectives among its shards do in a training: at a boundary
    where membership changes, one that is far ahead would wait for the others longer than it is ready to."""

    LEAD = 0.5  # s for which a rank may be ahead of the slowest one
    STEP_TIMEOUT = 1.0  # s at each step, for one that stands still or is dead

    def __init__(self, group: ftcomm.Group, arguments: dict[str, Any]) -> None:
        self._steps = np.memmap(Path(arguments["marks"]) / f"pace-{group.replica}", np.int64, "r+")
        self._rank = group.shard
        self._ahead: deque[tuple[int, float]] = deque()  # steps to which not all have come, and when this rank did

    def keep(self, step: int) -> None:
        now = time.monotonic()
        self._steps[self._rank] = step
        self._ahead.append((step, now))
        while self._is_far_ahead() and time.monotonic() < now + self.STEP_TIMEOUT:
            time.sleep(0.001)

    def _is_far_ahead(self) -> bool:
        slowest = self._steps.min()
        while self._ahead and self._ahead[0][0] <= slowest:
            self._ahead.popleft()
        return bool(self._ahead) and time.monotonic() - self._ahead[0][1] > self.LEAD


def seen(array: np.ndarray) -> list[tuple[int, int, list[int]]]:
    """The contributors as the values tell them."""
    edges = [0, *(np.flatnonzero(np.diff(array)) + 1).tolist(), array.size]
    return [
        (start, stop, [replica for replica in range(64) if int(array[start]) >> replica & 1])
        for start, stop in itertools.pairwise(edges)
    ]


def calls(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """The calls of `arguments["calls"][replica]`, one after the other: (elements, dtype, op); what came of each."""
    for elements, dtype, op in arguments["calls"][group.replica]:
        array = np.ones(elements, dtype)
        try:
            group.allreduce(array, op)
            notes.write(kind="call", value=float(array[0]))
        except ftcomm.FtcommError as error:
            notes.write(kind="call", error=type(error).__name__, text=str(error))


def skip_once(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A branch that not all ranks take: one replica goes to the next step without the call of the `skip`-th."""
    array = np.empty(arguments["elements"], np.float32)
    for step in ftcomm.steps(20):
        if step == arguments["skip"] and group.replica == 1:
            continue
        array[:] = step
        try:
            group.allreduce(array, "avg")
        except ftcomm.MismatchError as error:
            notes.write(kind="call", step=step, text=str(error))
            return
        notes.write(kind="call", step=step, value=float(array[0]))


def end_apart(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Some steps together; then one rank of each replica has something left to do, a checkpoint to write, say."""
    array = np.ones(100, np.float32)
    for _ in ftcomm.steps(20):
        group.allreduce(array, "avg")
    if group.shard == arguments["slow"]:
        time.sleep(arguments["seconds"])
