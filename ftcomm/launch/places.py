"""Keeps what each replica does in the job, and since when; a change is told to the other hosts."""

from __future__ import annotations

import time
from typing import NamedTuple

from ftcomm.launch.job_state import JobState
from ftcomm.launch.policy import State
from ftcomm.launch.replica_processes import ReplicaProcesses
from ftcomm.launch.several_hosts.messages import ReplicaIs
from ftcomm.launch.several_hosts.other_hosts import OtherHosts


class PlaceInJob(NamedTuple):
    """Says what a replica does in the job: its process, and whether it is a member."""

    state: State
    member: bool  # whether it is in the newest view
    contributes: bool
    joining: str  # before it is a member: "prepares" while its script does, then "joins"


class Places:
    """The places of all replicas. On one event loop."""

    def __init__(self, job: JobState, hosts: OtherHosts) -> None:
        self._job, self._hosts = job, hosts
        self._known: dict[int, tuple[PlaceInJob, float]] = {}  # replica -> its place, and since when (time.time())

    def of(self, replica: ReplicaProcesses) -> PlaceInJob:
        """Returns what a replica does in the job."""
        member = replica.joined and self._job.is_member(replica)  # the newest view may still have its last life
        contributes = replica.contributed and replica.number in self._job.contributing()
        return PlaceInJob(replica.state, member, contributes, replica.joining)

    def since(self, replica: ReplicaProcesses) -> float:
        """Returns the time.time() since when a replica has its place."""
        self.note()
        return self._known[replica.number][1]

    def note(self) -> None:
        """Note what has changed, and tell it."""
        for replica in self._job.replicas:
            place = self.of(replica)
            before = self._known.get(replica.number)
            if before is None or before[0] != place:
                self._known[replica.number] = place, time.time()
            changed = before is None or before[0].state is not place.state
            if changed and (replica.here or self._hosts.is_first):
                self._hosts.tell(ReplicaIs(replica.number, place.state, replica.starts))
