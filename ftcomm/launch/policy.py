"""Decides what to do about a replica that died. All decisions are pure, so that they can be read and tested alone."""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Mapping

WINDOW = 3600.0  # s for which a restart counts against --max-restarts
HEALTHY = 60.0  # s of life after which the back-off starts anew
TERM_TO_KILL = 5.0  # s between SIGTERM and SIGKILL
REMOVED_TO_TERM = 5.0  # s in which a removed or lost replica may end by itself: it is told, and most can hear


class State(enum.Enum):
    RUNNING = "running"
    WAITING = "waiting"  # dead, to be restarted after its back-off
    FINISHED = "finished"  # all its ranks exited with 0
    LEFT = "left"  # the same, but it left at a step boundary while the others went on (SIGTERM)
    FAILED = "failed"  # given up
    STOPPED = "stopped"  # ended while the job was drained or killed, or too late to come back

    @property
    def over(self) -> bool:
        return self in (State.FINISHED, State.LEFT, State.FAILED, State.STOPPED)


@dataclasses.dataclass(frozen=True)
class Restarts:
    """The past restarts of one replica. Times are seconds of one monotonic clock."""

    times: tuple[float, ...] = ()  # those within the window
    streak: int = 0  # restarts since it last lived for a healthy minute

    def after(self, now: float, lived: float) -> Restarts:
        """Returns the record after the replica has died at `now`, having lived for `lived`."""
        times = tuple(time for time in self.times if now - time < WINDOW)
        return Restarts(times, 0 if lived >= HEALTHY else self.streak)

    def another(self, now: float) -> Restarts:
        return Restarts((*self.times, now), self.streak + 1)

    def refused(self) -> Restarts:
        """Returns the record after the system has refused a process for the replica, which is no fault of it."""
        return dataclasses.replace(self, streak=self.streak + 1)

    def delay(self, first: float, limit: float) -> float:
        return min(limit, first * 2.0 ** min(self.streak, 30))


@dataclasses.dataclass(frozen=True)
class Restart:
    delay: float
    count: int  # this restart's number within the window
    restarts: Restarts


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """The replica is given up; the others go on."""

    reason: str


@dataclasses.dataclass(frozen=True)
class JobLost:
    """The job is lost, since no replica is left to go on."""

    reason: str


CHECKPOINT = "Start the job again from its last checkpoint"


def after_death(
    others: Mapping[int, State],
    code: int,
    said_finished: bool,
    restarts: Restarts,
    now: float,
    *,
    began: bool,
    max_restarts: int,
    min_replicas: int,
    backoff: float,
    backoff_limit: float,
) -> Restart | GiveUp | JobLost:
    """Decide about a replica that died unasked. `others` are the states of all the others, `restarts` its own past as
    of now.

    `code` is as in `Popen.returncode`. `began`: there was a view, so there is a state of the training to be lost.
    """
    states = list(others.values())
    if State.RUNNING not in states:
        if State.FINISHED in states or State.LEFT in states:
            return GiveUp("it is not restarted: the others have ended, so there is no replica to catch up from")
        if not began:
            return JobLost("all replicas died before the job began; their output says why")
        return JobLost(f"no replica is left that holds the training state. {CHECKPOINT}")
    if said_finished and code < 0:  # a script says so at any exit of its own, also sys.exit(1)
        return GiveUp("it is not restarted: its training had finished")
    if len(restarts.times) < max_restarts:
        return Restart(restarts.delay(backoff, backoff_limit), len(restarts.times) + 1, restarts.another(now))
    why = (
        f"it was restarted {max_restarts} times within an hour (--max-restarts)"
        if max_restarts
        else "restarts are switched off (--max-restarts 0)"
    )
    usable = sum(state is not State.FAILED for state in states)
    if usable < min_replicas:
        return JobLost(f"{why}, and {usable} are fewer than --min-replicas {min_replicas}. {CHECKPOINT}")
    return GiveUp(why)


def how_it_ended(code: int) -> str:
    """Describes a `Popen.returncode` in words."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal_name(code)}"


def signal_name(code: int) -> str | None:
    """Returns the name of the signal, SIGKILL for -9; None for an exit code."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
