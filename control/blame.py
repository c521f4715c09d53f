"""Whom to remove when members cannot reach each other, or wait for each other: never the victim. Pure."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

FRESH = 1.5  # seconds that a report of a stall is good for; it is repeated every second


class _Stall(NamedTuple):
    op: int  # -1: a change of view
    waiting_on: tuple[int, ...]
    since: float
    last: float


class Blame:
    """Complaints and wait-for reports since the last view. All times are seconds.

    A complaint is acted upon `patience` seconds after it came, unless it was withdrawn, so that those of the others can
    join it; a stall when it is still said after `stall_grace` seconds, so that all who wait have said so. One that is
    not said again is over.
    """

    def __init__(self, patience: float, stall_grace: float) -> None:
        self._patience, self._stall_grace = patience, stall_grace
        self._complaints: dict[tuple[int, int], float] = {}  # (by, accused) -> since
        self._stalls: dict[int, _Stall] = {}  # by whom it was reported

    def complaint(self, by: int, accused: int, now: float) -> None:
        """`by` cannot reach `accused`."""
        self._complaints.setdefault((by, accused), now)

    def withdraw(self, by: int, accused: int) -> None:
        """They reach each other again."""
        self._complaints.pop((by, accused), None)

    def stalled(self, by: int, op: int, waiting_on: tuple[int, ...], now: float) -> None:
        """`by` makes no progress in `op`; said again every second as long as that is so."""
        known = self._stalls.get(by)
        since = known.since if known is not None and known.op == op and now - known.last < FRESH else now
        self._stalls[by] = _Stall(op, waiting_on, since, now)

    def clear(self) -> None:
        """A new view: all of it is of the past."""
        self._complaints.clear()
        self._stalls.clear()

    def culprit(self, now: float, contributing: Set[int]) -> dict[int, str]:
        """The replica to remove now and why; empty if there is none."""
        return self._unreachable(now, contributing) or self._waited_for(now)

    def _unreachable(self, now: float, contributing: Set[int]) -> dict[int, str]:
        """Of two that cannot reach each other the one goes that more others cannot reach or be reached by; then one
        that only catches up; then the higher replica."""
        pair = next((pair for pair, since in self._complaints.items() if now - since > self._patience), None)
        if pair is None:
            return {}
        broken = {frozenset(complaint) for complaint in self._complaints}

        def weight(replica: int) -> tuple[int, bool, int]:
            return sum(replica in edge for edge in broken), replica not in contributing, replica

        victim = max(pair, key=weight)
        other = pair[0] if victim == pair[1] else pair[1]
        return {victim: f"replicas {other} and {victim} cannot reach each other"}

    def _waited_for(self, now: float) -> dict[int, str]:
        """Follow the reports from one to the next, to the member that waits for nobody: it holds all the others up."""
        stalls = {by: stall for by, stall in self._stalls.items() if now - stall.last < FRESH}
        first = next((by for by, stall in stalls.items() if stall.last - stall.since > self._stall_grace), None)
        if first is None:
            return {}
        path = [first]
        while path[-1] in stalls:
            following = [replica for replica in stalls[path[-1]].waiting_on if replica not in path]
            if not following:  # they wait in a circle
                path.append(max(path))
                break
            path.append(following[0])
        what = f"op {stalls[first].op}" if stalls[first].op >= 0 else "the change of view"
        return {path[-1]: f"{what} waits for it (replica {first} reported the stall)"}
