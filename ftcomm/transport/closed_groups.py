"""Closed groups that others may still call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from ftcomm.transport.group_connection import ASK, ENTERED, GroupConnection

LastMessageT = TypeVar("LastMessageT")

MAX_REMEMBERED = 1 << 16  # segments of closed groups


class ClosedGroups(Generic[LastMessageT]):
    """The groups that this member has closed: every caller of one, earlier or later, hears what it said last there. A
    caller may not know this member's segment yet, and be late: then its own tells that it does not mean the next group
    of that name. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._by_segment: dict[str, LastMessageT] = {}  # by nonce
        self._unmet: dict[str, tuple[int, LastMessageT]] = {}  # by name, see `add`

    def add(self, name: str, segments: Iterable[str], answer: LastMessageT, before: int) -> None:
        """Remember a group that had the segments with these nonces, of this member and of others.

        A joiner that met no other member knows no segment of them. But they made that group before the step boundary
        `before`, which was to come when the joiner closed it, and the next one of the name after it. 0: others were
        met.
        """
        if before:
            self._unmet[name] = before, answer
        for nonce in segments:
            self._by_segment[nonce] = answer
            if len(self._by_segment) > MAX_REMEMBERED:
                del self._by_segment[next(iter(self._by_segment))]

    def since(self, name: str) -> int:
        """Returns the step boundary before which the others made the last group of that name that was closed unmet; 0
        if there is none."""
        return self._unmet[name][0] if name in self._unmet else 0

    def answer(self, call: GroupConnection) -> LastMessageT | None:
        """Returns the answer of the closed group that a call is for; None if there is none."""
        if call.what not in (ASK, ENTERED):
            return None
        for nonce in (call.there, call.nonce):
            if nonce in self._by_segment:
                return self._by_segment[nonce]
        if call.there or call.made >= self.since(call.group):
            return None
        return self._unmet[call.group][1]
