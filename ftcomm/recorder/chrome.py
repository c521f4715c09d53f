"""Recordings as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing: all ranks on one clock.

A process of the trace is a rank. Its first line has the phases, the others the ops of each group; ops that overlap get
a line each. What has not ended goes on to the last moment of its recording, and says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ftcomm.control.rank_name import rank_name
from ftcomm.recorder.clocks import last_time, offsets
from ftcomm.recorder.reader import RecordedOp, RecordedPhase, Recording
from ftcomm.recorder.torch_format import rank_of

_LINES = 64  # of a group


def trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Returns the trace, as what JSON can have."""
    clocks = offsets(recordings)
    start = min((r.began + clocks[r.boot].seconds for r in recordings), default=0.0)
    events = [event for n, r in enumerate(recordings, 1) for event in _rank(n, r, clocks[r.boot].seconds - start)]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "clocks": [str(offset) for offset in clocks.values()],
            "problems": [f"{r.path}: {problem}" for r in recordings for problem in r.problems],
        },
    }


def _rank(number: int, recording: Recording, offset: float) -> Iterator[dict[str, Any]]:
    # Lives of one rank are processes of their own, side by side. Pids of several hosts may be alike, and Perfetto takes
    # no number beyond 32 bits, so the processes are counted.
    name = f"{rank_name(recording.replica, recording.shard)} ({recording.host}, pid {recording.pid})"
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": rank_of(recording)}}
    end, tid = last_time(recording), 1
    spans = [(phase.began, phase.ended or end, _of_phase(phase)) for phase in recording.phases]
    groups = [("phases", spans)]
    for group in dict.fromkeys(op.group for op in recording.ops):
        waits: dict[int, dict[str, float]] = {}
        for wait in recording.waits:
            if wait.group == group:
                waits.setdefault(wait.op, {})[f"replica {wait.replica}"] = round(wait.seconds, 6)
        title = "ops of all replicas" if group == "*" else f"ops of {group}"
        mine = [op for op in recording.ops if op.group == group]
        groups.append(
            (title, [(op.called, op.returned or end, _of_op(op, recording, waits.get(op.number))) for op in mine])
        )
    for title, found in groups:
        last = tid
        for line, begun, ended, event in _in_lines(found):
            last = max(last, tid + line)
            times = {"ts": round((begun + offset) * 1e6, 3), "dur": round(max(0.0, ended - begun) * 1e6, 3)}
            yield {"ph": "X", "pid": number, "tid": tid + line, **times, **event}
        for line in range(tid, last + 1):
            yield {"ph": "M", "pid": number, "tid": line, "name": "thread_name", "args": {"name": title}}
        tid = last + 1


def _of_op(op: RecordedOp, recording: Recording, waits: dict[str, float] | None) -> dict[str, Any]:
    args: dict[str, Any] = {
        "number": op.number,
        "elements": op.elements,
        "step": recording.step(op),
        "epoch": op.epoch,
        "algorithm": op.algorithm,
        "transports": op.transports,
        "caller": op.caller,
        "state": "failed" if op.failed else "in flight" if op.returned is None else "returned",
    }
    for name, moment in (("posted after, us", op.posted), ("all there after, us", op.arrived)):
        if moment is not None:
            args[name] = round((moment - op.called) * 1e6, 1)
    if op.retries:
        args["views meanwhile"], args["last epoch"] = op.retries, op.last_epoch
    if waits:
        args["waited, s"] = waits
    return {"cat": "op", "name": f"{op.kind} {op.elements} x {op.dtype}", "args": args}


def _of_phase(phase: RecordedPhase) -> dict[str, Any]:
    args = {"step": phase.step, "number": phase.number, "note": phase.note, "epoch": phase.epoch}
    if phase.ended is None:
        args["note"] = f"{phase.note} has not ended".strip()
    return {"cat": "phase", "name": f"{phase.name}{' (failed)' if phase.failed else ''}", "args": args}


def _in_lines(
    spans: Iterable[tuple[float, float, dict[str, Any]]],
) -> Iterator[tuple[int, float, float, dict[str, Any]]]:
    """Yields spans with the lowest line that is free when each begins."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # end, line
    lines = 0
    for begun, ended, event in sorted(spans, key=lambda span: (span[0], -span[1])):
        while busy and busy[0][0] <= begun:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            line = heapq.heappop(free)
        elif lines < _LINES:
            line, lines = lines, lines + 1
        else:
            line = _LINES - 1
        heapq.heappush(busy, (ended, line))
        yield line, begun, ended, event
