"""Whom to remove when members cannot reach each other, or wait for each other: never the victim. Pure."""

from __future__ import annotations


class Blame:
    """Complaints and wait-for reports since the last view. All times are seconds.

    A complaint is acted upon `patience` seconds after it came, so that those of the others can join it; a stall
    `stall_grace` seconds after, so that all who wait have said so.
    """

    def __init__(self, patience: float, stall_grace: float) -> None:
        self._patience, self._stall_grace = patience, stall_grace
        self._complaints: dict[tuple[int, int], float] = {}  # (by, accused) -> since
        self._stalls: dict[int, tuple[int, tuple[int, ...], float]] = {}  # by -> (op, waiting on, since)

    def complaint(self, by: int, accused: int, now: float) -> None:
        """`by` cannot reach `accused`."""
        self._complaints.setdefault((by, accused), now)

    def stalled(self, by: int, op: int, waiting_on: tuple[int, ...], now: float) -> None:
        """`by` makes no progress in `op`."""
        self._stalls[by] = (op, waiting_on, now)

    def clear(self) -> None:
        """A new view: all of it is of the past."""
        self._complaints.clear()
        self._stalls.clear()

    def culprit(self, now: float) -> dict[int, str]:
        """The replica to remove now and why; empty if there is none."""
        return self._unreachable(now) or self._waited_for(now)

    def _unreachable(self, now: float) -> dict[int, str]:
        """Of two members that cannot reach each other the one with more complaints goes, then the higher replica."""
        pair = next((pair for pair, since in self._complaints.items() if now - since > self._patience), None)
        if pair is None:
            return {}
        count = {replica: sum(accused == replica for _, accused in self._complaints) for replica in pair}
        victim = max(pair, key=lambda replica: (count[replica], replica))
        other = pair[0] if victim == pair[1] else pair[1]
        return {victim: f"replicas {other} and {victim} cannot reach each other"}

    def _waited_for(self, now: float) -> dict[int, str]:
        """Follow the reports from one to the next, to the member that waits for nobody: it holds all the others up."""
        first = next((by for by, (_, _, since) in self._stalls.items() if now - since > self._stall_grace), None)
        if first is None:
            return {}
        path = [first]
        while path[-1] in self._stalls:
            following = [replica for replica in self._stalls[path[-1]][1] if replica not in path]
            if not following:  # they wait in a circle
                path.append(max(path))
                break
            path.append(following[0])
        op = self._stalls[first][0]
        return {path[-1]: f"op {op} waits for it (replica {first} reported the stall)"}
