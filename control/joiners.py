"""Replicas that the coordinator knows and that are in no view. Pure.

unregistered  no member has passed a step boundary yet, so the joiner was not told that there is a training to join
preparing     the script builds models, reads data, compiles: no member waits for it
waiting       the joiner is ready, and comes in with the next change at a step boundary; or there is no view yet
"""

from __future__ import annotations

from collections.abc import Iterator

from ftcomm.control.views import Member, View


class Joiners:
    """All joiners, each in either `waiting` or `preparing`. Not thread-safe."""

    def __init__(self) -> None:
        self.waiting: dict[int, Member] = {}
        self.preparing: dict[int, Member] = {}
        self._unregistered: set[int] = set()  # those of `preparing` that have not been told of the job

    def __iter__(self) -> Iterator[Member]:
        return iter([*self.waiting.values(), *self.preparing.values()])

    def __len__(self) -> int:
        return len(self.waiting) + len(self.preparing)

    def has(self, replica: int, incarnation: str) -> bool:
        member = self.waiting.get(replica) or self.preparing.get(replica)
        return member is not None and member.incarnation == incarnation

    def add(self, member: Member, *, ready: bool) -> None:
        """Add a joiner, in the place of an earlier life if there was one."""
        self.drop(member.replica)
        if ready:
            self.waiting[member.replica] = member
        else:
            self.preparing[member.replica] = member
            self._unregistered.add(member.replica)

    def ready(self, replica: int) -> bool:
        """Note that a joiner has prepared; False if that was known."""
        member = self.preparing.pop(replica, None)
        if member is None:
            return False
        self._unregistered.discard(replica)
        self.waiting[replica] = member
        return True

    def go_on(self, replica: int) -> None:
        """Note that a joiner was ready for what the job has behind it, and prepares for what follows."""
        self.preparing[replica] = self.waiting.pop(replica)

    def drop(self, replica: int) -> None:
        self.waiting.pop(replica, None)
        self.preparing.pop(replica, None)
        self._unregistered.discard(replica)

    def register(self, newest: View) -> list[tuple[int, View]]:
        """Returns each joiner that was not told yet, once, with the newest view as it would be with this replica."""
        told = []
        for replica in sorted(self._unregistered):
            others = (member for member in newest.members if member.replica != replica)
            members = sorted((*others, self.preparing[replica]), key=lambda member: member.replica)
            why = f"as if replica {replica} had joined already"
            told.append((replica, View(newest.epoch, None, tuple(members), why)))
        self._unregistered.clear()
        return told

    def clear(self) -> list[int]:
        """Forget all joiners; returns their replicas."""
        gone = [*self.waiting, *self.preparing]
        self.waiting.clear()
        self.preparing.clear()
        self._unregistered.clear()
        return gone
