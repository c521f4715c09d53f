"""Decides what the end of a replica means, and starts it again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

from ftcomm.errors import FtcommError, InitError
from ftcomm.launch.event_text import replicas
from ftcomm.launch.job_state import JobState
from ftcomm.launch.places import Places
from ftcomm.launch.policy import GiveUp, Restart, Restarts, State, after_death, how_it_ended
from ftcomm.launch.replica_processes import ReplicaProcesses
from ftcomm.launch.report import Reporter
from ftcomm.launch.several_hosts.other_hosts import OtherHosts
from ftcomm.launch.shutdown import Shutdown

CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}  # that a process causes itself


class Supervisor:
    """The supervisor of the replicas that this launcher starts. On one event loop; nothing blocks."""

    def __init__(self, job: JobState, hosts: OtherHosts, places: Places, shutdown: Shutdown, report: Reporter) -> None:
        self._job, self._hosts, self._places, self._shutdown, self._report = job, hosts, places, shutdown, report

    def restart(self, number: int) -> None:
        """Restart one, as `Launcher.restart_replica` says."""
        job, replica = self._job, self._restartable(number)
        others = [r for r in job.contributing() - {number} if job.replicas[r].holds_state]  # a view comes late
        if not others:
            raise FtcommError(
                f"no other replica contributes now, so the state of the training would be lost with replica {number}; "
                "wait until another has caught up (ftcomm status)"
            )
        if replica.state is State.RUNNING:
            replica.restart_wanted = True
            self._report.log(f"replica {number} is asked to leave at a coming step, and started again then")
            self._report.emit("restart_asked", replica=number)
            replica.signal(signal.SIGTERM)
            self._later(replica, job.options.grace, self._did_not_leave, replica.starts)
        else:
            replica.restarts = Restarts()
            self._report.log(f"replica {number} is started again")
            self._start_again(replica)

    def resize(self, count: int) -> None:
        """Change how many replicas train, as `Launcher.resize` says."""
        job = self._job
        self._check_resize(count)
        for replica in job.replicas[count:]:
            if replica.state is State.RUNNING and not replica.unwanted:
                replica.unwanted, replica.restart_wanted = True, False
                self._report.log(f"replica {replica.number} is asked to leave at a coming step, and stays away then")
                self._report.emit("leave_asked", replica=replica.number)
                replica.signal(signal.SIGTERM)
                self._later(replica, job.options.grace, self._did_not_leave, replica.starts)
            elif replica.state is State.WAITING:
                replica.cancel_start(State.LEFT)
                self._report.log(f"replica {replica.number} is not started again")
        for replica in job.replicas[:count]:
            if replica.unwanted and replica.state is State.RUNNING:
                replica.unwanted, replica.restart_wanted = False, True  # it is on its way out
            elif replica.state in (State.LEFT, State.FAILED):
                replica.restarts = Restarts()
                self._report.log(f"replica {replica.number} is started again")
                self._start_again(replica)
        self._shutdown.check()

    def _check_resize(self, count: int) -> None:
        """Raise `FtcommError` if the job cannot have `count` replicas."""
        job = self._job
        most, least = len(job.replicas), job.options.min_replicas
        if not least <= count <= most:
            raise FtcommError(
                f"{count} replicas: this job can have {least} (--min-replicas) to {most} (--replicas). For more, drain "
                "it, and start it again from its checkpoint with a higher --replicas"
            )
        if job.is_ending:
            raise FtcommError("the job is ending, so its replicas do not change any more")
        if finished := [replica.number for replica in job.those_in(State.FINISHED)]:
            raise FtcommError(f"{replicas(finished)} finished the training already")
        stays = job.replicas[:count]
        if not any(replica.holds_state and replica.number in job.contributing() for replica in stays):
            raise FtcommError(
                f"none of the replicas 0 to {count - 1} contributes now, so the state of the training would be lost; "
                "wait until one has caught up (ftcomm status)"
            )
        changes = [r for r in stays if r.state in (State.LEFT, State.FAILED)]
        changes += [r for r in job.replicas[count:] if not r.state.over]
        if elsewhere := [replica.number for replica in changes if not replica.here]:
            raise FtcommError(f"{replicas(elsewhere)}: started by another host; resize cannot change them")

    def ended(self, replica: ReplicaProcesses, *, away: bool) -> None:
        """Decide what the end of a replica means, with all that the coordinator had heard of it. `away`: the
        coordinator cannot be told anything now."""
        job = self._job
        if replica.restart_wanted and (replica.left or replica.death) and job.contributing() and not job.is_ending:
            how = "left" if replica.death is None else f"did not leave: it {how_it_ended(replica.death.code)}"
            self._report.log(f"replica {replica.number} {how}; starting it again")
            replica.cancel_start(State.WAITING)
            self._start_again(replica)
        elif job.ended_well(replica, away=away):
            replica.state = State.STOPPED if job.draining else State.LEFT if replica.left else State.FINISHED
            self._report.log(f"replica {replica.number} {'finished' if replica.state is State.FINISHED else 'left'}")
        else:
            self._died(replica)
        self._shutdown.check()

    def _restartable(self, number: int) -> ReplicaProcesses:
        """Raises `FtcommError` if a restart cannot be asked for."""
        known = self._job.replicas
        if not 0 <= number < len(known):
            raise FtcommError(f"there is no replica {number}; this job has 0 to {len(known) - 1}")
        if self._job.is_ending:
            raise FtcommError("the job is ending, so no replica is started any more")
        replica = known[number]
        if not replica.here:
            raise FtcommError(f"replica {number} is started by another host; ask the launcher there")
        if replica.state is State.WAITING or replica.restart_wanted:
            raise FtcommError(f"replica {number} is being restarted already")
        if replica.state is State.FINISHED:
            raise FtcommError(f"replica {number} has finished its training")
        return replica

    def _did_not_leave(self, replica: ReplicaProcesses, starts: int) -> None:
        runs = replica.state is State.RUNNING and replica.starts == starts
        if runs and (replica.restart_wanted or replica.unwanted):
            grace = self._job.options.grace
            self._report.log(f"replica {replica.number} did not leave within {grace:g} s and is killed")
            replica.kill()

    def _died(self, replica: ReplicaProcesses) -> None:
        job, death, who, code = self._job, replica.death, f"replica {replica.number}", 0
        unannounced = death is None and not replica.removed  # that it finished or left
        if death is not None:
            rank = f"shard {death.rank}, " if job.options.ranks_per_replica > 1 else ""
            who, code = f"{who} ({rank}pid {death.pid})", death.code
        how = f"{how_it_ended(code)} before it had said that it finished or left" if unannounced else how_it_ended(code)
        if code < 0 and replica.gives_up:  # by us, as it took too long
            how += " after its script had ended with an error"
        what = f"{who} {how}"
        replica.reason = how + (f" ({replica.removed})" if replica.removed else "")
        replica.failed_at_end |= replica.trained
        failed = unannounced or code > 0 or -code in CRASHES
        replica.failed_by_itself |= replica.contributed and failed and not replica.removed
        if job.is_ending or job.killed:
            job.unclean |= not replica.asked_to_end
            replica.state = State.STOPPED
            self._report.log(what)
            return
        if replica.unwanted:
            replica.state = State.LEFT
            self._report.log(f"{what}; it is not started again")
            return
        lost = not replica.contributed or replica.number not in job.contributing()
        if lost and job.is_complete():
            replica.state = State.FAILED if job.has_failed(replica) else State.STOPPED
            self._report.log(f"{what}; it was not back in the job when the others finished")
            return
        self._decide(replica, code, what)

    def _decide(self, replica: ReplicaProcesses, code: int, what: str) -> None:
        """Decide what is done about a replica that died while the others train on; `what` says what it did."""
        job, options, now = self._job, self._job.options, asyncio.get_running_loop().time()
        decision = after_death(
            {other.number: other.state for other in job.replicas if other is not replica},
            code,
            replica.said_finished,
            replica.restarts.after(now, time.monotonic() - replica.started),
            now,
            began=job.has_views,
            max_restarts=options.max_restarts,
            min_replicas=options.min_replicas,
            backoff=options.backoff,
            backoff_limit=options.backoff_limit,
        )
        if isinstance(decision, Restart):
            replica.state = State.WAITING
            replica.restarts = decision.restarts
            self._later(replica, decision.delay, self._start_again)
            which = f"restart {decision.count} of {options.max_restarts}"
            self._report.log(f"{what}; restarting it in {decision.delay:g} s ({which})")
            self._report.emit("restarting", replica=replica.number, delay=decision.delay, restart=decision.count)
        elif isinstance(decision, GiveUp):
            replica.state = State.FAILED
            self._report.log(f"{what}; {decision.reason}")
            self._report.emit("failed", replica=replica.number, reason=decision.reason)
            self._shutdown.check_begin()
        else:
            replica.state = State.FAILED
            self._report.log(what)
            self._report.emit("failed", reason=decision.reason)
            self._shutdown.lose(decision.reason)

    def _start_again(self, replica: ReplicaProcesses) -> None:
        """Start a replica again. What the system refuses now, it may grant later: try again with a back-off."""
        options = self._job.options
        if replica.pids():  # of an attempt that has failed
            self._later(replica, options.backoff, self._start_again)
            return
        if not self._hosts.reached:  # nor is the coordinator
            if self._hosts.is_given_up and not any(r.here for r in self._job.those_in(State.RUNNING)):
                self._shutdown.lose(self._hosts.given_up)
                self._shutdown.check()
            else:
                self._later(replica, options.backoff, self._start_again)
            return
        try:
            replica.start()
            self._places.note()
        except (InitError, OSError) as error:
            replica.kill()
            delay = replica.restarts.delay(options.backoff, options.backoff_limit)
            replica.restarts = replica.restarts.refused()
            replica.state = State.WAITING
            self._later(replica, delay, self._start_again)
            self._report.log(f"replica {replica.number} is started again in {delay:g} s: {error}")
            count = len(replica.restarts.times)
            self._report.emit("restarting", replica=replica.number, delay=delay, restart=count, reason=str(error))
            self._shutdown.check()
        except Exception as error:
            replica.kill()
            replica.state = State.FAILED
            self._report.log(f"replica {replica.number} is given up: {error}")
            self._report.emit("failed", replica=replica.number, reason=str(error))
            self._shutdown.check()

    def _later(self, replica: ReplicaProcesses, delay: float, call: Callable[..., None], *args: Any) -> None:
        replica.timer = asyncio.get_running_loop().call_later(delay, call, replica, *args)
