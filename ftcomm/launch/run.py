"""`ftcomm run`: keeps the replicas of a job running, with the coordinator in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ftcomm.control.server import CoordinatorServer, ServerError
from ftcomm.errors import InitError
from ftcomm.launch.options import RunOptions
from ftcomm.launch.policy import (
    GiveUp,
    JobLost,
    Restart,
    State,
    after_death,
    how_it_ended,
    signal_name,
)
from ftcomm.launch.replica import Listener, Replica, rank_environment
from ftcomm.launch.report import Event, Reporter
from ftcomm.launch.rundir import RunDir
from ftcomm.launch.words import describe, replicas

FINISHED, FAILED, DRAINED, KILLED = 0, 1, 3, 130  # exit codes; 2 is a usage error

TERM_TO_KILL = 5.0  # s between SIGTERM and SIGKILL


def _ignore(event: Event) -> None:
    pass


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
        self._report = Reporter(options, on_event, on_line, on_log)
        self._token = secrets.token_hex(16)
        self._replicas: list[Replica] = []
        self._has_views = False  # the script uses ftcomm
        self._draining = False
        self._unclean = False  # a member died while draining
        self._lost = False
        self._killed = False
        self._timers: list[asyncio.TimerHandle] = []
        self._server: CoordinatorServer | None = None

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
            self._server = self._new_server(run_dir.path / "views", 0)
            stack.push_async_callback(self._stop_server)
            await _start(self._server)
            environment = rank_environment(self.options, self._server.endpoint, self._token)
            listener = Listener(
                self._report.line, self._rank_started, self._rank_exited, self._replica_ended, self._report.log
            )
            self._replicas = [
                Replica(number, self.options, environment, run_dir, listener) for number in range(self.options.replicas)
            ]
            stack.push_async_callback(self._kill_rest)
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
        """Of the running job; another object after `restart_coordinator`."""
        if self._server is None:
            raise RuntimeError("the job is not running, so it has no coordinator")
        return self._server

    def pids(self) -> dict[tuple[int, int], int]:
        """(replica, rank) -> pid of every rank that lives."""
        return {key: pid for replica in self._replicas for key, pid in replica.pids().items()}

    def states(self) -> dict[int, State]:
        return {replica.number: replica.state for replica in self._replicas}

    async def restart_coordinator(self) -> None:
        """Put a new coordinator at the same address that knows only what was stored, as after a crash."""
        old = self.coordinator
        await old.stop()
        self._server = self._new_server(self._store, int(old.endpoint.rpartition(":")[2]))
        await _start(self._server)
        if self._draining:
            self._server.drain()

    def interrupt(self) -> None:
        """As a signal does: the first drains the job, the second ends it with SIGTERM, the third with SIGKILL."""
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
            "(interrupt again to end them now)"
        )
        for replica in self._replicas:
            if replica.state is State.WAITING:
                self._cancel_start(replica, State.STOPPED)
            elif not replica.joined:
                # It is starting, or does not use ftcomm: there is no step for it to leave at.
                replica.asked_to_end = True
                replica.signal(signal.SIGTERM)
        if self._replicas:
            self.coordinator.drain()
            self._timers.append(self._loop.call_later(self.options.grace, self._grace_is_over))
            self._check_over()

    # -- what happens ------------------------------------------------------------------------------------------------

    def _rank_started(self, replica: int, rank: int, pid: int) -> None:
        self._report.emit("process_started", replica=replica, rank=rank, pid=pid)

    def _rank_exited(self, replica: int, rank: int, pid: int, code: int) -> None:
        killed_by = signal_name(code)
        exit_code = None if killed_by else code
        self._report.emit("process_exited", replica=replica, rank=rank, pid=pid, code=exit_code, signal=killed_by)

    def _replica_ended(self, replica: Replica) -> None:
        """All ranks of `replica` are gone."""
        if replica.state is not State.RUNNING:
            return  # it could not be started, and we have given it up already
        if replica.death is None:
            replica.state = State.STOPPED if self._draining else State.FINISHED
            self._report.log(f"replica {replica.number} {'left' if self._draining else 'finished'}")
        else:
            self._replica_died(replica)
        self._check_over()

    def _replica_died(self, replica: Replica) -> None:
        assert replica.death is not None
        who = f"replica {replica.number} (pid {replica.death.pid})"
        if self.options.ranks_per_replica > 1:
            who = f"replica {replica.number} (rank {replica.death.rank}, pid {replica.death.pid})"
        what = f"{who} {how_it_ended(replica.death.code)}"
        if self._draining or self._lost or self._killed:
            self._unclean |= not replica.asked_to_end
            replica.state = State.STOPPED
            self._report.log(what)
            return
        if not replica.contributed and self._is_complete():
            replica.state = State.FAILED if replica.failed_at_end else State.STOPPED
            self._report.log(f"{what}; it was not back in the job when the others finished")
            return
        now = self._loop.time()
        decision = after_death(
            {other.number: other.state for other in self._replicas if other is not replica},
            replica.death.code,
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
            replica.failed_at_end |= replica.said_finished
            replica.timer = self._loop.call_later(decision.delay, self._restart, replica)
            which = f"restart {decision.count} of {self.options.max_restarts}"
            self._report.log(f"{what}; restarting it in {decision.delay:g} s ({which})")
            self._report.emit("restarting", replica=replica.number, delay=decision.delay, restart=decision.count)
        elif isinstance(decision, GiveUp):
            replica.state = State.FAILED
            self._report.log(f"{what}; {decision.reason}")
            self._report.emit("failed", replica=replica.number, reason=decision.reason)
        else:
            replica.state = State.FAILED
            self._report.log(what)
            self._report.emit("failed", reason=decision.reason)
            self._job_lost(decision)

    def _restart(self, replica: Replica) -> None:
        try:
            replica.start()
        except Exception as error:
            replica.kill()
            replica.state = State.FAILED
            self._report.log(f"replica {replica.number} is given up: {error}")
            self._report.emit("failed", replica=replica.number, reason=str(error))
            self._check_over()

    def _job_lost(self, lost: JobLost) -> None:
        if self._lost:
            return
        self._lost = True
        self._report.log(f"the job failed: {lost.reason}")
        for replica in self._replicas:
            if replica.state is State.WAITING:
                self._cancel_start(replica, State.FAILED)
        self._end_all()

    def _cancel_start(self, replica: Replica, state: State) -> None:
        if replica.timer is not None:
            replica.timer.cancel()
        replica.timer = None
        replica.state = state

    def _check_over(self) -> None:
        """After any replica changed its state: can those that are left still get anywhere, and is the job over?"""
        running = [replica for replica in self._replicas if replica.state is State.RUNNING]
        if any(replica.state is State.FINISHED for replica in self._replicas) and not self._draining:
            for replica in self._replicas:
                if replica.state is State.WAITING and not running:
                    self._cancel_start(replica, State.FAILED)
                    self._report.log(f"replica {replica.number} is not restarted: the others have finished")
            # Of those that run, somebody must be in the job for the rest to catch up from.
            if running and self._has_views and not any(replica.joined for replica in running):
                for replica in running:
                    self._end_outsider(replica)
        if not running and all(replica.state.over for replica in self._replicas) and not self._over.done():
            self._over.set_result(None)

    def _is_complete(self) -> bool:
        """All that live and have held the state of the training have done all of it."""
        holders = [
            replica
            for replica in self._replicas
            if replica.contributed and replica.state in (State.RUNNING, State.FINISHED)
        ]
        return bool(holders) and all(replica.said_finished or replica.state is State.FINISHED for replica in holders)

    def _end_outsider(self, replica: Replica) -> None:
        if not replica.asked_to_end:
            replica.asked_to_end = True
            self._report.log(f"replica {replica.number} is ended: the others finished before it could rejoin")
            replica.signal(signal.SIGTERM)
            self._timers.append(self._loop.call_later(TERM_TO_KILL, replica.kill))

    def _tell_who_finished(self) -> None:
        finished, failed = (
            [replica.number for replica in self._replicas if replica.state is state]
            for state in (State.FINISHED, State.FAILED)
        )
        if finished and failed and not (self._lost or self._killed):
            self._report.log(f"the training is complete on {replicas(finished)}; {replicas(failed)} failed")

    def _exit_code(self) -> int:
        if self._killed:
            return KILLED
        if self._lost or any(replica.state is State.FAILED for replica in self._replicas):
            return FAILED
        if self._draining:
            return FAILED if self._unclean else DRAINED
        return FINISHED

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
        """Nothing runs after this. In the normal case nothing did."""
        for timer in self._timers:
            timer.cancel()
        for replica in self._replicas:
            if not replica.state.over:
                self._cancel_start(replica, State.STOPPED)
        self._kill_all()
        deadline = self._loop.time() + TERM_TO_KILL
        while self.pids() and self._loop.time() < deadline:  # their deaths come as events of the loop
            await asyncio.sleep(0.005)

    async def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    async def _close_report(self) -> None:
        await asyncio.to_thread(self._report.close, 1.0 if self._killed else 30.0)

    def _handle_signals(self, stack: contextlib.AsyncExitStack) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("handle_signals works only in the main thread; call interrupt() from your own handler")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._loop.add_signal_handler(number, self.interrupt)
                stack.callback(self._loop.remove_signal_handler, number)

    # -- the coordinator, and what is said ---------------------------------------------------------------------------

    def _new_server(self, store: Path, port: int) -> CoordinatorServer:
        self._store = store
        return CoordinatorServer(
            replicas=self.options.replicas,
            ranks_per_replica=self.options.ranks_per_replica,
            token=self._token,
            host=self.options.host,
            port=port,
            store=store,
            heartbeat_timeout=self.options.heartbeat_timeout,
            op_timeout=self.options.op_timeout,
            on_event=self._coordinator_event,
        )

    def _coordinator_event(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "view":
            self._has_views = True
            contributing = {member["replica"]: member["contributing"] for member in event["members"]}
            for replica in self._replicas:
                replica.joined |= replica.number in contributing
                if contributing.get(replica.number):
                    replica.contributed, replica.failed_at_end = True, False
        for replica in self._replicas:
            replica.said_finished |= kind == "finished" and replica.number == event["replica"]
        self._report.record(event)
        if (text := describe(event)) is not None:
            self._report.log(text)
        if kind == "failed" and not (self._draining or self._over.done()):
            self._job_lost(JobLost(str(event.get("reason", "the coordinator gave it up"))))

    def _hold_output(self, held: bool) -> None:
        for replica in self._replicas:
            replica.hold(held)


async def _start(server: CoordinatorServer) -> None:
    try:
        await server.start()
    except ServerError as error:
        raise InitError(f"the coordinator cannot start: {error}") from None


def _are(numbers: list[int]) -> str:
    return "is" if len(numbers) == 1 else "are"


def run(options: RunOptions) -> int:
    """Run a job from a command line: signals drain it, the exit code is returned. Blocks until the job is over."""
    return asyncio.run(Launcher(options).run(handle_signals=True))
