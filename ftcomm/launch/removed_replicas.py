"""Ends the processes of replicas without which the job goes on: their places are needed for their next lives."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from ftcomm.launch import policy
from ftcomm.launch.job_state import JobState
from ftcomm.launch.policy import State
from ftcomm.launch.replica_processes import ReplicaProcesses
from ftcomm.launch.report import Reporter


class Timers:
    """The timers of a job, on the event loop that runs. `close` cancels them."""

    def __init__(self) -> None:
        self._timers: set[asyncio.TimerHandle] = set()  # that have not run; those of a job of a year would be many

    def later(self, delay: float, call: Callable[..., Any], *args: Any) -> None:
        def run() -> None:
            self._timers.discard(timer)
            call(*args)

        timer = asyncio.get_running_loop().call_later(delay, run)
        self._timers.add(timer)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()


class RemovedReplicas:
    """Ends the replicas that were removed, and those that were lost though their process lives. On one event loop."""

    def __init__(self, job: JobState, timers: Timers, report: Reporter) -> None:
        self._job, self._timers, self._report = job, timers, report

    def remove(self, replica: ReplicaProcesses, reason: str) -> None:
        """Note that a replica was removed, and end it soon."""
        replica.removed = replica.reason = reason
        self._timers.later(policy.REMOVED_TO_TERM, self.end, replica, replica.starts)

    def lose(self, replica: ReplicaProcesses, why: str) -> None:
        """End a replica soon that was lost, if its process lives and has no other reason to."""
        grace = self._job.options.grace if replica.gives_up else policy.REMOVED_TO_TERM
        self._timers.later(grace, self._still_runs, replica, replica.starts, why)

    def end(self, replica: ReplicaProcesses, starts: int) -> None:
        """End a removed replica that hangs, is stopped, or has not heard of it: its place is needed for its next
        life."""
        if replica.starts != starts or replica.state is not State.RUNNING or not (replica.removed and replica.here):
            return
        if replica.asked_to_end:
            return  # by a drain
        replica.asked_to_end = True
        self._report.log(f"replica {replica.number} was removed ({replica.removed}) and still runs: it is ended now")
        self._report.emit("ending_removed", replica=replica.number, reason=replica.removed)
        replica.signal(signal.SIGTERM)
        self._timers.later(policy.TERM_TO_KILL, self._kill, replica, starts)

    def _kill(self, replica: ReplicaProcesses, starts: int) -> None:
        if replica.starts == starts and replica.removed:
            replica.kill()

    def _still_runs(self, replica: ReplicaProcesses, starts: int, why: str) -> None:
        """Take a replica for removed that was lost, maybe by a proof, and whose process lives all the same: its control
        thread has ended, say, or something has closed its port. What the process does by itself is left to it: it comes
        back as another member, or has done all of its work."""
        lives = replica.here and replica.starts == starts and replica.state is State.RUNNING and replica.death is None
        back = replica.joining or self._job.is_member(replica)
        done = replica.left or replica.said_finished or replica.trained
        if lives and not (back or done or replica.removed):
            replica.removed = replica.reason = why
            self.end(replica, starts)
