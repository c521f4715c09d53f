"""Keeps the reasons of ranks that cannot start, and tells whom they concern. Pure.

    the other ranks of its replica   they live and die as one
    all other replicas               if trying again is of no use (`lasting`), and there is no view yet: the first one
                                     needs all replicas

It concerns the processes that ran when it was said. Who begins later was started again, maybe with other settings, so
no report is too old, and none is believed for too long.

A process may have the number of a replica by mistake, beside the one that has it by right. Its report concerns no rank
that has the same number in its replica, or that finds its leader elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from ftcomm.control import handshake
from ftcomm.control.dropped import printable
from ftcomm.control.field_types import MANY, Name, ReplicaNumber, Shard

# What a connection to the coordinator is for:
UNSTARTED = "unstarted"  # a process says why it cannot start
HOPELESS = "hopeless"  # a process that is in no view asks whether it waits in vain; the answer is `Removed`, or none

ASKERS = 8  # ranks of one replica, besides its leader, that ask in a heartbeat timeout at most


class NamedRank(msgspec.Struct, frozen=True):
    """A rank as its settings name it. `leader` is where it finds shard 0 of its replica; "" if it is alone, or does not
    know."""

    replica: ReplicaNumber
    shard: Shard
    leader: Name = ""

    @classmethod
    def of(cls, replica: int, shard: int, leader: tuple[str, int] | None) -> NamedRank:
        return cls(replica, shard, "" if leader is None else f"{leader[0]}:{leader[1]}")

    @classmethod
    def read(cls, fields: handshake.Fields) -> NamedRank:
        """Returns the rank that an opening names. Raises `BadFields`."""
        leader = handshake.text(fields, "leader") if "leader" in fields else ""
        return cls(handshake.number(fields, "replica"), handshake.number(fields, "shard"), leader)

    @property
    def fields(self) -> handshake.Fields:
        """Returns the fields that name the rank in an opening."""
        named: handshake.Fields = {"replica": self.replica, "shard": self.shard}
        return {**named, "leader": self.leader} if self.leader else named

    def needs(self, other: NamedRank) -> bool:
        """Whether the other one is another rank of the same replica. One that does not know its leader may be."""
        return self.replica == other.replica and self.shard != other.shard and other.leader in ("", self.leader)


class Unstarted(msgspec.Struct, frozen=True):
    """The report of a rank that it cannot start, made at `at` (s of the clock of this host's kernel)."""

    rank: NamedRank
    reason: Annotated[str, msgspec.Meta(max_length=handshake.LONGEST_FIELD)]
    lasting: bool
    at: float


Reports = Annotated[tuple[Unstarted, ...], MANY]


class UnstartedRanks:
    """The last report from each replica, of `replicas`. Not thread-safe."""

    def __init__(self, replicas: int, reports: Iterable[Unstarted] = ()) -> None:
        """`reports` were made to an earlier coordinator of the job."""
        self._replicas = replicas
        self._reports = {report.rank.replica: report for report in reports}

    @property
    def reports(self) -> tuple[Unstarted, ...]:
        return tuple(self._reports.values())

    def said(self, rank: NamedRank, reason: str, lasting: bool, now: float) -> Unstarted:
        report = Unstarted(rank, printable(reason, len(reason)), lasting, now)
        if rank.replica < self._replicas:  # replicas wait for no other one
            self._reports[rank.replica] = report
        return report

    def started(self, replica: int) -> bool:
        """Note that all ranks of a replica have started. True if one of them had said that it cannot."""
        return self._reports.pop(replica, None) is not None

    def why(self, asker: NamedRank, begun: float, forming: bool) -> str:
        """Returns why a process that has run since `begun`, and is in no view, can never be in one; empty if it can.
        `forming`: there is no view yet."""
        for report in self._reports.values():
            other = forming and report.lasting and report.rank.replica != asker.replica
            if begun <= report.at and (other or asker.needs(report.rank)):
                return report.reason
        return ""


def asking_times(shard: int, ranks: int, heartbeat: float) -> tuple[float, float]:
    """Returns after how many seconds a rank begins to ask whether it waits in vain, and how often it does.

    The leader asks at once, and once a heartbeat timeout. The others give it one to come, and then take turns, so that
    the ranks of a large replica are no load for the coordinator: they end as one, so it is enough that one of them
    hears."""
    if shard == 0:
        return 0.0, heartbeat
    turns = max(1.0, (ranks - 1) / ASKERS)
    return heartbeat * (1 + turns * (shard - 1) / (ranks - 1)), heartbeat * turns
