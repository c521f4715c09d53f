"""Finds what the ranks of this host wait for, as their recordings say: for how long each, and one of them in words,
with its stacks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ftcomm.diagnosis import stacks
from ftcomm.monitoring.job import GONE, Overview
from ftcomm.monitoring.rank_waits import RecordedWaits, paths
from ftcomm.recorder.files import FOLDER
from ftcomm.recorder.reader import SUFFIX, RecordedOp, Recording, RecordingError, lives, read

PHASES = 6  # the newest that are shown
SHORT = 0.1  # s below which it does not count as a wait
NO_RECORDING = "This host has no recording of this rank: look on its own host, with ftcomm dump."


class RankDetail(msgspec.Struct, frozen=True):
    """Says what a rank does, in lines. One that is not `recorded` on this host cannot be asked for its stacks."""

    shard: int
    lines: list[str]
    recorded: bool = True


class RankWaits:
    """The waits of all ranks whose recordings lie beside the admin socket of a job. Not thread-safe."""

    def __init__(self, socket: Path) -> None:
        self._folder = socket.parent / FOLDER
        self._waits = RecordedWaits(self._folder)
        self._last: dict[tuple[int, int], float] = {}

    def now(self) -> dict[tuple[int, int], float]:
        """Returns (replica, rank) -> seconds for which it has waited so far in its op."""
        self._last = self._waits.now()
        return self._last

    def longest(self, replica: int, first: int, ranks: int) -> int:
        """Returns which of so many ranks had waited longest at the last look; the first if none waits."""
        waiting = [shard for of, shard in self._last if of == replica and first <= shard < first + ranks]
        return max(waiting, key=lambda shard: (self._last[replica, shard], -shard), default=first)

    def detail(self, replica: int, shard: int) -> list[str]:
        """Returns what a rank does and waits for, in lines. Reads a whole recording, for milliseconds."""
        path = paths(self._folder).get((replica, shard))
        if path is None:
            return [NO_RECORDING]
        try:
            return describe(read(path), time.monotonic())
        except RecordingError as error:
            return [str(error)]

    def stack(self, replica: int, shard: int) -> list[str]:
        """Returns the stacks of all threads of a rank, in lines. Blocks for seconds if it holds its interpreter. The
        rank is asked as by `ftcomm why`, and goes on. Any thread."""
        path = paths(self._folder).get((replica, shard))
        if path is None:
            return [NO_RECORDING]
        try:
            recording = read(path, newest=1)
        except RecordingError as error:
            return [str(error)]
        if not lives(recording):
            return [f"process {recording.pid} has ended"]
        return stack_lines(stacks.take(path.with_name(path.name.removesuffix(SUFFIX)), recording.pid))


def stack_lines(found: stacks.Stacks) -> list[str]:
    """Returns stacks in lines, the main thread first, and why some are missing."""
    lines = []
    for thread in found.threads:
        lines += [f"thread {thread.name or thread.id}", *(f"    {frame}" for frame in thread.frames)]
    if found.native:
        lines += ["by py-spy", *found.native.rstrip().splitlines()]
    return lines + ([found.missing] if found.missing else [])


def with_waits(job: Overview, waits: Mapping[tuple[int, int], float]) -> Overview:
    """Returns the overview with the waits of ranks in its cells, and whether one of them began before the verdict."""
    if not waits:
        return job
    if job.told is not None and not any(seconds >= job.now - job.told.at for seconds in waits.values()):
        job = msgspec.structs.replace(job, told=msgspec.structs.replace(job.told, over=True))
    longest: dict[tuple[int, int], float] = {}
    for (replica, rank), seconds in waits.items():
        cell = replica, rank // job.ranks_per_cell
        longest[cell] = max(seconds, longest.get(cell, 0.0))
    rows = []
    for row in job.rows:
        if row.state in ("training", "catching up"):
            cells = [
                wait if wait == GONE else max(wait, round(1e3 * longest.get((row.replica, cell), 0.0)))
                for cell, wait in enumerate(row.cells)
            ]
            row = msgspec.structs.replace(row, cells=cells)
        rows.append(row)
    return msgspec.structs.replace(job, rows=rows)


def describe(recording: Recording, now: float) -> list[str]:
    """Returns what a recording says of its rank at `now`, by the clock of its host."""
    alive = "lives" if lives(recording) else "has ended" if recording.ending == "none" else recording.ending
    lines = [f"pid {recording.pid} {alive}"]
    open_ops = [op for op in recording.ops if op.returned is None]
    if not open_ops:
        lines.append("no op is in flight: it computes, or waits for data")
        if recording.ops:
            last = recording.ops[-1]
            lines.append(f"last op: {_op(last)}, returned {now - (last.returned or now):.1f} s ago")
    for op in open_ops:
        lines.append(f"in flight for {now - op.called:.1f} s: {_op(op)}")
        for wait in recording.waits:
            if (wait.group, wait.op) == (op.group, op.number) and wait.seconds >= SHORT:
                lines.append(f"    waits for replica {wait.replica}: {wait.seconds:.1f} s")
    for phase in reversed(recording.phases[-PHASES:]):
        lasted = "so far" if phase.ended is None else "ago"
        seconds = now - (phase.began if phase.ended is None else phase.ended)
        lines.append(
            f"{phase.name}{' ' + phase.note if phase.note else ''}, step {phase.step}: {seconds:.1f} s {lasted}"
        )
    return lines


def _op(op: RecordedOp) -> str:
    shape = f"{op.dtype} x {op.elements:,}" if op.dtype else ""
    parts = (f"{op.kind} {op.number}", f"of {op.group}" if op.group else "", shape, f"view {op.last_epoch}")
    return ", ".join(part for part in parts if part) + (f", at {op.caller}" if op.caller else "")
