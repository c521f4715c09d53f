"""Watches the driver: on whom it waits, since when, and when that is to be reported.

The driving thread writes, any thread may read. The wait is one attribute, replaced as a whole, so that a reader sees
one wait or another and never a mixture, without a lock that the driver would have to take for every op.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import NamedTuple

from ftcomm.collective.adaptive_timeout import AdaptiveTimeouts
from ftcomm.collective.operation import Operation, describe
from ftcomm.control.running_time import RunningTime
from ftcomm.control.timeouts import REPORT
from ftcomm.errors import CollectiveTimeout


class Stall(NamedTuple):
    """A stall: an op that makes no progress, and the replicas whose words are missing."""

    epoch: int
    op: int
    waiting_on: tuple[int, ...]


class Due(enum.Enum):
    NOTHING = enum.auto()
    REPORT = enum.auto()  # the deadline has passed; repeated every second
    GIVE_UP = enum.auto()


def no_view(op: Operation, seconds: float) -> CollectiveTimeout:
    """Makes the error of an op in flight in an engine that was frozen for `seconds`."""
    return CollectiveTimeout(
        f"op {op.number}: no view was agreed upon within {seconds:g}s. Is the coordinator reachable? FTCOMM_OP_TIMEOUT "
        "sets half of that time."
    )


def gave_up(op: Operation, seconds: float, missing: tuple[int, ...]) -> CollectiveTimeout:
    """Makes the error of an op that has waited `seconds` for the replicas `missing`."""
    return CollectiveTimeout(
        f"op {op.number}, {describe(op.call, op.detail)}, waited {seconds:.1f}s for replicas "
        f"{', '.join(map(str, missing))}. Did they make the same call? FTCOMM_OP_TIMEOUT sets half of that time."
    )


class Watchdog:
    """The watchdog of one driver. Times are seconds of `clock`; in a wait those count in which the process runs. See
    `Exchange` for `floor`, `ceiling` and `give_up`."""

    def __init__(
        self, floor: float, ceiling: float, give_up: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.give_up = give_up
        self.clock = clock
        # (since when, what for); None: it does not wait. The driver sets it to None itself when something has moved,
        # since a call would cost as much as all the rest.
        self.wait: tuple[float, Stall] | None = None
        self._deadlines = AdaptiveTimeouts(floor, ceiling)
        self._ran = RunningTime()
        self._since = self._report_at = 0.0  # in `_ran`: when the wait began, and when it is to be reported
        self.stood = 0.0  # s of waits that were reported, or that only a view change has ended
        self._reported: float | None = None  # when the reported wait began
        self.began = 0.0  # when the first op in flight became the first
        self._steady = 0  # the first op that has seen no view change

    # -- ops: how long they take -----------------------------------------------------------------------------------

    def returns(self, op: Operation) -> None:
        """Note that the first op in flight is about to return, and the next to become the first."""
        now = self.clock()
        self.wait = None
        if self._reported is not None:
            self._stood(now, self._reported)
        if op.number >= self._steady and op.error is None:
            self._deadlines.took(op.nbytes, now - self.began)
        self.began = now

    def disturbed(self, issued: int) -> None:
        """Note a view change: how long the first `issued` ops of the group take says nothing about others."""
        since = self._reported if self._reported is not None or self.wait is None else self.wait[0]
        if since is not None:
            self._stood(self.clock(), since)
        self.wait = None
        self._steady = issued

    # -- waits -----------------------------------------------------------------------------------------------------

    def waits(self, epoch: int, op: Operation, missing: tuple[int, ...]) -> Due:
        """Note that a wait for the replicas `missing` has ended without progress; returns what is due."""
        now = self.clock()
        ran = self._ran.at(now)
        since = now if self.wait is None else self.wait[0]
        if self.wait is None:
            self._since, self._report_at = ran, ran + self._deadlines.of(op.nbytes)
        self.wait = since, Stall(epoch, op.number, missing)
        if ran >= self._report_at:
            self._report_at = ran + REPORT
            if self._reported is None:
                self._reported = since
            return Due.REPORT
        return Due.GIVE_UP if ran - self._since >= self.give_up else Due.NOTHING

    @property
    def waited(self) -> float:
        """The seconds for which the driver waits by now."""
        wait = self.wait
        return 0.0 if wait is None else self.clock() - wait[0]

    def _stood(self, now: float, since: float) -> None:
        self.stood += now - since
        self._reported = None

    def waiting(self, seconds: float) -> Stall | None:
        """Returns what the driver waits for, if it has for at least `seconds`. Any thread."""
        wait = self.wait
        return wait[1] if wait is not None and self.clock() - wait[0] >= seconds else None
