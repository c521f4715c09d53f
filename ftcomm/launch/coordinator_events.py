"""Does what follows from what the coordinator says: of replicas, of views, and of the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftcomm.control.messages import Event
from ftcomm.launch.job_state import JobState
from ftcomm.launch.places import Places
from ftcomm.launch.removed_replicas import RemovedReplicas
from ftcomm.launch.replica_processes import ReplicaProcesses
from ftcomm.launch.several_hosts.other_hosts import OtherHosts
from ftcomm.launch.shutdown import Shutdown


class CoordinatorEvents:
    """The listener to the coordinator. `tell(event)` lets people know. On one event loop; nothing blocks."""

    def __init__(
        self,
        job: JobState,
        hosts: OtherHosts,
        places: Places,
        removed: RemovedReplicas,
        shutdown: Shutdown,
        tell: Callable[[Event], None],
    ) -> None:
        self._job, self._hosts, self._places = job, hosts, places
        self._removed, self._shutdown, self._tell = removed, shutdown, tell

    def hear(self, event: Event) -> None:
        """Act on an event of the coordinator, and tell it."""
        kind, job = event["kind"], self._job
        self._hosts.tell_event(event)
        if kind == "joined" and not job.is_awaited:
            job.is_awaited = True
            self._shutdown.check_begin()
        if kind == "view":
            self._view(event)
        for replica in job.replicas:
            if replica.number == event.get("replica"):
                self._of_replica(replica, kind, str(event.get("reason", "")))
        if isinstance(step := event.get("step"), int) and isinstance(number := event.get("replica"), int):
            job.steps[number] = step
            if kind == "metrics":
                job.effective[number] = event["effective"]
        if kind not in ("report", "metrics"):
            self._places.note()
            if job.options.node is not None and job.replicas:
                self._shutdown.check()
        self._tell(event)
        if kind in ("failed", "ended") and not (job.draining or self._shutdown.over.is_set() or job.has_trained()):
            self._shutdown.lose(str(event.get("reason", "the coordinator gave it up")))
        if event.get("hopeless") and not (job.has_views or job.draining):
            asked = 2 * job.options.timeouts.heartbeat  # by then all ranks that have started have asked
            self._shutdown.lose("it cannot begin, and a restart would not help", grace=asked)

    def _view(self, event: Event) -> None:
        self._job.view = event
        contributing: dict[int, Any] = {member["replica"]: member["contributing"] for member in event["members"]}
        for replica in self._job.replicas:
            # A view of a loss has no step; of who finished we hear before.
            gone = replica.joined and replica.number not in contributing and not replica.said_finished
            replica.left |= gone and event["step"] is not None
            if replica.number in event.get("lost", ()) and replica.came and replica.here:
                self._removed.lose(replica, event["why"])
            if replica.number in contributing:
                replica.joined, replica.joining = True, ""
            if contributing.get(replica.number):
                replica.contributed, replica.reason = True, ""
                replica.failed_at_end = replica.failed_by_itself = False

    def _of_replica(self, replica: ReplicaProcesses, kind: str, reason: str) -> None:
        if kind == "finished":
            replica.said_finished = True
        elif kind in ("trains", "trained"):
            replica.trained = kind == "trained"
        elif kind == "gives_up":
            replica.gives_up = True
        elif kind == "dismissed":  # it has left in order, though it was in no view that it could have left
            replica.left = True
        elif kind == "removed" and replica.joined and not replica.removed:
            self._removed.remove(replica, reason)
        elif kind == "joined":
            replica.comes()
            replica.gives_up = False  # its process may have closed a group, and made another
            if self._job.has_views:
                replica.joining, replica.removed = "prepares", ""  # its process may have made a new group
        elif kind == "ready":
            replica.joining = "joins"
