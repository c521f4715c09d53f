"""One clock for recordings of several hosts, from what all ops promise: none returns before all members have called it.

Processes of one host share a clock. Between two hosts each op that both have done bounds the offset from both sides,
as the two ways of a message do in NTP:

    called there <= returned here    and    called here <= returned there

The estimate is the middle of what is left, wrong by half of its width at most (and by what the clocks have drifted).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from ftcomm.recorder.reader import RecordedOp, Recording


class ClockOffset(msgspec.Struct, frozen=True):
    """The offset of a host: `seconds` are to be added to its times for those of the first host. They are wrong by
    `error` seconds at most; None: the hosts have done no op together, and their wall clocks were taken."""

    host: str
    boot: str
    seconds: float
    error: float | None

    def __str__(self) -> str:
        how = "by the wall clocks, which may differ" if self.error is None else f"+- {self.error * 1e6:.0f} us"
        return f"{self.host}: {self.seconds:+.6f} s, {how}"


def offsets(recordings: Sequence[Recording]) -> dict[str, ClockOffset]:
    """Returns boot -> offset of the clock of that host; that of the first recording is 0."""
    hosts: dict[str, list[Recording]] = defaultdict(list)
    for recording in recordings:
        hosts[recording.boot].append(recording)
    found: dict[str, ClockOffset] = {}
    for boot, there in hosts.items():
        if not found:
            found[boot] = ClockOffset(there[0].host, boot, 0.0, 0.0)
            reference = there
            continue
        low, high = _bounds(reference, there)
        if math.isinf(low) or math.isinf(high):
            wall = there[0].wall_offset - reference[0].wall_offset
            found[boot] = ClockOffset(there[0].host, boot, wall, None)
        else:
            found[boot] = ClockOffset(there[0].host, boot, (low + high) / 2, abs(high - low) / 2)
    return found


def _bounds(here: Sequence[Recording], there: Sequence[Recording]) -> tuple[float, float]:
    """Returns the least and the largest offset that the ops of both sides allow."""
    mine, theirs = _spans(here), _spans(there)
    low, high = -math.inf, math.inf
    for key in mine.keys() & theirs.keys():
        called, returned = mine[key]
        there_called, there_returned = theirs[key]
        low = max(low, called - there_returned)
        high = min(high, returned - there_called)
    return low, high


def _spans(recordings: Sequence[Recording]) -> dict[tuple[str, str, int, int], tuple[float, float]]:
    """Returns for each op the last call and the first return on a host."""
    found: dict[tuple[str, str, int, int], tuple[float, float]] = {}
    for recording in recordings:
        kinds = {group.name: group.kind for group in recording.groups}
        for op in recording.ops:
            if op.returned is None or op.failed or kinds.get(op.group) not in ("job", "subgroup"):
                continue
            key = recording.job, op.group, recording.shard, op.number
            called, returned = found.get(key, (-math.inf, math.inf))
            found[key] = max(called, op.called), min(returned, op.returned)
    return found


def last_time(recording: Recording) -> float:
    """Returns the last moment of which a recording tells."""
    ops: list[RecordedOp] = list(recording.ops[-64:])
    times = [recording.began, recording.ended or 0.0, *(op.returned or op.called for op in ops)]
    times += [wait.began + wait.seconds for wait in recording.waits[-64:]]
    times += [phase.ended or phase.began for phase in recording.phases[-64:]]
    return max(times)
