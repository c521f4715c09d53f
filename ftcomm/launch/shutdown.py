"""Ends a job: by a drain, when it is lost, by force, or since all of its replicas have ended."""

from __future__ import annotations

import asyncio
import signal

from ftcomm.launch import policy
from ftcomm.launch.coordinator.embedded import EmbeddedCoordinator
from ftcomm.launch.event_text import replicas
from ftcomm.launch.job_state import JobState
from ftcomm.launch.places import Places
from ftcomm.launch.policy import State
from ftcomm.launch.removed_replicas import RemovedReplicas, Timers
from ftcomm.launch.replica_processes import ReplicaProcesses
from ftcomm.launch.report import Reporter
from ftcomm.launch.several_hosts.messages import JobIsLost
from ftcomm.launch.several_hosts.other_hosts import OtherHosts

SAME = 2.0  # s in which a second signal is the same one: timeout(1) and some batch systems signal a child and its group


class Shutdown:
    """Sets `over` when the job has ended. On one event loop; only `finish` waits."""

    def __init__(
        self,
        job: JobState,
        hosts: OtherHosts,
        places: Places,
        removed: RemovedReplicas,
        timers: Timers,
        report: Reporter,
    ) -> None:
        self._job, self._hosts, self._places = job, hosts, places
        self._removed, self._timers, self._report = removed, timers, report
        self.over = asyncio.Event()

    def interrupt(self, coordinator: EmbeddedCoordinator | None) -> None:
        """Act as a signal does: drain the job first, then end it with SIGTERM, then with SIGKILL."""
        job = self._job
        if job.lost:
            self._kill_all()
        elif not job.draining:
            self.drain(coordinator)
        elif not job.killed:
            job.killed = True
            self._report.log("interrupted again: all replicas are ended now")
            self._end_all()
        else:
            self._kill_all()

    def drain(self, coordinator: EmbeddedCoordinator | None) -> None:
        """Let all replicas leave at one common step; what is not gone after the grace is ended by force."""
        job = self._job
        if job.draining or self.over.is_set():
            return
        job.draining = True
        self._hosts.interrupt()
        self._report.log(
            f"draining: the replicas leave together at a coming step, within {job.options.grace:g} s at most "
            f"(interrupt again, after {SAME:g} s, to end them now)"
        )
        for replica in job.replicas:
            if replica.state is State.WAITING:
                replica.cancel_start(State.STOPPED)
            elif replica.removed:
                self._removed.end(replica, replica.starts)
            elif not replica.joined:
                # It is starting, or does not use ftcomm: there is no step for it to leave at.
                replica.asked_to_end = True
                replica.signal(signal.SIGTERM)
            elif coordinator is None:  # each leaves by itself, and those of other hosts stay
                replica.signal(signal.SIGTERM)
        if job.replicas:
            if coordinator is not None:
                coordinator.drain()
            self._timers.later(job.options.grace, self._grace_is_over)
            self.check()

    def lose(self, reason: str, grace: float = 0.0) -> None:
        """End all replicas, after `grace` seconds in which those that hear of it may end by themselves."""
        if self._job.lost:
            return
        self._job.lost = True
        self._report.log(f"the job failed: {reason}")
        self._hosts.tell(JobIsLost(reason))
        for replica in self._job.those_in(State.WAITING):
            replica.cancel_start(State.FAILED)
        if grace:
            self._timers.later(grace, self._end_all)
        else:
            self._end_all()

    def check_begin(self) -> None:
        """End a job whose first view will never come, since that has all replicas."""
        job = self._job
        missing = [replica.number for replica in job.those_in(State.FAILED)]
        if missing and job.is_awaited and not (job.has_views or job.draining):
            self.lose(f"it cannot begin without {replicas(missing)}")

    def check(self) -> None:
        """End replicas that cannot rejoin any more, and the job if it is over. Called at each change of a state."""
        job = self._job
        job.miss_hosts(self._hosts.is_missing)
        self._places.note()
        if job.those_in(State.FINISHED, State.LEFT) and not job.draining:
            self._end_the_late()
        awaited = [replica for replica in job.replicas if replica.here or not self._ends_alone]
        if all(replica.state.over for replica in awaited):
            self.over.set()

    async def finish(self) -> None:
        """Kill what is left. In the normal case nothing is. A replica that ends now is no loss to the job."""
        self.over.set()
        self._timers.close()
        for replica in self._job.replicas:
            if not replica.state.over:
                replica.cancel_start(State.STOPPED)
        self._kill_all()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + policy.TERM_TO_KILL
        while any(replica.pids() for replica in self._job.replicas) and loop.time() < deadline:
            await asyncio.sleep(0.005)  # their deaths come as events of the loop

    def tell_who_finished(self) -> None:
        """Say who has completed the training, if others have not."""
        job = self._job
        finished, failed, missed = (
            [replica.number for replica in job.those_in(state)]
            for state in (State.FINISHED, State.FAILED, State.STOPPED)
        )
        if finished and (failed or missed) and not (job.is_ending or job.killed):
            said = [f"{replicas(failed)} failed"] if failed else []
            said += [f"{replicas(missed)} {'was' if len(missed) == 1 else 'were'} not back in time"] if missed else []
            self._report.log(f"the training is complete on {replicas(finished)}; {'; '.join(said)}")

    @property
    def _ends_alone(self) -> bool:
        """Whether this launcher ends with its own replicas: it was told to, or does not hear of the others."""
        left = not self._hosts.is_first and (self._job.draining or not self._hosts.reached)
        return self._job.killed or self._job.lost or left

    def _end_the_late(self) -> None:
        """End those that were not back in the job when others had finished or left, if they cannot come any more."""
        job = self._job
        complete, running = bool(job.those_in(State.FINISHED)), job.those_in(State.RUNNING)
        for replica in [] if running else job.those_in(State.WAITING):
            missed = complete and not job.has_failed(replica)
            replica.cancel_start(State.STOPPED if missed else State.FAILED)
            self._report.log(f"replica {replica.number} is not restarted: the others have ended")
        # Of those that run, somebody must be in the job for the rest to catch up from.
        if running and job.has_views and not any(r.joined and not r.removed for r in running):
            for replica in running:
                self._end_outsider(replica)

    def _end_outsider(self, replica: ReplicaProcesses) -> None:
        if replica.here and not replica.asked_to_end:
            replica.asked_to_end = True
            self._report.log(f"replica {replica.number} is ended: the others finished before it could rejoin")
            replica.signal(signal.SIGTERM)
            self._timers.later(policy.TERM_TO_KILL, replica.kill)

    def _grace_is_over(self) -> None:
        running = self._job.those_in(State.RUNNING)
        late = [replica.number for replica in running if replica.here or self._hosts.is_first]  # that were asked to
        if late and not self._job.killed:
            self._job.unclean = True
            self._report.log(
                f"{replicas(late)} did not leave within {self._job.options.grace:g} s and "
                f"{'is' if len(late) == 1 else 'are'} ended now"
            )
            self._end_all()

    def _end_all(self) -> None:
        """SIGTERM, then SIGKILL. One that gives up ends by itself, with the code and the last words of its script."""
        for replica in self._job.replicas:
            if not replica.gives_up:
                replica.signal(signal.SIGTERM)
        self._timers.later(policy.TERM_TO_KILL, self._kill_all)

    def _kill_all(self) -> None:
        for replica in self._job.replicas:
            replica.kill()
