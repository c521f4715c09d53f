"""`ftcomm run`: keeps the replicas of a job running, with the coordinator in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ftcomm.control.server import CoordinatorServer
from ftcomm.errors import FtcommError, InitError
from ftcomm.launch.admin.handlers import answer
from ftcomm.launch.admin.protocol import SOCKET
from ftcomm.launch.admin.server import AdminServer
from ftcomm.launch.embedded_coordinator import EmbeddedCoordinator
from ftcomm.launch.event_text import describe, replicas
from ftcomm.launch.hosts import HUB, HostNetwork
from ftcomm.launch.options import RunOptions
from ftcomm.launch.policy import (
    GiveUp,
    JobLost,
    Restart,
    Restarts,
    State,
    after_death,
    how_it_ended,
    signal_name,
)
from ftcomm.launch.replica_processes import ReplicaListener, ReplicaProcesses, rank_environment
from ftcomm.launch.report import Event, Reporter
from ftcomm.launch.rundir import VIEWS, RunDir
from ftcomm.launch.torch_store import TorchStore
from ftcomm.settings.credentials import from_env

FINISHED, FAILED, DRAINED, KILLED = 0, 1, 3, 130  # exit codes; 2 is a usage error
CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}  # that a process causes itself

TERM_TO_KILL = 5.0  # s between SIGTERM and SIGKILL
REMOVED_TO_TERM = 5.0  # s in which a removed replica may end by itself: it is told, and most can hear
SAME = 2.0  # s in which a second signal is the same one: timeout(1) and some batch systems signal a child and its group


def _ignore(event: Event) -> None:
    pass


class Whereabouts(NamedTuple):
    """What a replica does in the job."""

    state: State
    member: bool  # whether it is in the newest view
    contributes: bool
    joining: str  # before it is a member: "prepares" while its script does, then "joins"


class Launcher:
    """One job on this machine. For one `run()`; everything is called on the event loop that runs it, nothing blocks.

    `on_event` gets every event of the coordinator and of the processes. With `on_line(replica, rank, line)` the ranks'
    output goes there and not to the console, with `on_log(text)` so do the launcher's own lines. Start it in a thread
    that lives as long as the ranks shall: the kernel kills a rank when the thread that started it ends.
    """

    def __init__(
        self,
        options: RunOptions,
        on_event: Callable[[Event], None] = _ignore,
        on_line: Callable[[int, int, str], None] | None = None,
        on_log: Callable[[str], None] | None = None,
    ) -> None:
        self.options = options
        self._on_event = on_event
        self._report = Reporter(options, self._happened, on_line, on_log)
        self._token = secrets.token_hex(16)
        self._replicas: list[ReplicaProcesses] = []
        self._has_views = False  # the script uses ftcomm
        self._is_awaited = False  # a replica waits for the first view
        self._draining = False
        self._unclean = False  # a member died while draining
        self._lost = False
        self._killed = False
        self._signalled_at = -SAME  # when the last signal counted
        self._timers: list[asyncio.TimerHandle] = []
        self._coordinator: EmbeddedCoordinator | None = None
        self._admin: AdminServer | None = None
        self.run_id = ""
        self.network: HostNetwork | None = None
        self.view: Event | None = None  # the newest
        self.steps: dict[int, int] = {}  # replica -> the last step that it reported
        self._places: dict[int, tuple[Whereabouts, float]] = {}  # replica -> its place, and since when (time.time())
        self.effective: dict[int, float] = {}  # replica -> the share of its time that was training, if it says so

    # -- for users ---------------------------------------------------------------------------------------------------

    async def run(self, *, handle_signals: bool = False) -> int:
        """Run the job to its end and return the exit code of `ftcomm run`.

        Raises `SettingsError` and `InitError`, each with its mend, before any rank has started. With `handle_signals`
        SIGINT, SIGTERM and SIGHUP call `interrupt()`; only in the main thread. However this ends, by cancellation
        too, no process, socket or file of the run is left.
        """
        self.options.check()
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close_report)
            self._report.open(self._hold_output)
            if handle_signals:
                self._handle_signals(stack)
            run_dir = RunDir()
            stack.push_async_callback(asyncio.to_thread, run_dir.remove)
            self.run_id = run_dir.run
            host = self.options.host
            if self.options.hosts is not None:
                self.network = await asyncio.to_thread(self.options.hosts.open, self.options.replicas)
                stack.callback(self.network.close)
                # The coordinator is at the hub, now and after a restart; a replica goes to its own place to start.
                stack.enter_context(self.network.inside(HUB))
                host = self.network.address(HUB)
            mine = from_env(self._token, {**os.environ, **self.options.env}, job=self.run_id)
            self._coordinator = EmbeddedCoordinator(
                self.options, mine, host, run_dir.path / VIEWS, self._coordinator_event, self._report.emit
            )
            stack.push_async_callback(self._stop_coordinator)
            await self._coordinator.start()
            store = TorchStore(host, self._report.log)
            stack.push_async_callback(store.close)
            await store.start()
            environment = rank_environment(
                self.options, self.coordinator.endpoint, self._token, mine.job, store.endpoint
            )
            listener = ReplicaListener(
                self._report.line, self._rank_started, self._rank_exited, self._replica_ended, self._report.log
            )
            self._replicas = [
                ReplicaProcesses(number, self.options, environment, run_dir, listener, self.network)
                for number in range(self.options.replicas)
            ]
            stack.push_async_callback(self._kill_rest)
            self._admin = AdminServer(run_dir.path / SOCKET, lambda request: answer(self, request))
            stack.push_async_callback(self._admin.close)
            await self._admin.open()
            for replica in self._replicas:
                if self._draining:  # interrupted before anything began
                    replica.state = State.STOPPED
                else:
                    replica.start()
            self._check_over()
            await self._over
            self._tell_who_finished()
        return self._exit_code()

    @property
    def coordinator(self) -> CoordinatorServer:
        """The coordinator of the running job; another object after `restart_coordinator`."""
        if self._coordinator is None:
            raise RuntimeError("the job is not running, so it has no coordinator")
        return self._coordinator.server

    def pids(self) -> dict[tuple[int, int], int]:
        """Returns (replica, rank) -> pid of every rank that lives."""
        return {key: pid for replica in self._replicas for key, pid in replica.pids().items()}

    def states(self) -> dict[int, State]:
        return {replica.number: replica.state for replica in self._replicas}

    @property
    def replicas(self) -> list[ReplicaProcesses]:
        return list(self._replicas)

    @property
    def draining(self) -> bool:
        return self._draining or self._lost

    @property
    def away(self) -> bool:
        """Whether the coordinator is being restarted."""
        return self._coordinator is not None and self._coordinator.away

    @property
    def last_said(self) -> str:
        return self._report.last_said

    def contributing(self) -> frozenset[int]:
        """The contributing replicas of the newest view."""
        members = self.view["members"] if self.view is not None else ()
        return frozenset(member["replica"] for member in members if member["contributing"])

    def place(self, replica: ReplicaProcesses) -> Whereabouts:
        """Returns what a replica does in the job."""
        members = self.view["members"] if self.view is not None else ()
        # The newest view may still have its last life.
        member = replica.joined and any(member["replica"] == replica.number for member in members)
        contributes = replica.contributed and replica.number in self.contributing()
        return Whereabouts(replica.state, member, contributes, replica.joining)

    def since(self, replica: ReplicaProcesses) -> float:
        """Returns the time.time() since when a replica has its place."""
        self._note_places()
        return self._places[replica.number][1]

    def restart_coordinator(self, away: float = 0.0) -> asyncio.Task[None]:
        """Put a new coordinator at the same address that knows only what was stored, as after a crash.

        The old one goes at once, the task ends when the new one is there, `away` seconds later. Raises `FtcommError` if
        another restart is under way.
        """
        assert self._coordinator is not None
        return self._coordinator.restart(away, lambda why: self._job_lost(JobLost(why)))

    def interrupt(self) -> None:
        """Act as a signal does: the first drains the job, the second ends it with SIGTERM, the third with SIGKILL."""
        if self._lost:
            self._kill_all()
        elif not self._draining:
            self.drain()
        elif not self._killed:
            self._killed = True
            self._report.log("interrupted again: all replicas are ended now")
            self._end_all()
        else:
            self._kill_all()

    def drain(self) -> None:
        """Let all replicas leave at one common step; what is not gone after the grace is ended by force."""
        if self._draining or self._over.done():
            return
        self._draining = True
        self._report.log(
            f"draining: the replicas leave together at a coming step, within {self.options.grace:g} s at most "
            f"(interrupt again, after {SAME:g} s, to end them now)"
        )
        for replica in self._replicas:
            if replica.state is State.WAITING:
                self._cancel_start(replica, State.STOPPED)
            elif replica.removed:
                self._end_removed(replica, replica.starts)
            elif not replica.joined:
                # It is starting, or does not use ftcomm: there is no step for it to leave at.
                replica.asked_to_end = True
                replica.signal(signal.SIGTERM)
        if self._replicas:
            assert self._coordinator is not None
            self._coordinator.drain()
            self._timers.append(self._loop.call_later(self.options.grace, self._grace_is_over))
            self._check_over()

    def restart_replica(self, number: int) -> None:
        """Let one replica leave at a step boundary, and start it again; or start one again that has left or failed.

        Returns at once. What has not left after the grace is killed, and started again. Raises `FtcommError` with the
        reason if that cannot be, or would end the job.
        """
        if not 0 <= number < len(self._replicas):
            raise FtcommError(f"there is no replica {number}; this job has 0 to {len(self._replicas) - 1}")
        if self.draining:
            raise FtcommError("the job is ending, so no replica is started any more")
        replica = self._replicas[number]
        others = [r for r in self.contributing() - {number} if self._replicas[r].holds_state]  # a view comes late
        if replica.state is State.WAITING or replica.restart_wanted:
            raise FtcommError(f"replica {number} is being restarted already")
        if replica.state is State.FINISHED:
            raise FtcommError(f"replica {number} has finished its training")
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
            replica.timer = self._loop.call_later(self.options.grace, self._did_not_leave, replica, replica.starts)
        else:
            replica.restarts = Restarts()
            self._report.log(f"replica {number} is started again")
            self._restart(replica)

    # -- what happens ------------------------------------------------------------------------------------------------

    def _rank_started(self, replica: int, rank: int, pid: int) -> None:
        self._report.emit("process_started", replica=replica, rank=rank, pid=pid)

    def _rank_exited(self, replica: int, rank: int, pid: int, code: int) -> None:
        killed_by = signal_name(code)
        exit_code = None if killed_by else code
        self._report.emit("process_exited", replica=replica, rank=rank, pid=pid, code=exit_code, signal=killed_by)
        if code > 0 and self._coordinator is not None:  # by a signal: it may have finished first
            self._coordinator.server.exited(replica, how_it_ended(code))

    def _replica_ended(self, replica: ReplicaProcesses) -> None:
        """All ranks of `replica` are gone."""
        if replica.state is not State.RUNNING:
            return  # it could not be started, and we have given it up already
        if replica.restart_wanted and (replica.left or replica.death) and self.contributing() and not self.draining:
            how = "left" if replica.death is None else f"did not leave: it {how_it_ended(replica.death.code)}"
            self._report.log(f"replica {replica.number} {how}; starting it again")
            self._cancel_start(replica, State.WAITING)
            self._restart(replica)
        elif self._ended_well(replica):
            replica.state = State.STOPPED if self._draining else State.LEFT if replica.left else State.FINISHED
            self._report.log(f"replica {replica.number} {'finished' if replica.state is State.FINISHED else 'left'}")
        else:
            self._replica_died(replica)
        self._check_over()

    def _ended_well(self, replica: ReplicaProcesses) -> bool:
        """Exit code 0 alone proves nothing of who was in the job: os._exit(0) gives it, and an atexit of a library
        after an error. Who finishes or leaves says so, and waits until that was heard; while the coordinator is away
        nobody can hear it, so the code has to do."""
        if replica.death is not None or replica.removed:
            return False
        said = replica.said_finished or replica.trained or replica.left
        return said or not replica.joined or self._draining or self.away

    def _did_not_leave(self, replica: ReplicaProcesses, starts: int) -> None:
        if replica.restart_wanted and replica.starts == starts:
            self._report.log(f"replica {replica.number} did not leave within {self.options.grace:g} s and is killed")
            replica.kill()

    def _end_removed(self, replica: ReplicaProcesses, starts: int) -> None:
        """End a removed replica that hangs, is stopped, or has not heard of it: its place is needed for its next
        life."""
        if replica.starts != starts or replica.state is not State.RUNNING or not replica.removed:
            return
        if replica.asked_to_end:
            return  # by a drain
        replica.asked_to_end = True
        self._report.log(f"replica {replica.number} was removed ({replica.removed}) and still runs: it is ended now")
        self._report.emit("ending_removed", replica=replica.number, reason=replica.removed)
        replica.signal(signal.SIGTERM)
        self._timers.append(self._loop.call_later(TERM_TO_KILL, self._kill_removed, replica, starts))

    def _kill_removed(self, replica: ReplicaProcesses, starts: int) -> None:
        if replica.starts == starts and replica.removed:
            replica.kill()

    def _replica_died(self, replica: ReplicaProcesses) -> None:
        death, who, code = replica.death, f"replica {replica.number}", 0
        untold = death is None and not replica.removed  # that it finished or left
        if death is not None:
            rank = f"rank {death.rank}, " if self.options.ranks_per_replica > 1 else ""
            who, code = f"{who} ({rank}pid {death.pid})", death.code
        how = f"{how_it_ended(code)} before it had said that it finished or left" if untold else how_it_ended(code)
        what = f"{who} {how}"
        replica.reason = how + (f" ({replica.removed})" if replica.removed else "")
        replica.failed_at_end |= replica.trained
        failed = untold or code > 0 or -code in CRASHES
        replica.failed_by_itself |= replica.contributed and failed and not replica.removed
        if self._draining or self._lost or self._killed:
            self._unclean |= not replica.asked_to_end
            replica.state = State.STOPPED
            self._report.log(what)
            return
        lost = not replica.contributed or replica.number not in self.contributing()
        if lost and self._is_complete():
            replica.state = State.FAILED if self._has_failed(replica) else State.STOPPED
            self._report.log(f"{what}; it was not back in the job when the others finished")
            return
        now = self._loop.time()
        decision = after_death(
            {other.number: other.state for other in self._replicas if other is not replica},
            code,
            replica.said_finished,
            replica.restarts.after(now, time.monotonic() - replica.started),
            now,
            began=self._has_views,
            max_restarts=self.options.max_restarts,
            min_replicas=self.options.min_replicas,
            backoff=self.options.backoff,
            backoff_limit=self.options.backoff_limit,
        )
        if isinstance(decision, Restart):
            replica.state = State.WAITING
            replica.restarts = decision.restarts
            replica.timer = self._loop.call_later(decision.delay, self._restart, replica)
            which = f"restart {decision.count} of {self.options.max_restarts}"
            self._report.log(f"{what}; restarting it in {decision.delay:g} s ({which})")
            self._report.emit("restarting", replica=replica.number, delay=decision.delay, restart=decision.count)
        elif isinstance(decision, GiveUp):
            replica.state = State.FAILED
            self._report.log(f"{what}; {decision.reason}")
            self._report.emit("failed", replica=replica.number, reason=decision.reason)
            self._check_begin()
        else:
            replica.state = State.FAILED
            self._report.log(what)
            self._report.emit("failed", reason=decision.reason)
            self._job_lost(decision)

    def _check_begin(self) -> None:
        """End a job whose first view will never come, since that has all replicas."""
        missing = [replica.number for replica in self._replicas if replica.state is State.FAILED]
        if missing and self._is_awaited and not (self._has_views or self._draining):
            self._job_lost(JobLost(f"it cannot begin without {replicas(missing)}"))

    def _restart(self, replica: ReplicaProcesses) -> None:
        """Start a replica again. What the system refuses now, it may grant later: try again with a back-off."""
        if replica.pids():  # of an attempt that has failed
            replica.timer = self._loop.call_later(self.options.backoff, self._restart, replica)
            return
        try:
            replica.start()
        except (InitError, OSError) as error:
            replica.kill()
            delay = replica.restarts.delay(self.options.backoff, self.options.backoff_limit)
            replica.restarts = replica.restarts.refused()
            replica.state = State.WAITING
            replica.timer = self._loop.call_later(delay, self._restart, replica)
            self._report.log(f"replica {replica.number} is started again in {delay:g} s: {error}")
            self._report.emit(
                "restarting",
                replica=replica.number,
                delay=delay,
                restart=len(replica.restarts.times),
                reason=str(error),
            )
            self._check_over()
        except Exception as error:
            replica.kill()
            replica.state = State.FAILED
            self._report.log(f"replica {replica.number} is given up: {error}")
            self._report.emit("failed", replica=replica.number, reason=str(error))
            self._check_over()

    def _job_lost(self, lost: JobLost, grace: float = 0.0) -> None:
        """End all replicas, after `grace` seconds in which those that are told of it may end by themselves."""
        if self._lost:
            return
        self._lost = True
        self._report.log(f"the job failed: {lost.reason}")
        for replica in self._replicas:
            if replica.state is State.WAITING:
                self._cancel_start(replica, State.FAILED)
        if grace:
            self._timers.append(self._loop.call_later(grace, self._end_all))
        else:
            self._end_all()

    def _cancel_start(self, replica: ReplicaProcesses, state: State) -> None:
        if replica.timer is not None:
            replica.timer.cancel()
        replica.timer = None
        replica.state = state

    def _check_over(self) -> None:
        """End replicas that cannot rejoin any more, and the job if it is over. Called at each change of a state."""
        self._note_places()
        running = [replica for replica in self._replicas if replica.state is State.RUNNING]
        if any(replica.state in (State.FINISHED, State.LEFT) for replica in self._replicas) and not self._draining:
            complete = any(replica.state is State.FINISHED for replica in self._replicas)
            for replica in self._replicas:
                if replica.state is State.WAITING and not running:
                    missed = complete and not self._has_failed(replica)
                    self._cancel_start(replica, State.STOPPED if missed else State.FAILED)
                    self._report.log(f"replica {replica.number} is not restarted: the others have ended")
            # Of those that run, somebody must be in the job for the rest to catch up from.
            if running and self._has_views and not any(r.joined and not r.removed for r in running):
                for replica in running:
                    self._end_outsider(replica)
        if not running and all(replica.state.over for replica in self._replicas) and not self._over.done():
            self._over.set_result(None)

    def _is_complete(self) -> bool:
        """All that live and have held the state of the training have done all of it."""
        here = self.contributing()
        holders = [
            replica
            for replica in self._replicas
            if (replica.contributed and replica.state is State.FINISHED)
            or (replica.holds_state and (replica.said_finished or replica.number in here))
        ]
        return bool(holders) and all(replica.said_finished or replica.state is State.FINISHED for replica in holders)

    def _has_trained(self) -> bool:
        """All that have held the state of the training say that they have done all of it, though the coordinator, who
        may have been away then, did not hear that."""
        holders = [x for x in self._replicas if x.contributed and x.state in (State.RUNNING, State.FINISHED)]
        done = [x.state is State.FINISHED or x.said_finished or x.trained for x in holders]
        return bool(done) and all(done)

    def _has_failed(self, replica: ReplicaProcesses) -> bool:
        """Whether a replica that was not back when the others had finished has failed, and was not only late.

        A step loop tells when all of its steps are done, so those that did them have what the late one missed. Of a
        script without one nobody knows that: an error or a crash of its own may be the reason why there was no more to
        do. A signal from outside, such as SIGKILL, is none of its own.
        """
        complete = any(other.trained for other in self._replicas)
        return replica.failed_at_end or (replica.failed_by_itself and not complete)

    def _end_outsider(self, replica: ReplicaProcesses) -> None:
        if not replica.asked_to_end:
            replica.asked_to_end = True
            self._report.log(f"replica {replica.number} is ended: the others finished before it could rejoin")
            replica.signal(signal.SIGTERM)
            self._timers.append(self._loop.call_later(TERM_TO_KILL, replica.kill))

    def _tell_who_finished(self) -> None:
        finished, failed, missed = (
            [replica.number for replica in self._replicas if replica.state is state]
            for state in (State.FINISHED, State.FAILED, State.STOPPED)
        )
        if finished and (failed or missed) and not (self._lost or self._killed or self._draining):
            said = [f"{replicas(failed)} failed"] if failed else []
            said += [f"{replicas(missed)} {_were(missed)} not back in time"] if missed else []
            self._report.log(f"the training is complete on {replicas(finished)}; {'; '.join(said)}")

    def _exit_code(self) -> int:
        """The exit code of `ftcomm run`: 0 if the training is complete and no replica was given up.

        How a replica died does not matter where a step loop says that the training is complete, nor who was not back
        in time then. Without a step loop an error or a crash fails the job, see `_has_failed`.
        """
        if self._killed:
            return KILLED
        if self._lost or any(replica.state is State.FAILED for replica in self._replicas):
            return FAILED
        if self._draining:
            return FAILED if self._unclean else DRAINED
        # Each was told to go away on its own: that is a drain.
        return FINISHED if any(replica.state is State.FINISHED for replica in self._replicas) else DRAINED

    # -- the end -----------------------------------------------------------------------------------------------------

    def _grace_is_over(self) -> None:
        late = [replica.number for replica in self._replicas if replica.state is State.RUNNING]
        if late and not self._killed:
            self._unclean = True
            self._report.log(
                f"{replicas(late)} did not leave within {self.options.grace:g} s and {_are(late)} ended now"
            )
            self._end_all()

    def _end_all(self) -> None:
        """SIGTERM, then SIGKILL."""
        for replica in self._replicas:
            replica.signal(signal.SIGTERM)
        self._timers.append(self._loop.call_later(TERM_TO_KILL, self._kill_all))

    def _kill_all(self) -> None:
        for replica in self._replicas:
            replica.kill()

    async def _kill_rest(self) -> None:
        """Kill what is left. In the normal case nothing is."""
        for timer in self._timers:
            timer.cancel()
        for replica in self._replicas:
            if not replica.state.over:
                self._cancel_start(replica, State.STOPPED)
        self._kill_all()
        deadline = self._loop.time() + TERM_TO_KILL
        while self.pids() and self._loop.time() < deadline:  # their deaths come as events of the loop
            await asyncio.sleep(0.005)

    async def _stop_coordinator(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            await coordinator.stop()

    async def _close_report(self) -> None:
        await asyncio.to_thread(self._report.close, 1.0 if self._killed else 30.0)

    def _handle_signals(self, stack: contextlib.AsyncExitStack) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("handle_signals works only in the main thread; call interrupt() from your own handler")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._loop.add_signal_handler(number, self._signalled)
                stack.callback(self._loop.remove_signal_handler, number)

    def _signalled(self) -> None:
        now = self._loop.time()
        if now - self._signalled_at >= SAME:
            self._signalled_at = now
            self.interrupt()

    # -- what is said -------------------------------------------------------------------------------------------------

    def _coordinator_event(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "joined" and not self._is_awaited:
            self._is_awaited = True
            self._check_begin()
        if kind == "view":
            self._has_views = True
            self.view = event
            contributing = {member["replica"]: member["contributing"] for member in event["members"]}
            for replica in self._replicas:
                # A view of a loss has no step; of who finished we hear before.
                gone = replica.joined and replica.number not in contributing and not replica.said_finished
                replica.left |= gone and event["step"] is not None
                if replica.number in contributing:
                    replica.joined, replica.joining = True, ""
                if contributing.get(replica.number):
                    replica.contributed, replica.reason = True, ""
                    replica.failed_at_end = replica.failed_by_itself = False
        for replica in self._replicas:
            if replica.number == event.get("replica"):
                self._of_replica(replica, kind, str(event.get("reason", "")))
        if isinstance(step := event.get("step"), int) and isinstance(number := event.get("replica"), int):
            self.steps[number] = step
            if kind == "metrics":
                self.effective[number] = event["effective"]
        if kind not in ("report", "metrics"):
            self._note_places()
        self._report.record(event)
        if (text := describe(event)) is not None:
            self._report.log(text)
        if kind in ("failed", "ended") and not (self._draining or self._over.done() or self._has_trained()):
            self._job_lost(JobLost(str(event.get("reason", "the coordinator gave it up"))))
        if event.get("hopeless") and not (self._has_views or self._draining):
            asked = 2 * self.options.timeouts.heartbeat  # by then all ranks that have started have asked
            self._job_lost(JobLost("it cannot begin, and a restart would not help"), grace=asked)

    def _of_replica(self, replica: ReplicaProcesses, kind: str, reason: str) -> None:
        if kind == "finished":
            replica.said_finished = True
        elif kind in ("trains", "trained"):
            replica.trained = kind == "trained"
        elif kind == "dismissed":  # it has left in order, though it was in no view that it could have left
            replica.left = True
        elif kind == "removed" and replica.joined and not replica.removed:
            replica.removed = replica.reason = reason
            self._timers.append(self._loop.call_later(REMOVED_TO_TERM, self._end_removed, replica, replica.starts))
        elif kind == "joined" and self._has_views:
            replica.joining, replica.removed = "prepares", ""  # its process may have made a new group
        elif kind == "ready":
            replica.joining = "joins"

    def _note_places(self) -> None:
        for replica in self._replicas:
            place = self.place(replica)
            if replica.number not in self._places or self._places[replica.number][0] != place:
                self._places[replica.number] = place, time.time()

    def _happened(self, event: Event) -> None:
        if self._admin is not None:
            self._admin.tell(event)
        self._on_event(event)

    def _hold_output(self, held: bool) -> None:
        for replica in self._replicas:
            replica.hold(held)


def _are(numbers: list[int]) -> str:
    return "is" if len(numbers) == 1 else "are"


def _were(numbers: list[int]) -> str:
    return "was" if len(numbers) == 1 else "were"


def run(options: RunOptions) -> int:
    """Run a job from a command line: signals drain it, the exit code is returned. Blocks until the job is over."""
    return asyncio.run(Launcher(options).run(handle_signals=True))
