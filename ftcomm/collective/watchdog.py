"""The watch over the driver: on whom it waits, since when, and when that is to be said.

The driving thread writes, any thread may read. What it waits for is one attribute, replaced as a whole, so that a
reader sees one wait or another and never a mixture, and needs no lock that the driver would have to take for every op.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import NamedTuple

from ftcomm.collective.adaptive_timeout import AdaptiveTimeouts
from ftcomm.collective.operation import Operation, describe
from ftcomm.control.timeouts import REPORT
from ftcomm.errors import CollectiveTimeout


class Stall(NamedTuple):
    """An op that makes no progress, and the replicas whose words are missing."""

    epoch: int
    op: int
    waiting_on: tuple[int, ...]


class Due(enum.Enum):
    NOTHING = enum.auto()
    REPORT = enum.auto()  # the deadline has passed; again every second from then on
    GIVE_UP = enum.auto()


def no_view(op: Operation, seconds: float) -> CollectiveTimeout:
    """The engine was frozen for so long, with `op` in flight."""
    return CollectiveTimeout(
        f"op {op.number}: no view was agreed upon within {seconds:g}s. Is the coordinator reachable? FTCOMM_OP_TIMEOUT "
        "sets half of that time."
    )


def gave_up(op: Operation, seconds: float, missing: tuple[int, ...]) -> CollectiveTimeout:
    """`op` has waited for so long for the replicas `missing`."""
    return CollectiveTimeout(
        f"op {op.number}, {describe(op.call, op.detail)}, waited {seconds:.1f}s for replicas "
        f"{', '.join(map(str, missing))}. Did they make the same call? FTCOMM_OP_TIMEOUT sets half of that time."
    )


class Watchdog:
    """All times are seconds of `clock`. See `Exchange` for `floor`, `ceiling` and `give_up`."""

    def __init__(
        self, floor: float, ceiling: float, give_up: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.give_up = give_up
        self.clock = clock
        # (since when, what for); None: it does not wait. The driver sets it to None itself when something has moved, as
        # a call would cost as much as all the rest.
        self.wait: tuple[float, Stall] | None = None
        self._deadlines = AdaptiveTimeouts(floor, ceiling)
        self._report_at = 0.0
        self.stood = 0.0  # s of waits that were reported, or that only a view change has ended: nothing came of them
        self._reported: float | None = None  # since when the wait goes on that was reported
        self.began = 0.0  # when the first op in flight became the first; by who submits one when there is none
        self._steady = 0  # the first op that has seen no view change

    # -- ops: how long they take -----------------------------------------------------------------------------------

    def returns(self, op: Operation) -> None:
        """The first op in flight is about to return, and the next to become the first."""
        now = self.clock()
        self.wait = None
        if self._reported is not None:
            self._stood(now, self._reported)
        if op.number >= self._steady and op.error is None:
            self._deadlines.took(op.nbytes, now - self.began)
        self.began = now

    def disturbed(self, issued: int) -> None:
        """A view change: how long the first `issued` ops of the group take says nothing about others."""
        since = self._reported if self._reported is not None or self.wait is None else self.wait[0]
        if since is not None:
            self._stood(self.clock(), since)
        self.wait = None
        self._steady = issued

    # -- waits -----------------------------------------------------------------------------------------------------

    def waits(self, epoch: int, op: Operation, missing: tuple[int, ...]) -> Due:
        """A wait for the replicas `missing` has ended without progress."""
        now = self.clock()
        since = now if self.wait is None else self.wait[0]
        if self.wait is None:
            self._report_at = now + self._deadlines.of(op.nbytes)
        self.wait = since, Stall(epoch, op.number, missing)
        if now >= self._report_at:
            self._report_at = now + REPORT
            if self._reported is None:
                self._reported = since
            return Due.REPORT
        return Due.GIVE_UP if now - since >= self.give_up else Due.NOTHING

    def _stood(self, now: float, since: float) -> None:
        self.stood += now - since
        self._reported = None

    def waiting(self, seconds: float) -> Stall | None:
        """What the driver waits for, if it does for at least `seconds`. Any thread."""
        wait = self.wait
        return wait[1] if wait is not None and self.clock() - wait[0] >= seconds else None
