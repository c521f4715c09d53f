"""Matches messages to receives: the oldest message of a sender and tag goes to the oldest receive that takes it. Pure.

A message without a receive is `Unexpected`: here with its bytes if it is small, otherwise as an offer of them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from typing import Generic, Protocol, TypeVar

# Of one sender that nobody has asked for; it holds the others back, and if the one that is wanted is among these, both
# wait in vain. So many that this does not happen, at some 200 bytes each.
MAX_UNEXPECTED = 1 << 16
MAX_BYTES = 1 << 20  # bytes of those; beyond that, and above EAGER each, a sender offers


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Unexpected:
    source: int
    number: int  # counts the messages of its sender's connection
    tag: int
    dtype: str
    nbytes: int
    data: bytes | bytearray | None  # None: an offer
    slots: bool = False  # an offer by copy engines


class Wants(Protocol):
    """A receive. With `source` None it takes a message of any sender."""

    tag: int
    source: int | None


W = TypeVar("W", bound=Wants)
QueuedT = TypeVar("QueuedT")


class Matching(Generic[W]):
    """Receives without an arrival, and arrivals without a receive. One sender and tag never have both."""

    def __init__(self) -> None:
        self._wants: defaultdict[int, deque[W]] = defaultdict(deque)  # receives by tag, the oldest first
        self._unexpected: defaultdict[int, deque[Unexpected]] = defaultdict(deque)
        self._counts: defaultdict[int, int] = defaultdict(int)  # arrivals by source
        self._bytes: defaultdict[int, int] = defaultdict(int)

    def want(self, want: W) -> Unexpected | None:
        """Takes out and returns the arrival for a receive; None if the receive waits."""
        for arrival in self._unexpected.get(want.tag, ()):
            if want.source in (None, arrival.source):
                self.discard(arrival)
                return arrival
        self._wants[want.tag].append(want)
        return None

    def arrive(self, arrival: Unexpected) -> W | None:
        """Takes out and returns the receive for an arrival; None if the arrival waits."""
        for want in self._wants.get(arrival.tag, ()):
            if want.source in (None, arrival.source):
                self.cancel(want)
                return want
        self._unexpected[arrival.tag].append(arrival)
        self._counts[arrival.source] += 1
        self._bytes[arrival.source] += len(arrival.data or b"")
        return None

    def full(self, source: int, nbytes: int) -> bool:
        """Whether an arrival with `nbytes` more would be too much."""
        return self._counts[source] >= MAX_UNEXPECTED or self._bytes[source] + nbytes > MAX_BYTES

    def again(self, want: W) -> Unexpected | None:
        """Put back a receive whose arrival was withdrawn: it is the oldest again."""
        younger = self._wants.pop(want.tag, ())
        arrival = self.want(want)
        if younger:
            self._wants[want.tag].extend(younger)
        return arrival

    def cancel(self, want: W) -> bool:
        """Give a receive up; False if it does not wait here."""
        return _remove(self._wants, want.tag, want)

    def discard(self, arrival: Unexpected) -> bool:
        """Give an arrival up; False if it does not wait here."""
        if not _remove(self._unexpected, arrival.tag, arrival):
            return False
        self._counts[arrival.source] -= 1
        self._bytes[arrival.source] -= len(arrival.data or b"")
        return True

    def offered(self, source: int, number: int) -> Unexpected | None:
        """Returns the offer with that number, if it waits here."""
        return next((x for x in self.arrivals(source) if x.number == number and x.data is None), None)

    def arrivals(self, source: int) -> list[Unexpected]:
        return [arrival for arrivals in self._unexpected.values() for arrival in arrivals if arrival.source == source]

    def wants(self) -> list[W]:
        return [want for wants in self._wants.values() for want in wants]


def _remove(of: defaultdict[int, deque[QueuedT]], tag: int, one: QueuedT) -> bool:
    """Removes one; returns whether it was there. A tag that is used once must leave nothing behind."""
    queue = of.get(tag, ())
    if one not in queue:
        return False
    of[tag].remove(one)
    if not of[tag]:
        del of[tag]
    return True
