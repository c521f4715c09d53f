"""Which block of the state is fetched from which source, and what a source keeps for whom: pure, told of offers,
blocks and losses.

All sources hold the same bits, so each is asked for the next block that nobody was asked for, a few ahead. What a
source was asked for and has not sent when it is lost, or falls silent, goes back, to be asked of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from ftcomm.control.views import View

MAX_SOURCES = 4
DEPTH = 4  # requests ahead at one source, so that its link never idles for a round trip


Kept = TypeVar("Kept")
Joiner = tuple[int, str]  # replica, incarnation


def sources_of(view: View) -> tuple[int, ...]:
    """Which members serve the state to those that join with `view`."""
    return tuple(sorted(view.contributing))[:MAX_SOURCES]


class BlockScheduler:
    """Assigns blocks of the state to sources. Not thread-safe; nothing here blocks."""

    def __init__(self, sources: Iterable[int], depth: int = DEPTH) -> None:
        self._depth = depth
        self._asked: dict[int, deque[int]] = {source: deque() for source in sorted(sources)}
        self._todo: deque[int] = deque()
        self._begun = False
        self.left = 0  # blocks not received yet
        self.lost: dict[int, str] = {}  # source -> why
        self.served: list[int] = []  # who sent at least one block

    @property
    def alive(self) -> tuple[int, ...]:
        """Sources that were not lost."""
        return tuple(self._asked)

    @property
    def complete(self) -> bool:
        return self._begun and self.left == 0

    @property
    def hopeless(self) -> bool:
        """Something is missing, and nobody is left to ask."""
        return not self._asked and not self.complete

    def begin(self, blocks: int) -> None:
        """The first offer says how many there are."""
        self._begun = True
        self._todo.extend(range(blocks))
        self.left = blocks

    def ask(self, source: int) -> list[int]:
        """Blocks to ask `source` for now. None while others fetch the last ones: they may come back."""
        asked = self._asked[source]
        numbers = [self._todo.popleft() for _ in range(min(self._depth - len(asked), len(self._todo)))]
        asked.extend(numbers)
        return numbers

    def due(self, source: int) -> int | None:
        """The block that `source` has to send next; None if it was asked for nothing."""
        asked = self._asked[source]
        return asked[0] if asked else None

    def idle(self, source: int) -> bool:
        """It has nothing to send, and there is nothing to ask it for, yet."""
        return not self._asked[source] and not self._todo and not self.complete

    def received(self, source: int) -> None:
        """The block that was due has arrived, whole."""
        self._asked[source].popleft()
        if source not in self.served:
            self.served.append(source)
        self.left -= 1

    def release(self, source: int) -> None:
        """It is silent: others may send what it was asked for."""
        asked = self._asked[source]
        self._todo.extendleft(reversed(asked))
        asked.clear()

    def drop(self, source: int, reason: str) -> None:
        """It is lost, or has said something wrong. May be repeated."""
        asked = self._asked.pop(source, None)
        if asked is not None:
            self.lost[source] = reason
            self._todo.extendleft(reversed(asked))

    def why(self) -> str:
        """What became of the sources."""
        return "; ".join(f"replica {source}: {reason}" for source, reason in sorted(self.lost.items()))


class Snapshots(Generic[Kept]):
    """What a source keeps, for which joiner and of which step. Not thread-safe.

    A joiner whose change was given up before it ran comes in again later, in the same life. Views in between, which
    this source met at no boundary, may have been without it. So after any that were skipped a snapshot is due again,
    and a joiner gets that of the step at which it came in, or none.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()  # incarnations that were in the view at the boundary before
        self._epoch = 0  # of that view
        self._kept: dict[Joiner, dict[int, Kept]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def due(self, step: int, view: View) -> list[Joiner]:
        """The joiners for which a snapshot is due at the boundary of `step`. Drops those that nobody needs any more."""
        behind = [(member.replica, member.incarnation) for member in view.members if not member.contributing]
        again = view.epoch > self._epoch + 1 and view.step == step
        joined = [joiner for joiner in behind if again or joiner[1] not in self._seen]
        self._seen = {member.incarnation for member in view.members}
        self._epoch = view.epoch
        self._kept = {joiner: kept for joiner, kept in self._kept.items() if joiner in behind}
        return joined

    def put(self, joiners: Iterable[Joiner], step: int, snapshot: Kept) -> None:
        for joiner in joiners:
            self._kept.setdefault(joiner, {})[step] = snapshot

    def get(self, joiner: Joiner, step: int) -> Kept | None:
        return self._kept.get(joiner, {}).get(step)

    def done(self, joiner: Joiner) -> None:
        """It has everything."""
        self._kept.pop(joiner, None)

    def only(self, members: Collection[int]) -> None:
        """The others have left."""
        self._kept = {joiner: kept for joiner, kept in self._kept.items() if joiner[0] in members}
