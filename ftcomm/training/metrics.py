"""Where the time of a step loop goes: the share of it that was training which counts, and what took the rest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Seconds of this rank since its loop began. The parts are disjoint, but for `snapshot`, which lies in others."""

    steps: int = 0  # that were committed while this replica contributed
    skipped: int = 0  # without an update
    discarded: int = 0  # attempts that were repeated
    snapshots: int = 0  # taken for a joiner
    total: float = 0.0
    training: float = 0.0  # in steps that were committed while this replica contributed
    wasted: float = 0.0  # in attempts that were discarded, and steps that were skipped
    catching_up: float = 0.0  # in steps whose input from here did not count
    boundary: float = 0.0  # between steps
    paused: float = 0.0  # for want of replicas
    stalled: float = 0.0  # in steps, while an op waited for members that did not move any more, or were lost
    snapshot: float = 0.0  # standing still for a copy of the state

    @property
    def effective(self) -> float:
        """Effective training time ratio: of all that has passed, the share spent in steps that count."""
        return self.training / self.total if self.total else 0.0


class Stopwatch:
    """Gives every moment to one part. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._since = clock()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def lap(self, part: str, stalled: float = 0.0) -> float:
        """What has passed since the last lap was of `part`, but for so many seconds that were stalled; returns how long
        all of it was."""
        now = self._clock()
        passed, self._since = now - self._since, now
        stood = min(stalled, passed)
        if stood:
            self.add("stalled", stood)
        self.add(part, passed - stood)
        return passed

    def add(self, part: str, seconds: float) -> None:
        """So many seconds, of a part that lies in others; see `lap`."""
        self._sums[part] = self._sums.get(part, 0.0) + seconds

    def count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def read(self) -> Metrics:
        return Metrics(total=self._clock() - self._began, **self._counts, **self._sums)  # type: ignore[arg-type]
