"""How long this process has run. It is pure."""

from __future__ import annotations

from ftcomm.control.timeouts import REPORT


class RunningTime:
    """The seconds for which a process has run since it first looked at its clock.

    A process that is stopped (SIGSTOP, a job that its scheduler suspends, a machine that is paused), or held by its
    interpreter, waits for nobody: what it waits for may have come long ago, and the others may be stopped, too. So of
    the time between two looks `REPORT` seconds count at most. Who counts has to look more often than that.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked: float | None = None

    def at(self, now: float) -> float:
        """Look, and return the seconds; `now` in seconds of any origin."""
        if self._looked is not None:
            self.seconds += min(now - self._looked, REPORT)
        self._looked = now
        return self.seconds
