"""Whom to remove when members cannot reach each other, or wait for each other: never the victim. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from ftcomm.control.timeouts import REPORT

FRESH = 2.5 * REPORT  # seconds that a report of a stall is good for
WORDS = 400  # characters of what one says of another that are passed on


class _Stall(NamedTuple):
    op: int  # below 0: no op, but a change of view or a boundary
    waiting_on: tuple[int, ...]
    since: float
    last: float
    due: bool  # it waits for longer than its deadline; else it only answers a question


class Blame:
    """Complaints and wait-for reports since the last view. All times are seconds.

    A complaint is acted upon `patience` seconds after it came, unless it was withdrawn, so that those of the others can
    join it, and not while one of the two is not present: when it is again they have that time to reach each other. A
    stall is acted upon when it is still said after `grace` seconds, so that all who wait have said so. One that is not
    said again is over. Where the one that is waited for lives and does not speak that is after `ceiling` seconds: it
    may hold its interpreter for as long as an op may take at most. Reports are by rank: the ranks of a replica stand in
    different groups and may wait for different members, but the replica is removed as one.
    """

    def __init__(self, patience: float, grace: float, ceiling: float) -> None:
        self._patience, self._grace, self._ceiling = patience, grace, ceiling
        self._complaints: dict[tuple[int, int], tuple[float, str]] = {}  # (by, accused) -> since, what it says
        self._stalls: dict[tuple[int, int], _Stall] = {}  # (replica, rank) that reported -> its wait
        self._said: dict[tuple[int, int], float] = {}  # (by, accused) -> when it complained last
        self._heard: set[tuple[int, int]] = set()  # (by, accused) that have complained in this view
        self._asked = float("-inf")

    def complaint(self, by: int, accused: int, now: float, why: str = "") -> bool:
        """`by` cannot reach `accused`. True if it has not said so in this view before, withdrawn or not."""
        self._complaints.setdefault((by, accused), (now, why[:WORDS]))
        self._said[by, accused] = now
        first = (by, accused) not in self._heard
        self._heard.add((by, accused))
        return first

    def accusers(self, accused: int, now: float) -> set[int]:
        """Who still complains of it; a complaint that lasts is said again every second."""
        return {by for (by, other), said in self._said.items() if other == accused and now - said < FRESH}

    def withdraw(self, by: int, accused: int) -> None:
        """They reach each other again."""
        self._complaints.pop((by, accused), None)
        self._said.pop((by, accused), None)

    def stalled(self, by: int, rank: int, op: int, waiting_on: tuple[int, ...], due: bool, now: float) -> bool:
        """Rank `rank` of `by` makes no progress in `op`; said again every second as long as that is so. Without anybody
        to wait for: it does not wait (any more).

        True if all others should be asked on whom they wait, now: a member whose own deadline is later would else look
        like the one that waits for nobody.
        """
        known = self._stalls.pop((by, rank), None)
        if not waiting_on:
            return False
        lasts = known is not None and known.op == op and now - known.last < FRESH
        since, was_due = (known.since, known.due) if lasts and known is not None else (now, False)
        self._stalls[by, rank] = _Stall(op, waiting_on, since, now, due or was_due)
        if not due or now - self._asked < REPORT / 2:
            return False
        self._asked = now
        return True

    def clear(self) -> None:
        """A new view: all of it is of the past."""
        self._complaints.clear()
        self._said.clear()
        self._heard.clear()
        self._stalls.clear()

    def culprit(
        self,
        now: float,
        contributing: Set[int],
        present: Set[int],
        mute: Mapping[int, str] | None = None,
        held: Set[int] = frozenset(),
    ) -> dict[int, str]:
        """The replica to remove now and why; empty if there is none. `present`: who has just given a sign of life.
        `mute`: what those do that live and have not. `held`: who has been so of late."""
        lost = self._unreachable(now, contributing, present) or self._waited_for(now, contributing, held)
        return {replica: "; ".join(filter(None, (why, (mute or {}).get(replica)))) for replica, why in lost.items()}

    def _unreachable(self, now: float, contributing: Set[int], present: Set[int]) -> dict[int, str]:
        """Of two that cannot reach each other the one goes that more others cannot reach or be reached by; then one
        that only catches up; then the higher replica. That is for a broken network between two that live."""
        for absent in [pair for pair in self._complaints if not present >= set(pair)]:
            self._complaints[absent] = now, self._complaints[absent][1]
        ripe = (pair for pair, (since, _) in self._complaints.items() if now - since > self._patience)
        pair = next(ripe, None)
        if pair is None:
            return {}
        broken = {frozenset(complaint) for complaint in self._complaints}

        def weight(replica: int) -> tuple[int, bool, int]:
            return sum(replica in edge for edge in broken), replica not in contributing, replica

        victim = max(pair, key=weight)
        other = pair[0] if victim == pair[1] else pair[1]
        both = ((by, self._complaints.get((by, accused), (0.0, ""))[1]) for by, accused in (pair, pair[::-1]))
        said = "; ".join(f"replica {by}: {why}" for by, why in both if why)
        return {victim: f"replicas {other} and {victim} cannot reach each other{said and f' ({said})'}"}

    def _waited_for(self, now: float, contributing: Set[int], held: Set[int]) -> dict[int, str]:
        """Follow the reports to the members that wait for nobody: they hold all the others up."""
        stalls = {by: stall for by, stall in self._stalls.items() if now - stall.last < FRESH}
        first = next(
            (by for by, stall in stalls.items() if stall.due and stall.last - stall.since > self._grace),
            None,
        )
        if first is None:
            return {}
        replicas = {replica for replica, _ in stalls}
        reached, edges = [first[0]], set[tuple[int, int, int]]()  # (by, its rank, for whom it waits)
        for replica in reached:
            for (by, rank), stall in stalls.items():
                if by == replica:
                    edges.update((by, rank, other) for other in stall.waiting_on)
                    reached += [other for other in stall.waiting_on if other not in reached]
        # All of them wait in a circle, by different ranks: then it is one whose rank in some group waits for nobody.
        idle = {other for _, rank, other in edges if (other, rank) not in stalls}
        candidates = [replica for replica in reached if replica not in replicas] or sorted(idle) or reached

        def weight(replica: int) -> tuple[int, int, bool, int]:
            """A rank of another group may have waited for just the moment in which it was asked: that counts less."""
            waiters = {(by, rank) for by, rank, other in edges if other == replica}
            return sum(stalls[by].due for by in waiters), len(waiters), replica not in contributing, replica

        victim = max(candidates, key=weight)
        if victim in held and all(stall.last - stall.since <= self._ceiling for stall in stalls.values() if stall.due):
            return {}
        return {victim: f"{_what(stalls[first].op)} waits for it (replica {first[0]} reported the stall)"}


CHANGE, BOUNDARY = -1, -2  # what is waited for, in place of the number of an op


def _what(op: int) -> str:
    return {CHANGE: "the change of view", BOUNDARY: "the step boundary"}.get(op, f"op {op}")
