"""Connections for data that have ended between members that live, and when a view of the same members makes them again.
Pure.

    one member says so             the other is asked by a handshake; the connection is made again once it answers
    the other does not answer      the connection is made again `hold_down` seconds later, if both are present: its
                                   interpreter may be held, or only the coordinator may be cut off from this rank
    `MOST` times in `window` s     this is no accident: the two cannot reach each other, see `blame`
    twice as often for one member  the same holds, though the other member was a different one each time
"""

from __future__ import annotations

from collections.abc import Set

MOST = 10  # views for the same two members in one window


class SeveredPairs:
    """The connections that have ended since the last view. All times are seconds."""

    def __init__(self, hold_down: float, window: float) -> None:
        self._hold_down, self._window = hold_down, window
        self._ended: dict[tuple[int, int], tuple[float, int]] = {}  # (by, other) -> since when, and in which epoch
        self._mended: dict[frozenset[int], list[float]] = {}  # per pair, and per member: when views were made

    def __bool__(self) -> bool:
        return bool(self._ended)

    def said(self, by: int, other: int, epoch: int, now: float) -> bool:
        """Note that `by` has lost its connection with `other`. False if this was mended too often."""
        for some, most in (
            (frozenset((by, other)), MOST),
            (frozenset((by,)), 2 * MOST),
            (frozenset((other,)), 2 * MOST),
        ):
            mended = [when for when in self._mended.pop(some, []) if now - when <= self._window]
            if mended:
                self._mended[some] = mended
            if len(mended) >= most:
                return False
        since, _ = self._ended.get((by, other), (now, epoch))
        self._ended[by, other] = since, epoch
        return True

    def knows(self, by: int, other: int) -> bool:
        """Whether `by` has reported its connection with `other`."""
        return (by, other) in self._ended

    def ripe(self, now: float, present: Set[int]) -> bool:
        """Whether the time for an answer is over. `present` are those that have just given a sign of life."""
        return any(present >= set(pair) and now - since > self._hold_down for pair, (since, _) in self._ended.items())

    def mend(self) -> str:
        """Note that a view is made for all of these connections; returns why."""
        pairs: dict[frozenset[int], float] = {}
        for pair, (since, _) in self._ended.items():
            pairs.setdefault(frozenset(pair), since)
        members = dict.fromkeys(
            (frozenset((member,)) for pair in pairs for member in pair), min(pairs.values(), default=0.0)
        )
        for some, since in (pairs | members).items():
            self._mended.setdefault(some, []).append(since)
        said = ", ".join(" and ".join(map(str, sorted(between))) for between in pairs)
        return f"connections for data are made again, between {said}"

    def entered(self, epoch: int) -> None:
        """Note that all members run in the view of `epoch`: it has made all connections again."""
        self._ended = {pair: ended for pair, ended in self._ended.items() if ended[1] >= epoch}

    def clear(self) -> None:
        """Forget all connections, since a new view makes them again."""
        self._ended.clear()
