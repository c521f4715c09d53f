"""Does what follows from what the launchers of other hosts say of their replicas, and tells them of ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ftcomm.control.messages import Event
from ftcomm.launch.coordinator_events import CoordinatorEvents
from ftcomm.launch.job_state import JobState
from ftcomm.launch.removed_replicas import RemovedReplicas
from ftcomm.launch.replica_processes import ReplicaProcesses
from ftcomm.launch.several_hosts.messages import CoordinatorSaid, Heard, ReplicaIs
from ftcomm.launch.shutdown import Shutdown


class ReplicasElsewhere:
    """The listener to the other hosts, see `HostsListener`. `judge(replica)` decides what its end means, on host 0
    `exited(replica, code)` tells the coordinator that a rank has exited by an error."""

    def __init__(
        self,
        job: JobState,
        removed: RemovedReplicas,
        shutdown: Shutdown,
        coordinator: CoordinatorEvents,
        judge: Callable[[ReplicaProcesses], None],
        exited: Callable[[int, int], None],
        stands: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._job, self._removed, self._shutdown, self._coordinator = job, removed, shutdown, coordinator
        self._judge, self.failed, self.stands, self.log = judge, exited, stands, log

    def event(self, event: Event) -> None:
        self._coordinator.hear({**event, "mono": time.monotonic()})

    def replica(self, message: ReplicaIs) -> None:
        self._job.replicas[message.replica].is_told(message)
        self._shutdown.check()

    def heard(self, message: Heard) -> None:
        replica = self._job.replicas[message.replica]
        replica.note(message)
        if message.removed and message.starts == replica.starts and not replica.removed:
            self._removed.remove(replica, message.removed)
        self._shutdown.check()

    def judge(self, replica: int, starts: int) -> None:
        ended = self._job.replicas[replica]
        if ended.starts == starts:
            self._judge(ended)

    def anew(self, node: int) -> None:
        self._job.host_is_new(node)
        self._shutdown.check()

    def lost(self, reason: str) -> None:
        self._shutdown.lose(reason)

    def changed(self) -> None:
        if self._job.replicas:
            self._shutdown.check()

    def known(self, replica: int, question: int) -> Heard:
        return self._job.replicas[replica].heard(question)

    def states(self) -> Iterator[ReplicaIs | CoordinatorSaid]:
        for replica in self._job.replicas:
            yield ReplicaIs(replica.number, replica.state, replica.starts)
        if self._job.view is not None:
            yield CoordinatorSaid(self._job.view)
