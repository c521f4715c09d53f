"""Keeps what a launcher knows of its job, and tells what follows from that. Pure."""

from __future__ import annotations

from collections.abc import Callable

from ftcomm.control.messages import Event
from ftcomm.launch.options import RunOptions
from ftcomm.launch.policy import State
from ftcomm.launch.replica_processes import ReplicaProcesses


class JobState:
    """One job, as one launcher knows it. For one event loop."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.replicas: list[ReplicaProcesses] = []  # of all hosts; none before the coordinator is there
        self.view: Event | None = None  # the newest; None if the script uses no ftcomm
        self.is_awaited = False  # a replica waits for the first view
        self.draining = False
        self.unclean = False  # a member died while draining
        self.lost = False
        self.killed = False  # all replicas are ended at once
        self.steps: dict[int, int] = {}  # replica -> the last step that it reported
        self.effective: dict[int, float] = {}  # replica -> the share of its time that was training, if it says so

    @property
    def has_views(self) -> bool:
        return self.view is not None

    @property
    def is_ending(self) -> bool:
        return self.draining or self.lost

    def contributing(self) -> frozenset[int]:
        """The contributing replicas of the newest view."""
        members = self.view["members"] if self.view is not None else ()
        return frozenset(member["replica"] for member in members if member["contributing"])

    def is_member(self, replica: ReplicaProcesses) -> bool:
        """Whether the newest view has a replica, or its last life."""
        return self.view is not None and any(m["replica"] == replica.number for m in self.view["members"])

    def those_in(self, *states: State) -> list[ReplicaProcesses]:
        return [replica for replica in self.replicas if replica.state in states]

    def ended_well(self, replica: ReplicaProcesses, *, away: bool) -> bool:
        """Whether a replica whose ranks are gone has finished or left; `away`: the coordinator is.

        Exit code 0 alone proves nothing about a replica that was in the job: os._exit(0) gives it, and an atexit of a
        library after an error. A replica that finishes or leaves says so, and waits until the coordinator has heard it;
        while that is away the code has to do.
        """
        if replica.death is not None or replica.removed:
            return False
        said = replica.said_finished or replica.trained or replica.left
        return said or not replica.joined or self.draining or away

    def is_complete(self) -> bool:
        """All that live and have held the state of the training have done all of it."""
        here = self.contributing()
        holders = [
            replica
            for replica in self.replicas
            if (replica.contributed and replica.state is State.FINISHED)
            or (replica.holds_state and (replica.said_finished or replica.number in here))
        ]
        return bool(holders) and all(replica.said_finished or replica.state is State.FINISHED for replica in holders)

    def has_trained(self) -> bool:
        """All that have held the state of the training say that they have done all of it, though the coordinator, who
        may have been away then, did not hear that."""
        holders = [replica for replica in self.those_in(State.RUNNING, State.FINISHED) if replica.contributed]
        done = [x.state is State.FINISHED or x.said_finished or x.trained for x in holders]
        return bool(done) and all(done)

    def has_failed(self, replica: ReplicaProcesses) -> bool:
        """Whether a replica that was not back when the others had finished has failed, and was not only late.

        A step loop tells when all of its steps are done, so those that did them have what the late one missed. A script
        without one does not tell: an error or a crash of its own may be the reason why there was no more to do. A
        signal from outside, such as SIGKILL, is none of its own.
        """
        complete = any(other.trained for other in self.replicas)
        return replica.failed_at_end or (replica.failed_by_itself and not complete)

    def miss_hosts(self, is_missing: Callable[[int], bool]) -> None:
        """Note that what runs on a host whose launcher is gone ended with it, once the coordinator has missed it,
        too. `is_missing(replica)`: the launcher of its host is gone."""
        for replica in self.those_in(State.RUNNING):
            gone = replica.said_finished or replica.left or not self.is_member(replica)
            if gone and is_missing(replica.number):
                self._went_with_its_host(replica)

    def host_is_new(self, node: int) -> None:
        """Note that what ran on a host has ended with the launcher that was there before."""
        for replica in self.those_in(State.RUNNING):
            if self.node_of(replica) == node:
                self._went_with_its_host(replica)

    def _went_with_its_host(self, replica: ReplicaProcesses) -> None:
        if replica.said_finished:
            replica.state = State.FINISHED
        elif replica.left:
            replica.state = State.LEFT
        else:
            replica.state = State.STOPPED if self.draining else State.WAITING

    def node_of(self, replica: ReplicaProcesses) -> int:
        """The rank of the host that starts a replica."""
        node = self.options.node
        return 0 if node is None else node.node_of(replica.number, self.options.replicas)
