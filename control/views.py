"""Views: who takes part in a job, decided by the coordinator, totally ordered by their epoch."""

from __future__ import annotations

import msgspec


class Address(msgspec.Struct, frozen=True):
    """Where one rank can be reached: its listening port, and its shared-memory segment for ranks of the same host."""

    host: str
    port: int
    boot: str  # the kernel's boot id: equal on both sides means the same running kernel
    pid: int
    segment: int  # file descriptor of the segment in process `pid`
    nonce: str  # hex; proves that an opened segment is the right one


class Member(msgspec.Struct, frozen=True):
    """A replica in a view. `incarnation` tells a restarted replica from its dead predecessor."""

    replica: int
    incarnation: str
    ranks: tuple[Address, ...]
    contributing: bool


class View(msgspec.Struct, frozen=True):
    """`(epoch, members)`. With `proposal` 0 it is in force at once: the first view, or a loss. Else it was agreed on
    under that number and is in force from the boundary of `step` on. A member that has not run yet starts with `step`.
    """

    epoch: int
    step: int | None
    members: tuple[Member, ...]  # ascending by replica
    why: str = ""
    proposal: int = 0

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(m.replica for m in self.members)

    @property
    def contributing(self) -> frozenset[int]:
        return frozenset(m.replica for m in self.members if m.contributing)

    def member(self, replica: int) -> Member | None:
        return next((m for m in self.members if m.replica == replica), None)

    def has(self, replica: int, incarnation: str) -> bool:
        member = self.member(replica)
        return member is not None and member.incarnation == incarnation
