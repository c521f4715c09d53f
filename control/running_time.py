"""Measures how long this process has run, and waits by it. It reads no clock: it is told the time, or given a clock."""

from __future__ import annotations

from collections.abc import Callable

from ftcomm.control.timeouts import REPORT

LOOK = REPORT / 2  # s between two looks of a thread that waits


class RunningTime:
    """The seconds for which a process has run since it first looked at its clock.

    A process that is stopped (SIGSTOP, a job that its scheduler suspends, a machine that is paused), or held by its
    interpreter, waits for nobody: what it waits for may have come long ago, and the others may be stopped, too. So of
    the time between two looks `most` seconds count at most. Who counts has to look more often than that.
    """

    def __init__(self, most: float = REPORT) -> None:
        self.seconds = 0.0
        self._most = most
        self._looked: float | None = None

    def at(self, now: float) -> float:
        """Look, and return the seconds; `now` in seconds of any origin, and one before the last look is none."""
        if self._looked is not None:
            self.seconds += min(max(0.0, now - self._looked), self._most)
        self._looked = now
        return self.seconds


class RunningTimer:
    """A wait of `seconds` in which this process runs, in parts:

        timer = RunningTimer(120.0, time.monotonic)
        while not there() and (part := timer.part()):
            changed.wait(part)

    `moved` says how far the others have come: the wait begins anew when it returns another value. `away` says how
    many seconds, of all, do not count. `most` is that of `RunningTime`. Not thread-safe.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float],
        moved: Callable[[], object] = lambda: None,
        away: Callable[[], float] = lambda: 0.0,
        most: float = REPORT,
    ) -> None:
        self._seconds, self._clock, self._moved, self._away = seconds, clock, moved, away
        self._ran = RunningTime(most)
        self._end = self._ran.at(clock()) + seconds
        self._said, self._known = moved(), away()

    def left(self) -> float:
        """Returns the seconds that are left; 0.0 if none are. To be called every `most` seconds at least."""
        now, said, away = self._ran.at(self._clock()), self._moved(), self._away()
        self._end += away - self._known
        self._known = away
        if said != self._said:
            self._said, self._end = said, now + self._seconds
        return max(0.0, self._end - now)

    def part(self) -> float:
        """Returns for how many seconds to wait before the next look; 0.0 at the end."""
        return min(self.left(), LOOK)
