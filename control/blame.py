"""Decides which member to remove when members cannot reach, or wait for, each other: never the victim. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import NamedTuple

from ftcomm.control.timeouts import REPORT

FRESH = 2.5 * REPORT  # seconds for which a report of a stall holds
SETTLED = 2 * REPORT  # seconds in which all members have told a new view for whom they wait
QUIET = 10.0  # seconds after which a complaint that was withdrawn is news again
LONGEST = 400  # characters of a complaint that are passed on


class Removal(enum.Enum):
    """The reason for which a replica was removed that is not known to have ended."""

    SILENCE = "silence"  # it is not heard, or not all of its ranks are
    UNREACHABLE = "unreachable"  # it and another one cannot reach each other
    STALL = "stall"  # others wait for it


class Culprit(NamedTuple):
    """The replica to remove; `lasted` are the seconds for which others have waited for it, if they have told."""

    removal: Removal
    why: str
    lasted: float = 0.0


class _Stall(NamedTuple):
    op: int  # below 0: a change of view, or a boundary
    waiting_on: tuple[int, ...]
    since: float
    last: float
    due: bool  # the deadline of the wait is over; else it only answers a question
    lasted: float  # seconds for which the rank has run and waited, also in earlier views

    @property
    def lasts(self) -> bool:
        """Whether it was told more than once."""
        return self.last > self.since


class Blame:
    """Complaints and wait-for reports since the last view. All times are seconds.

    A complaint counts `hold_down` seconds after it came, so that others can join it, unless it is withdrawn. It does
    not count while one of the two is absent: once it is back, they have that time again to reach each other.

    A stall counts if it is still reported after `grace` seconds, so that all waiting members have reported. A stall
    that is not repeated is over. If the cause lives and is mute, a stall counts if the wait has lasted for `op`
    seconds: a process may hold its interpreter for as long as an op may take.

    Who waits counts those seconds, and goes on counting in the next view, and when a coordinator is restarted. What has
    lasted for longer than all of this is watched for `SETTLED` seconds in a new view. Who waited itself when the view
    changed was held up by others, and is given `op` seconds from then on.

    Reports are by rank. The ranks of a replica are in different groups and may wait for different members, but the
    replica is removed as one.
    """

    def __init__(self, hold_down: float, grace: float, op: float) -> None:
        self._hold_down, self._grace, self._op = hold_down, grace, op
        self._complaints: dict[tuple[int, int], tuple[float, str]] = {}  # (by, accused) -> since when, and why
        self._stalls: dict[tuple[int, int], _Stall] = {}  # (replica, shard) -> the wait that it reported
        self._said: dict[tuple[int, int], float] = {}  # (by, accused) -> the last complaint
        self._heard: dict[tuple[int, int], float] = {}  # (by, accused) -> when a complaint was news in this view
        self._last_between: dict[frozenset[int], float] = {}  # the last complaint between two in this view
        self._recent = max(QUIET, 2 * hold_down)  # a path that fails again and again is whole for a while
        self._waited: dict[tuple[int, int], float] = {}  # ranks that waited when a view was decided, and when that was
        self._asked = float("-inf")

    def complaint(self, by: int, accused: int, now: float, why: str = "") -> bool:
        """Note that `by` cannot reach `accused`. True if that is news: the first such complaint in this view, or one
        behind a withdrawal, but not more often than every `QUIET` seconds."""
        new = (by, accused) not in self._complaints
        self._complaints.setdefault((by, accused), (now, why[:LONGEST]))
        self._said[by, accused] = now
        self._last_between[frozenset((by, accused))] = now
        news = new and now - self._heard.get((by, accused), float("-inf")) >= QUIET
        if news:
            self._heard[by, accused] = now
        return news

    def accusers(self, accused: int, now: float) -> set[int]:
        """The replicas that still complain of `accused`; a complaint that lasts is repeated every second."""
        return {by for (by, other), said in self._said.items() if other == accused and now - said < FRESH}

    def withdraw(self, by: int, accused: int) -> None:
        """Note that two replicas reach each other again."""
        self._complaints.pop((by, accused), None)
        self._said.pop((by, accused), None)

    def connected(self, by: int) -> None:
        """Note that a replica has connected again. It repeats the complaints that last, and may have withdrawn others
        meanwhile."""
        for pair in [pair for pair in self._complaints if pair[0] == by]:
            self.withdraw(*pair)

    def stalled(
        self, by: int, shard: int, op: int, waiting_on: tuple[int, ...], due: bool, now: float, lasted: float = 0.0
    ) -> bool:
        """Note that rank `shard` of replica `by` makes no progress in `op`. It repeats this every second while it
        waits, for `lasted` seconds now; without `waiting_on` it does not wait.

        True if all others should now be asked on whom they wait. Otherwise a member with a later deadline would look
        like one that waits for none.
        """
        known = self._stalls.pop((by, shard), None)
        if not waiting_on:
            return False
        goes_on = known is not None and known.op == op and now - known.last < FRESH
        since, was_due, before = now, False, 0.0
        if known is not None and goes_on:
            since, was_due, before = known.since, known.due, known.lasted
        self._stalls[by, shard] = _Stall(op, waiting_on, since, now, due or was_due, lasted if due else before)
        return due and self.asks(now)

    def asks(self, now: float) -> bool:
        """Whether all are to be asked now for whom they wait. They are, then, and not again at once."""
        if now - self._asked < REPORT / 2:
            return False
        self._asked = now
        return True

    def awaited(self, now: float) -> set[int]:
        """Returns the replicas that ranks wait for, by what they say every second."""
        return {other for stall in self._stalls.values() if now - stall.last < FRESH for other in stall.waiting_on}

    def clear(self) -> None:
        """Forget all reports, since there is a new view."""
        self._complaints.clear()
        self._said.clear()
        self._heard.clear()
        self._last_between.clear()
        # One that was asked just while it waited for the progress of others, in a change of view, was held up by none.
        held_up = {x: stall for x, stall in self._stalls.items() if stall.op != CHANGE or stall.due or stall.lasts}
        self._waited.update((rank, stall.last) for rank, stall in held_up.items())
        self._stalls.clear()

    def forget(self, replica: int) -> None:
        """Forget that a replica waited: its number may be that of another life from now on."""
        self._waited = {rank: last for rank, last in self._waited.items() if rank[0] != replica}

    def culprit(
        self,
        now: float,
        contributing: Set[int],
        present: Set[int],
        mute: Mapping[int, str] | None = None,
        held: Set[int] = frozenset(),
    ) -> dict[int, Culprit]:
        """Returns the replica to remove now and why; empty if there is none. `present` have just given a sign of life.
        `mute` says what those do that live and do not speak; `held` have been mute of late."""
        removal, lasted = Removal.UNREACHABLE, 0.0
        lost = self._unreachable(now, contributing, present)
        if not lost:
            removal, lost = Removal.STALL, self._waited_for(now, contributing, held)
            lasted = max((stall.lasted + now - stall.last for stall in self._stalls.values() if stall.due), default=0.0)
        does = mute or {}
        return {x: Culprit(removal, "; ".join(filter(None, (why, does.get(x)))), lasted) for x, why in lost.items()}

    def _unreachable(self, now: float, contributing: Set[int], present: Set[int]) -> dict[int, str]:
        """Choose between two replicas that cannot reach each other: first the one in more complaints, withdrawn lately
        or not, then one that only catches up, then the higher number. This is for a broken network between two that
        live."""
        for absent in [pair for pair in self._complaints if not present >= set(pair)]:
            self._complaints[absent] = now, self._complaints[absent][1]
        ripe = (pair for pair, (since, _) in self._complaints.items() if now - since > self._hold_down)
        pair = next(ripe, None)
        if pair is None:
            return {}
        broken = {frozenset(complaint) for complaint in self._complaints}
        broken |= {pair for pair, last in self._last_between.items() if now - last < self._recent}

        def weight(replica: int) -> tuple[int, bool, int]:
            return sum(replica in edge for edge in broken), replica not in contributing, replica

        victim = max(pair, key=weight)
        other = pair[0] if victim == pair[1] else pair[1]
        both = ((by, self._complaints.get((by, accused), (0.0, ""))[1]) for by, accused in (pair, pair[::-1]))
        said = "; ".join(f"replica {by}: {why}" for by, why in both if why)
        return {victim: f"replicas {other} and {victim} cannot reach each other{said and f' ({said})'}"}

    def _waited_for(self, now: float, contributing: Set[int], held: Set[int]) -> dict[int, str]:
        """Follow the reports to a member that waits for none: it holds all the others up."""
        stalls = {by: stall for by, stall in self._stalls.items() if now - stall.last < FRESH}
        first = next(
            (by for by, stall in stalls.items() if stall.due and stall.last - stall.since > self._watched(stall)),
            None,
        )
        if first is None:
            return {}
        replicas = {replica for replica, _ in stalls}
        reached, edges = [first[0]], set[tuple[int, int, int]]()  # (replica, its shard, the replica that it waits for)
        for replica in reached:
            for (by, shard), stall in stalls.items():
                if by == replica:
                    edges.update((by, shard, other) for other in stall.waiting_on)
                    reached += [other for other in stall.waiting_on if other not in reached]
        # If all wait in a circle, by different ranks, it is a replica with a rank that does not wait.
        idle = {other for _, shard, other in edges if (other, shard) not in stalls}
        candidates = [replica for replica in reached if replica not in replicas] or sorted(idle) or reached

        def weight(replica: int) -> tuple[int, int, bool, int]:
            """Ranks whose deadline is not over count less: they may have waited just when they were asked."""
            waiters = {(by, shard) for by, shard, other in edges if other == replica}
            return sum(stalls[by].due for by in waiters), len(waiters), replica not in contributing, replica

        victim = max(candidates, key=weight)
        if victim in held and all(stall.lasted <= self._op for stall in stalls.values() if stall.due):
            return {}
        still = {(other, shard) for _, shard, other in edges if other == victim} - stalls.keys()
        if still and all(now - self._waited.get(rank, float("-inf")) <= self._op for rank in still):
            return {}
        return {victim: f"{_what(stalls[first].op)} waits for it (replica {first[0]} reported the stall)"}

    def _watched(self, stall: _Stall) -> float:
        """Returns for how many seconds a stall has to be reported in one view before it counts."""
        return min(self._grace, SETTLED) if stall.lasted > self._op + self._grace else self._grace


CHANGE, BOUNDARY = -1, -2  # these stand in place of the number of an op


def _what(op: int) -> str:
    return {CHANGE: "the change of view", BOUNDARY: "the step boundary"}.get(op, f"op {op}")
