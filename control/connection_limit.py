"""A limit on the connections of a port that says which one has to go, so that strangers keep no member out.

It is pure: it is told of connections, and the caller ends those that it names. Who has proved to hold the token is
never named. Of the others the source with most of them gives way: by its oldest connection that has said nothing, else
by its newest, since the older ones may be at work.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable
from typing import Generic, TypeVar

from ftcomm.control.rate_limit import source_of

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Excess(Generic[ConnectionT]):
    """A connection that has to go."""

    key: ConnectionT
    source: str


class ConnectionLimit(Generic[ConnectionT]):
    """Holds at most `most` connections. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._proved: set[ConnectionT] = set()
        self._sources: dict[ConnectionT, str] = {}  # of connections that have proved nothing; the oldest first
        self._spoke: set[ConnectionT] = set()  # connections among these that have spoken

    def __len__(self) -> int:
        return len(self._proved) + len(self._sources)

    def come(self, key: ConnectionT, address: str) -> Excess[ConnectionT] | None:
        """Note a connection from `address`. If it is one too many, returns which one is forgotten here and has to be
        ended: this one, maybe."""
        self._sources[key] = source_of(address)
        if len(self) <= self.most:
            return None
        most = collections.Counter(self._sources.values()).most_common(1)[0][0]
        theirs = [key for key, source in self._sources.items() if source == most]
        excess = next((key for key in theirs if key not in self._spoke), theirs[-1])
        self.gone(excess)
        return Excess(excess, most)

    def spoke(self, key: ConnectionT) -> None:
        """Note that a connection has said something good, which proves nothing."""
        if key in self._sources:
            self._spoke.add(key)

    def proved(self, key: ConnectionT) -> None:
        """Note that a connection has proved to hold the token. It still takes a place, until it is `gone`."""
        if self._sources.pop(key, None) is not None:
            self._spoke.discard(key)
            self._proved.add(key)

    def gone(self, key: ConnectionT) -> None:
        """Note that a connection has ended, or is none of these any more. Idempotent."""
        self._sources.pop(key, None)
        self._spoke.discard(key)
        self._proved.discard(key)
