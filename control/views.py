"""Views: who takes part in a job, decided by the coordinator, totally ordered by their epoch."""

from __future__ import annotations

import itertools
from typing import Annotated

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.limits import RANKS


class Address(msgspec.Struct, frozen=True):
    """Where one rank can be reached: its listening port, and its shared-memory segment for ranks of the same host."""

    host: t.Name
    port: Annotated[int, Meta(ge=0, le=65535)]
    boot: t.Name  # the kernel's boot id: equal on both sides means the same running kernel
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    segment: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # file descriptor of the segment in process `pid`
    nonce: t.Hex  # hex; proves that an opened segment is the right one
    layout: t.Name = ""  # of the segment, in words; members of a group have it alike
    rack: t.Name = ""  # a label of where the host stands, as FTCOMM_RACK says it
    tuning: t.Name = ""  # the digest of the switch points, and from where they are; alike as well
    arithmetic: t.Name = ""  # equal on both sides means the same bits for the same inputs; "" is equal to nothing
    network: t.Name = ""  # its namespace, so that a port of it is one port; "" is equal to nothing

    @property
    def ports(self) -> str:
        """Equal on both sides means the same ports: one kernel, one network namespace. "" is equal to nothing."""
        return f"{self.boot} {self.network}" if self.network else ""


Addresses = Annotated[tuple[Address, ...], Meta(max_length=RANKS)]  # of a replica's ranks, in order


class Member(msgspec.Struct, frozen=True):
    """A replica in a view. `incarnation` tells a restarted replica from its dead predecessor."""

    replica: t.Replica
    incarnation: t.Name
    ranks: Addresses
    contributing: bool


class View(msgspec.Struct, frozen=True):
    """`(epoch, members)`. With `proposal` 0 it is in force at once: the first view, or a loss. Else it was agreed on
    under that number and is in force from the boundary of `step` on. A member that has not run yet starts with `step`.
    """

    epoch: t.Epoch
    step: t.Step | None
    members: Annotated[tuple[Member, ...], t.MANY]  # ascending by replica
    why: t.Text = ""
    proposal: t.Proposal = 0

    def __post_init__(self) -> None:
        if any(one.replica >= next_.replica for one, next_ in itertools.pairwise(self.members)):
            raise ValueError(f"the members of a view are {self.replicas}, expected in ascending order")

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
