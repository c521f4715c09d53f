"""Watches the driver: on whom it waits, since when, and when that is to be reported.

The driving thread writes, any thread may read. The wait is one attribute, replaced as a whole, so that a reader sees
one wait or another and never a mixture, without a lock that the driver would have to take for every op.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ftcomm.collective.adaptive_timeout import AdaptiveTimeouts
from ftcomm.collective.operation import Operation, describe
from ftcomm.control.running_time import RunningTime
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.errors import CollectiveTimeout
from ftcomm.recorder.recorder import GroupRecorder, unread


class Deadlines(NamedTuple):
    """The seconds of an op without progress: the earliest and the latest time at which it is said to stand still, and
    when it fails."""

    floor: float
    ceiling: float
    give_up: float

    @classmethod
    def of(cls, times: Timeouts) -> Deadlines:
        """Returns those of the ops of a job."""
        return cls(times.op_floor, times.op, times.give_up)


class Stall(NamedTuple):
    """A stall: an op that makes no progress, and the replicas whose words are missing. In a report, those that are
    overdue, and for how many seconds the longest of them has been waited for."""

    epoch: int
    op: int
    waiting_on: tuple[int, ...]
    lasted: float = 0.0


class StallLog:
    """Tells which stalls are news for the log: each is reported every second."""

    def __init__(self) -> None:
        self._last: tuple[int, int, tuple[int, ...]] | None = None

    def is_new(self, stall: Stall) -> bool:
        """Whether the last report was of another stall."""
        before, self._last = self._last, stall[:3]
        return before != self._last


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
    `Exchange` for `floor`, `ceiling` and `give_up`.

    A wait begins anew when something moves. A view change moves things, too, but not the replica that stands still: the
    wait for it goes on until it takes part in the new view, or the op returns.
    """

    def __init__(
        self,
        floor: float,
        ceiling: float,
        give_up: float,
        clock: Callable[[], float] = time.monotonic,
        recorder: GroupRecorder | None = None,
    ) -> None:
        """`recorder` records ops and waits; without it they are not recorded."""
        self.recorder = unread(clock) if recorder is None else recorder
        self.give_up = give_up
        self.clock = clock
        # (since when, what for); None: it does not wait. The driver sets it to None itself when something has moved,
        # since a call would cost as much as all the rest.
        self.wait: tuple[float, Stall] | None = None
        self._deadlines = AdaptiveTimeouts(floor, ceiling)
        self._ran = RunningTime()
        self._since = self._report_at = 0.0  # seconds of `_ran` at which the wait began, and may be reported again
        self._limit = 0.0  # s that the wait may take
        # Waits that go on from before: when, in `_ran`, each began, and how far the replica had come in this view.
        self._before: dict[int, tuple[float, int]] = {}
        self._handed: Mapping[int, float] = {}  # s of other waits that `hand_waits` gave
        self._members: Collection[int] = ()  # the others of the view
        self.stalled_seconds = 0.0  # s of waits that were reported, or that only a view change has ended
        self._reported: float | None = None  # when the reported wait began
        self._eventful = False  # `_before`, `_handed` or `_reported` may be set, so that `returns` looks at one thing
        self.changes = 0  # how many changes of the job's view have begun
        self._known = 0  # how many of these changes were noticed here
        self.away = 0.0  # s without a coordinator, which do not count in waits
        self._away = 0.0  # s of `away` that are in `renewed`
        self.renewed = 0.0  # seconds of `_ran` when the last change was noticed, plus what came to `away` since
        self.began = 0.0  # when the first op in flight became the first
        self._steady = 0  # the first op that has seen no view change

    # -- ops: how long they take -----------------------------------------------------------------------------------

    def returns(self, op: Operation) -> None:
        """Note that the first op in flight is about to return, and the next to become the first."""
        now = self.clock()
        self.wait = None
        self.recorder.returned(op, now)
        if self._eventful:
            self._ends_waits(now)
        if op.error is not None:
            self.recorder.failed(op)
        elif op.number >= self._steady:
            self._deadlines.taken[op.nbytes.bit_length()].append(now - self.began)
        self.began = now

    def _ends_waits(self, now: float) -> None:
        self._eventful, self._before, self._handed = False, {}, {}
        if self._reported is not None:
            self._stalled(now, self._reported)

    def job_changes(self) -> None:
        """Note that the job begins to change its view. Whom an op waits for may be lost, one after the other, and a
        subgroup hears of it only when the job has come through: so ops have their whole timeout again. Any thread."""
        self.changes += 1

    def coordinator_away(self, seconds: float) -> None:
        """Let an op wait for so many seconds more before it gives up: for so long nobody could decide that those whom
        it waits for are lost. For one thread, any."""
        self.away += seconds

    def disturbed(self, issued: int, members: Collection[int], stay: Collection[int]) -> None:
        """Note a view change: how long the first `issued` ops of the group take says nothing about others. `members`
        are the others of the view; the waits for those that `stay`, in the life that they had, go on."""
        since = self._reported if self._reported is not None or self.wait is None else self.wait[0]
        if since is not None:
            self._stalled(self.clock(), since)
        self._before = {replica: (begun, 0) for replica, begun in self._waits().items() if replica in stay}
        self._handed = {replica: seconds for replica, seconds in self._handed.items() if replica in stay}
        self._eventful = True
        self._members = members
        self.wait = None
        self._steady = issued

    # -- waits -----------------------------------------------------------------------------------------------------

    def waits(
        self, epoch: int, op: Operation, missing: tuple[int, ...], come: Callable[[int], int] = lambda replica: 0
    ) -> Stall | None:
        """Note that a wait for the replicas `missing` has ended without progress. `come` tells how far a replica has
        come in this view; 0: it has not taken part. Returns the stall, when it is due to be reported. Raises
        `CollectiveTimeout` when it is time to give up."""
        now, ran = self.clock(), self.ran()
        since = now if self.wait is None else self.wait[0]
        if self.wait is None:
            self._since, self._limit = ran, self._deadlines.of(op.nbytes)
        self.wait = since, Stall(epoch, op.number, missing)
        self.recorder.waits(op, missing, since, now)
        if self._before:
            self._before = {replica: known for replica, known in self._before.items() if come(replica) <= known[1]}
        handed, self._handed = self._handed, {}
        for replica, seconds in handed.items():
            if replica not in self._members:
                continue  # it was of a view that this driver has not entered yet, or has left
            self._eventful = True
            self._before[replica] = min(self._before.get(replica, (ran, 0))[0], ran - seconds), come(replica)
        begun = self._waits()
        late = tuple(replica for replica in missing if ran - begun[replica] >= self._limit)
        if late and ran >= self._report_at:
            self._report_at = ran + REPORT
            if self._reported is None:
                self._reported, self._eventful = since, True
            return Stall(epoch, op.number, late, max(ran - begun[replica] for replica in late))
        if ran - max(self._since, self.renewed) >= self.give_up:
            raise gave_up(op, self.give_up, missing)
        return None

    @property
    def unmoved(self) -> float:
        """The seconds for which the process has run and nothing has moved, neither here nor in the views of the job.
        Called while the driver waits."""
        return self._ran.seconds - max(self._since, self.renewed)

    def _waits(self) -> dict[int, float]:
        """Returns the replicas that are waited for, and when, in `_ran`, that began."""
        now = {} if self.wait is None else dict.fromkeys(self.wait[1].waiting_on, self._since)
        return now | {replica: begun for replica, (begun, _) in self._before.items()}

    def ran(self) -> float:
        """Returns for how many seconds the process has run. To be called every `REPORT` by who drives, also while it
        waits for a view."""
        ran = self._ran.at(self.clock())
        away = self.away
        more, self._away = away - self._away, away
        if self._known != self.changes:
            self._known, self.renewed = self.changes, ran
        elif more:
            self.renewed = min(ran, max(self._since, self.renewed) + more)
        return ran

    def hand_waits(self, waited: Mapping[int, float]) -> None:
        """Take over waits for replicas that stand still, and how long each has taken. Any thread."""
        self._handed = {**self._handed, **waited}
        self._eventful = True

    @property
    def awaited(self) -> dict[int, float]:
        """Returns for how many seconds each replica has been waited for. Called while the driver stands still."""
        return {replica: self._ran.seconds - begun for replica, begun in self._waits().items()}

    @property
    def waited(self) -> float:
        """The seconds for which the driver waits by now."""
        wait = self.wait
        return 0.0 if wait is None else self.clock() - wait[0]

    def _stalled(self, now: float, since: float) -> None:
        self.stalled_seconds += now - since
        self._reported = None

    def waiting(self, seconds: float) -> Stall | None:
        """Returns what the driver waits for, if it has for at least `seconds`. Any thread."""
        wait = self.wait
        return wait[1] if wait is not None and self.clock() - wait[0] >= seconds else None
