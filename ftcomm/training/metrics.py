"""Measures where the time of a step loop goes: the share that was training which counts, and the rest by cause."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The seconds of this rank since its loop began. The parts are disjoint, except `snapshot`, which lies in
    others."""

    steps: int = 0  # committed while this replica contributed
    skipped: int = 0  # steps without an update
    discarded: int = 0  # attempts that had to be repeated
    snapshots: int = 0  # copies of the state for joiners
    total: float = 0.0
    training: float = 0.0  # in steps that were committed while this replica contributed
    wasted: float = 0.0  # in attempts that were discarded, and steps that were skipped
    catching_up: float = 0.0  # in steps whose input from here did not count
    boundary: float = 0.0  # between steps
    paused: float = 0.0  # for want of replicas
    stalled: float = 0.0  # in steps, while an op waited for members that did not move any more, or were lost
    snapshot: float = 0.0  # while the loop stood still for a copy of the state

    @property
    def effective(self) -> float:
        """The effective training time ratio: the share of all time that was spent in steps that count."""
        return self.training / self.total if self.total else 0.0


class Stopwatch:
    """Accounts every moment to one part. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._since = clock()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def lap(self, part: str, stalled: float = 0.0) -> float:
        """Account the time since the last lap to `part`, except `stalled` seconds, which count as stalled; returns all
        of it in seconds."""
        now = self._clock()
        passed, self._since = now - self._since, now
        stalled = min(stalled, passed)
        if stalled:
            self.add("stalled", stalled)
        self.add(part, passed - stalled)
        return passed

    def add(self, part: str, seconds: float) -> None:
        """Account `seconds` to a part that lies in others; see `lap`."""
        self._sums[part] = self._sums.get(part, 0.0) + seconds

    def count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def read(self) -> Metrics:
        return Metrics(total=self._clock() - self._began, **self._counts, **self._sums)  # type: ignore[arg-type]
