"""Replicas that the coordinator knows and that are in no view. Pure.

untold      nobody has passed a step boundary yet, so it was not told that there is a training to join
preparing   its script builds models, reads data, compiles: nobody is to wait for it
waiting     it is ready, and comes in with the next change at a step boundary; or the job has no view yet
"""

from __future__ import annotations

from collections.abc import Iterator

from ftcomm.control.views import Member, View


class Joiners:
    """Each is in one of `waiting` and `preparing`; not thread-safe."""

    def __init__(self) -> None:
        self.waiting: dict[int, Member] = {}
        self.preparing: dict[int, Member] = {}
        self._untold: set[int] = set()  # of those that prepare

    def __iter__(self) -> Iterator[Member]:
        return iter([*self.waiting.values(), *self.preparing.values()])

    def __len__(self) -> int:
        return len(self.waiting) + len(self.preparing)

    def has(self, replica: int, incarnation: str) -> bool:
        member = self.waiting.get(replica) or self.preparing.get(replica)
        return member is not None and member.incarnation == incarnation

    def add(self, member: Member, *, ready: bool) -> None:
        """In the place of an earlier life, if there was one."""
        self.drop(member.replica)
        if ready:
            self.waiting[member.replica] = member
        else:
            self.preparing[member.replica] = member
            self._untold.add(member.replica)

    def ready(self, replica: int) -> bool:
        """It has prepared; False if that is no news."""
        member = self.preparing.pop(replica, None)
        if member is None:
            return False
        self._untold.discard(replica)
        self.waiting[replica] = member
        return True

    def drop(self, replica: int) -> None:
        self.waiting.pop(replica, None)
        self.preparing.pop(replica, None)
        self._untold.discard(replica)

    def tell(self, newest: View) -> list[tuple[int, View]]:
        """Those that were not told yet, each with the newest view as it would be with this replica; once."""
        told = []
        for replica in sorted(self._untold):
            others = (member for member in newest.members if member.replica != replica)
            members = sorted((*others, self.preparing[replica]), key=lambda member: member.replica)
            why = f"as if replica {replica} had joined already"
            told.append((replica, View(newest.epoch, None, tuple(members), why)))
        self._untold.clear()
        return told

    def clear(self) -> list[int]:
        """All go; returns who that was."""
        gone = [*self.waiting, *self.preparing]
        self.waiting.clear()
        self.preparing.clear()
        self._untold.clear()
        return gone
