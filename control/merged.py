"""Merges what the ranks of one host say alike into one message for their leader. Pure.

A message is held until all ranks of the host have said it, or until somebody calls `flush`, which is a moment later. It
overtakes nothing of the same rank, and is overtaken by a sign of life that is news (`HostAgent`). What the leader makes
of the merged one is what it would make of each of them: it takes the newest step, and the report of the slowest rank.
"""

from __future__ import annotations

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.replica_reports import RESUMED, took

Merge = tuple[tuple[int, ...], m.Message]  # by which ranks it is said, and what


class Merged:
    """Keeps what the `ranks` ranks of one host have said and their leader has not been told. Not thread-safe."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._held: list[tuple[set[int], m.Message]] = []
        self._last: dict[int, int] = {}  # by rank: its newest message among these

    def __bool__(self) -> bool:
        """Whether something is held."""
        return bool(self._held)

    def say(self, shard: int, message: m.Message) -> list[Merge]:
        """Note what a rank says. Returns what the leader is to be told now, in order."""
        if not _is_alike(message):
            return [*self.flush(), ((shard,), message)]
        for at in range(self._last.get(shard, -1) + 1, len(self._held)):
            said, held = self._held[at]
            both = merge(held, message)
            if both is not None:
                said.add(shard)
                self._held[at] = said, both
                self._last[shard] = at
                return self.flush() if len(said) == self._ranks else []
        self._last[shard] = len(self._held)
        self._held.append(({shard}, message))
        return self.flush() if self._ranks == 1 else []

    def flush(self) -> list[Merge]:
        """Returns all that is held, in order, and holds it no more."""
        held, self._held = self._held, []
        self._last.clear()
        return [(tuple(sorted(said)), message) for said, message in held]


def _is_alike(message: m.Message) -> bool:
    """Whether other ranks of the host are about to say the same."""
    if isinstance(message, m.Promise | m.Finished):
        return message.ok
    if isinstance(message, m.Report):
        return message.kind == RESUMED
    return isinstance(message, m.Installed | m.AtBoundary | m.Ready | m.CaughtUp)


def merge(one: m.Message, other: m.Message) -> m.Message | None:
    """Returns the message that says both; None if there is none."""
    if isinstance(one, m.Promise) and isinstance(other, m.Promise):
        alike = one.proposal == other.proposal
        return msgspec.structs.replace(one, step=max(one.step, other.step)) if alike else None
    if isinstance(one, m.Installed) and isinstance(other, m.Installed) and one.epoch == other.epoch:
        reports = [said.report for said in (one, other) if said.report is not None]
        both = max(reports, key=took) if len(reports) == 2 else None
        return m.Installed(one.epoch, both) if both is not None or not reports else None
    if isinstance(one, m.Report) and isinstance(other, m.Report):
        return max(one, other, key=took) if one.fields.get("epoch") == other.fields.get("epoch") else None
    return one if one == other else None
