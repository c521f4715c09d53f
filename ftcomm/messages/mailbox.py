"""Which message goes to which receive: the oldest of a sender and tag to the oldest receive that takes it. Pure.

A message that nobody has asked for yet is a `Letter` here: with its bytes if it is small, else as an offer of them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from typing import Generic, Protocol, TypeVar

# Of one sender that nobody has asked for; it holds the others back, and if the one that is wanted is among these, both
# wait in vain. So many that this does not happen, at some 200 bytes each.
MAX_LETTERS = 1 << 16
MAX_BYTES = 1 << 20  # that come with them; beyond that, and above WHOLE each, a sender offers


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Letter:
    source: int
    number: int  # of its sender's connection
    tag: int
    dtype: str
    nbytes: int
    data: bytes | bytearray | None  # None: an offer
    slots: bool = False  # of what goes by copy engines


class Wants(Protocol):
    """A receive. `source` None takes what anybody has sent."""

    tag: int
    source: int | None


W = TypeVar("W", bound=Wants)
T = TypeVar("T")


class Mailbox(Generic[W]):
    """Receives without a letter, and letters without a receive; of one sender and tag never both."""

    def __init__(self) -> None:
        self._wants: defaultdict[int, deque[W]] = defaultdict(deque)  # by tag, the oldest first
        self._letters: defaultdict[int, deque[Letter]] = defaultdict(deque)
        self._counts: defaultdict[int, int] = defaultdict(int)  # by source
        self._bytes: defaultdict[int, int] = defaultdict(int)

    def want(self, want: W) -> Letter | None:
        """The letter for it, which leaves the box; None: the receive waits."""
        for letter in self._letters.get(want.tag, ()):
            if want.source in (None, letter.source):
                self.discard(letter)
                return letter
        self._wants[want.tag].append(want)
        return None

    def arrive(self, letter: Letter) -> W | None:
        """The receive for it, which leaves the box; None: the letter waits."""
        for want in self._wants.get(letter.tag, ()):
            if want.source in (None, letter.source):
                self.cancel(want)
                return want
        self._letters[letter.tag].append(letter)
        self._counts[letter.source] += 1
        self._bytes[letter.source] += len(letter.data or b"")
        return None

    def full(self, source: int, nbytes: int) -> bool:
        """Whether a letter with so many bytes more is too much."""
        return self._counts[source] >= MAX_LETTERS or self._bytes[source] + nbytes > MAX_BYTES

    def again(self, want: W) -> Letter | None:
        """A receive whose letter was withdrawn: it is the oldest again."""
        younger = self._wants.pop(want.tag, ())
        letter = self.want(want)
        if younger:
            self._wants[want.tag].extend(younger)
        return letter

    def cancel(self, want: W) -> bool:
        """The receive is given up; False if it does not wait here."""
        return _remove(self._wants, want.tag, want)

    def discard(self, letter: Letter) -> bool:
        """The letter is given up; False if it does not wait here."""
        if not _remove(self._letters, letter.tag, letter):
            return False
        self._counts[letter.source] -= 1
        self._bytes[letter.source] -= len(letter.data or b"")
        return True

    def offered(self, source: int, number: int) -> Letter | None:
        """The offer of that number, if it waits here."""
        return next((x for x in self.letters(source) if x.number == number and x.data is None), None)

    def letters(self, source: int) -> list[Letter]:
        return [letter for letters in self._letters.values() for letter in letters if letter.source == source]

    def wants(self) -> list[W]:
        return [want for wants in self._wants.values() for want in wants]


def _remove(of: defaultdict[int, deque[T]], tag: int, one: T) -> bool:
    """Whether it was there. Tags that are used once must not pile up."""
    queue = of.get(tag, ())
    if one not in queue:
        return False
    of[tag].remove(one)
    if not of[tag]:
        del of[tag]
    return True
