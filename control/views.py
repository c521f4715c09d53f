"""A view says who takes part in a job. The coordinator decides it; views are totally ordered by their epoch."""

from __future__ import annotations

import itertools
from typing import Annotated

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.limits import RANKS


class Address(msgspec.Struct, frozen=True):
    """The place at which one rank can be reached: its listening port, and its shared-memory segment for ranks of the
    same host."""

    host: t.Name
    port: Annotated[int, Meta(ge=0, le=65535)]
    boot: t.Name  # the kernel's boot id: equal on both sides means the same running kernel
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    segment: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # file descriptor of the segment in process `pid`
    nonce: t.Hex  # proves that an opened segment is the right one
    layout: t.Name = ""  # the layout of the segment, equal in all members of a group
    rack: t.Name = ""  # FTCOMM_RACK: a label for the place of the host
    tuning: t.Name = ""  # the digest and the source of the switch points, equal as well
    arithmetic: t.Name = ""  # equal on both sides means the same bits for the same inputs; "" is equal to nothing
    network: t.Name = ""  # the network namespace, in which a port is one port; "" is equal to nothing
    pids: t.Name = ""  # the process namespace, in which a pid is one process; "" is equal to nothing

    @property
    def ports(self) -> str:
        """Names the ports that a process sees: equal in one network namespace of a kernel. "" is equal to nothing."""
        return f"{self.boot} {self.network}" if self.network else ""

    @property
    def processes(self) -> str:
        """Names the processes that a process sees: equal where they have the same pids. "" is equal to nothing."""
        return f"{self.boot} {self.pids}" if self.pids else ""


Addresses = Annotated[tuple[Address, ...], Meta(max_length=RANKS)]  # of the ranks of a replica, in order


class Member(msgspec.Struct, frozen=True):
    """A replica in a view. `incarnation` tells a restarted replica from its dead predecessor."""

    replica: t.Replica
    incarnation: t.Name
    ranks: Addresses
    contributing: bool


class View(msgspec.Struct, frozen=True):
    """The members of a job, from the epoch on. With `proposal` 0 the view is in force at once: it is the first one, or
    follows a loss. Otherwise the members have agreed on it under that number, and it is in force from the boundary of
    `step` on. A member that has not run yet starts with `step`."""

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
