"""Chooses which block of the state to fetch from which source, and which snapshots a source keeps. Pure: it is told of
offers, blocks and losses.

All sources hold the same bits, so each is asked for the next block that no other was asked for, a few ahead. The blocks
that a source still owes when it is lost, or falls silent, are asked of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from ftcomm.control.views import View

MAX_SOURCES = 4
DEPTH = 4  # requests ahead at one source, so that its link never idles for a round trip


SnapshotT = TypeVar("SnapshotT")
JoinerLife = tuple[int, str]  # replica, incarnation


def sources_of(view: View) -> tuple[int, ...]:
    """Returns the members that serve the state to those that join with `view`."""
    return tuple(sorted(view.contributing))[:MAX_SOURCES]


class BlockScheduler:
    """Assigns blocks of the state to sources. Not thread-safe; no method blocks."""

    def __init__(self, sources: Iterable[int], depth: int = DEPTH) -> None:
        self._depth = depth
        self._asked: dict[int, deque[int]] = {source: deque() for source in sorted(sources)}
        self._todo: deque[int] = deque()
        self._begun = False
        self.left = 0  # blocks not received yet
        self.lost: dict[int, str] = {}  # source -> why
        self.served: list[int] = []  # sources that sent at least one block

    @property
    def alive(self) -> tuple[int, ...]:
        """The sources that were not lost."""
        return tuple(self._asked)

    @property
    def complete(self) -> bool:
        return self._begun and self.left == 0

    @property
    def hopeless(self) -> bool:
        """Whether a block is missing, and no source is left to ask."""
        return not self._asked and not self.complete

    def begin(self, blocks: int) -> None:
        """Begin with the number of blocks, which the first offer tells."""
        self._begun = True
        self._todo.extend(range(blocks))
        self.left = blocks

    def ask(self, source: int) -> list[int]:
        """Returns the blocks to ask `source` for now. None while others fetch the last ones, which may come back."""
        asked = self._asked[source]
        numbers = [self._todo.popleft() for _ in range(min(self._depth - len(asked), len(self._todo)))]
        asked.extend(numbers)
        return numbers

    def due(self, source: int) -> int | None:
        """Returns the block that `source` has to send next; None if it was asked for nothing."""
        asked = self._asked[source]
        return asked[0] if asked else None

    def idle(self, source: int) -> bool:
        """Whether `source` owes nothing, and there is nothing to ask it for, yet."""
        return not self._asked[source] and not self._todo and not self.complete

    def received(self, source: int) -> None:
        """Note that the block that was due from `source` has arrived completely."""
        self._asked[source].popleft()
        if source not in self.served:
            self.served.append(source)
        self.left -= 1

    def release(self, source: int) -> None:
        """Let other sources send what the silent `source` was asked for."""
        asked = self._asked[source]
        self._todo.extendleft(reversed(asked))
        asked.clear()

    def drop(self, source: int, reason: str) -> None:
        """Drop a source that is lost, or has sent something wrong. May be repeated."""
        asked = self._asked.pop(source, None)
        if asked is not None:
            self.lost[source] = reason
            self._todo.extendleft(reversed(asked))

    def why(self) -> str:
        """Returns why sources were lost."""
        return "; ".join(f"replica {source}: {reason}" for source, reason in sorted(self.lost.items()))


class Snapshots(Generic[SnapshotT]):
    """The snapshots of a source: for which joiner, and of which step. Not thread-safe.

    A joiner whose change was given up before it ran joins again later, in the same life. Views in between, which this
    source met at no boundary, may have been without it. So after any skipped view a snapshot is due again, and a joiner
    gets that of the step at which it came in, or none.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()  # incarnations in the view at the last boundary
        self._epoch = 0  # the epoch of that view
        self._kept: dict[JoinerLife, dict[int, SnapshotT]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    @property
    def joiners(self) -> tuple[JoinerLife, ...]:
        """The joiners for whom a snapshot is kept."""
        return tuple(self._kept)

    def due(self, step: int, view: View) -> list[JoinerLife]:
        """Returns the joiners for which a snapshot is due at the boundary of `step`. Drops snapshots that are no longer
        needed."""
        behind = [(member.replica, member.incarnation) for member in view.members if not member.contributing]
        again = view.epoch > self._epoch + 1 and view.step == step
        joined = [joiner for joiner in behind if again or joiner[1] not in self._seen]
        self._seen = {member.incarnation for member in view.members}
        self._epoch = view.epoch
        self._kept = {joiner: kept for joiner, kept in self._kept.items() if joiner in behind}
        return joined

    def put(self, joiners: Iterable[JoinerLife], step: int, snapshot: SnapshotT) -> None:
        for joiner in joiners:
            self._kept.setdefault(joiner, {})[step] = snapshot

    def get(self, joiner: JoinerLife, step: int) -> SnapshotT | None:
        return self._kept.get(joiner, {}).get(step)

    def done(self, joiner: JoinerLife) -> None:
        """Note that a joiner has everything."""
        self._kept.pop(joiner, None)

    def only(self, members: Collection[int]) -> None:
        """Keep only snapshots for `members`, since the others have left."""
        self._kept = {joiner: kept for joiner, kept in self._kept.items() if joiner[0] in members}
