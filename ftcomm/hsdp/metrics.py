"""Where the time of a step loop goes: the share of it that was training which counts, and what took the rest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Of this rank, since its loop began. Seconds; the parts are disjoint, but for `snapshot`, which lies in others."""

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

    def lap(self, part: str) -> float:
        """What has passed since the last lap was of `part`; returns how long that was."""
        now = self._clock()
        passed, self._since = now - self._since, now
        self._sums[part] = self._sums.get(part, 0.0) + passed
        return passed

    def add(self, part: str, seconds: float) -> None:
        """Of time that is given to another part as well."""
        self._sums[part] = self._sums.get(part, 0.0) + seconds

    def count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def read(self) -> Metrics:
        return Metrics(total=self._clock() - self._began, **self._counts, **self._sums)
