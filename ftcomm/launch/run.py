"""`ftcomm run`: keeps the replicas of a job running, with the coordinator in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ftcomm.control.handshake import Credentials
from ftcomm.control.messages import Event
from ftcomm.control.server import CoordinatorServer
from ftcomm.errors import FtcommError, SettingsError, TransportError
from ftcomm.launch.admin.handlers import answer, status
from ftcomm.launch.admin.protocol import SOCKET
from ftcomm.launch.admin.server import AdminServer
from ftcomm.launch.coordinator.embedded import EmbeddedCoordinator
from ftcomm.launch.coordinator_events import CoordinatorEvents
from ftcomm.launch.dashboard_process import DashboardProcess
from ftcomm.launch.diagnose import Diagnosis, StallDiagnosis, stands_still
from ftcomm.launch.dumper import DELAY, Dumper, cause_of
from ftcomm.launch.event_text import describe
from ftcomm.launch.hosts import HUB, HostNetwork
from ftcomm.launch.job_state import JobState
from ftcomm.launch.monitor import MonitorLoop
from ftcomm.launch.options import RunOptions
from ftcomm.launch.places import PlaceInJob, Places
from ftcomm.launch.policy import State, signal_name
from ftcomm.launch.removed_replicas import RemovedReplicas, Timers
from ftcomm.launch.replica_processes import ReplicaListener, ReplicaProcesses, rank_environment
from ftcomm.launch.report import Reporter
from ftcomm.launch.rundir import VIEWS, RunDir
from ftcomm.launch.several_hosts.messages import LAUNCHER, RankFailed
from ftcomm.launch.several_hosts.node_place import NO_NAME
from ftcomm.launch.several_hosts.other_hosts import OtherHosts
from ftcomm.launch.several_hosts.replicas_elsewhere import ReplicasElsewhere
from ftcomm.launch.shutdown import SAME, Shutdown
from ftcomm.launch.supervisor import Supervisor
from ftcomm.launch.torchrun.store import TorchStore
from ftcomm.monitoring.evidence import KernelKills, without
from ftcomm.monitoring.history import HistoryWriter
from ftcomm.monitoring.job import JobMonitor, Overview
from ftcomm.process.descriptors import room_for
from ftcomm.recorder.files import FOLDER
from ftcomm.recorder.reader import stands_since
from ftcomm.settings.credentials import from_env

PER_RANK = 6  # descriptors: the pipes of its output, its end, and its connections to torch's store and to this process
FINISHED, FAILED, DRAINED, KILLED = 0, 1, 3, 130  # exit codes; 2 is a usage error


def _ignore(event: Event) -> None:
    pass


class Launcher:
    """One job on this machine, or this host's share of one. For one `run()`; everything is called on the event loop
    that runs it, nothing blocks.

    If several hosts start the job, each has a launcher, which knows all replicas and starts its own. Host 0 has the
    coordinator, and tells the others what that says.

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
        report = self._report = Reporter(options, self._happened, on_line, on_log)
        self._token = secrets.token_hex(16) if options.node is None else options.token
        job = self._job = JobState(options)
        hosts = self._hosts = OtherHosts(options)
        places = self._places = Places(job, hosts)
        timers = Timers()
        removed = self._removed = RemovedReplicas(job, timers, report)
        shutdown = self._shutdown = Shutdown(job, hosts, places, removed, timers, report)
        self._supervisor = Supervisor(job, hosts, places, shutdown, report)
        self._events = CoordinatorEvents(job, hosts, places, removed, shutdown, self._tell)
        self._signalled_at = -SAME  # when the last signal counted
        self._coordinator: EmbeddedCoordinator | None = None  # None on other hosts than the first
        self._admin: AdminServer | None = None
        self._monitor: MonitorLoop | None = None
        self._kernel: KernelKills | None = None
        self._dumper: Dumper | None = None
        self._diagnosis: StallDiagnosis | None = None
        self.run_id = ""
        self.endpoint = ""  # of the coordinator
        self.network: HostNetwork | None = None

    # -- for users ---------------------------------------------------------------------------------------------------

    async def run(self, *, handle_signals: bool = False) -> int:
        """Run the job to its end and return the exit code of `ftcomm run`.

        Raises `SettingsError` and `InitError`, each with its mend, before any rank has started. With `handle_signals`
        SIGINT, SIGTERM and SIGHUP call `interrupt()`; only in the main thread. However this ends, by cancellation
        too, no process, socket or file of the run is left.
        """
        self.options.check()
        self._check_descriptors()
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close_report)
            self._report.open(self._hold_output)
            if handle_signals:
                self._handle_signals(stack)
            run_dir = RunDir()
            stack.push_async_callback(asyncio.to_thread, run_dir.remove)
            self.run_id = run_dir.run
            self._open_monitor(stack)
            dumper = self._dumper = Dumper(run_dir.path / FOLDER, run_dir.run, self._report.log)
            stack.push_async_callback(dumper.close)
            host, options, node = self.options.host, self.options, self.options.node
            mine = from_env(self._token, {**os.environ, **options.env})
            known = mine.job or (NO_NAME if node is None else node.job)  # to all launchers, before they have met
            job = self.run_id if known == NO_NAME else known
            if node is None or node.rank == 0:
                mine = dataclasses.replace(mine, job=job, called={LAUNCHER: known})
            else:
                mine = dataclasses.replace(mine, job=known)
            if node is not None:
                self._hosts.open(node, self.run_id, mine, self._hosts_listener(run_dir.path / FOLDER))
                stack.callback(self._hosts.close)
                host, here = await asyncio.to_thread(self._hosts.addresses)
                options = dataclasses.replace(options, host=here)  # its ranks'
            if self.options.hosts is not None:
                self.network = await asyncio.to_thread(self.options.hosts.open, self.options.replicas)
                stack.callback(self.network.close)
                # The coordinator is at the hub, now and after a restart; a replica goes to its own place to start.
                stack.enter_context(self.network.inside(HUB))
                host = self.network.address(HUB)
            if self._hosts.is_first:
                torch_store = await self._open_coordinator(stack, mine, host, run_dir.path / VIEWS)
            else:
                torch_store, job = await self._hosts.follow(host)
                self.endpoint = self._hosts.endpoint(host)
            environment = rank_environment(self.options, self.endpoint, self._token, job, torch_store)
            self._job.replicas = self._new_replicas(options, environment, run_dir)
            stack.push_async_callback(self._shutdown.finish)
            await self._open_admin(stack, run_dir.path / SOCKET)
            self._start()
            await self._shutdown.over.wait()
            await dumper.close()  # it has something to say, too, and the last line is how the job has ended
            self._shutdown.tell_who_finished()
        return _exit_code(self._job)

    @property
    def coordinator(self) -> CoordinatorServer:
        """The coordinator of the running job; another object after `restart_coordinator`."""
        if self._coordinator is None:
            raise RuntimeError("the job is not running, so it has no coordinator")
        return self._coordinator.server

    def pids(self) -> dict[tuple[int, int], int]:
        """Returns (replica, rank) -> pid of every rank that lives."""
        return {key: pid for replica in self._job.replicas for key, pid in replica.pids().items()}

    def states(self) -> dict[int, State]:
        return {replica.number: replica.state for replica in self._job.replicas}

    @property
    def replicas(self) -> list[ReplicaProcesses]:
        return list(self._job.replicas)

    @property
    def view(self) -> Event | None:
        """The newest view."""
        return self._job.view

    @property
    def effective(self) -> Mapping[int, float]:
        """The share of its time that was training, by replica that says so."""
        return self._job.effective

    @property
    def _runs_here(self) -> bool:
        return any(replica.here for replica in self._job.those_in(State.RUNNING))

    @property
    def draining(self) -> bool:
        return self._job.is_ending

    @property
    def away(self) -> bool:
        """Whether the coordinator is being restarted, or not reached from this host."""
        return not self._hosts.reached or (self._coordinator is not None and self._coordinator.away)

    @property
    def last_said(self) -> str:
        return self._report.last_said

    def contributing(self) -> frozenset[int]:
        """The contributing replicas of the newest view."""
        return self._job.contributing()

    def overview(self) -> Overview:
        """Returns the job as people look at it."""
        assert self._monitor is not None
        return self._monitor.overview()

    def place(self, replica: ReplicaProcesses) -> PlaceInJob:
        """Returns what a replica does in the job."""
        return self._places.of(replica)

    def since(self, replica: ReplicaProcesses) -> float:
        """Returns the time.time() since when a replica has its place."""
        return self._places.since(replica)

    def known_steps(self) -> dict[int, int]:
        """Returns the last step that is known of each replica."""
        heard = {} if self._coordinator is None else self._coordinator.server.steps
        steps = self._job.steps
        return {number: max(steps.get(number, -1), heard.get(number, -1)) for number in {**steps, **heard}}

    def restart_coordinator(self, away: float = 0.0) -> asyncio.Task[None]:
        """Put a new coordinator at the same address that knows only what was stored, as after a crash.

        The old one goes at once, the task ends when the new one is there, `away` seconds later. Raises `FtcommError` if
        another restart is under way.
        """
        if self._coordinator is None:
            raise FtcommError("the coordinator is on host 0; ask its launcher")
        return self._coordinator.restart(away)

    def interrupt(self) -> None:
        """Act as a signal does: the first drains the job, the second ends it with SIGTERM, the third with SIGKILL."""
        self._shutdown.interrupt(self._coordinator)

    def drain(self) -> None:
        """Let all replicas leave at one common step; what is not gone after the grace is ended by force."""
        self._shutdown.drain(self._coordinator)

    def restart_replica(self, number: int) -> None:
        """Let one replica leave at a step boundary, and start it again; or start one again that has left or failed.

        Returns at once. What has not left after the grace is killed, and started again. Raises `FtcommError` with the
        reason if that cannot be, or would end the job.
        """
        self._supervisor.restart(number)

    def resize(self, count: int) -> None:
        """Let the replicas 0 to `count` - 1 train, and the others leave at a step boundary; those that were away are
        started again. Returns at once. What has not left after the grace is killed.

        At most as many as the job was started with. Raises `FtcommError` with the reason if that cannot be, or if none
        of those that stay contributes.
        """
        self._supervisor.resize(count)

    # -- what is opened ----------------------------------------------------------------------------------------------

    def _open_monitor(self, stack: contextlib.AsyncExitStack) -> None:
        options = self.options
        self._kernel = KernelKills()
        stack.callback(self._kernel.close)
        job = JobMonitor(self.run_id, options.script, options.replicas, options.ranks_per_replica, self._host_name)
        written = options.history if self._hosts.is_first else None  # once for all hosts
        history = HistoryWriter(written, lambda text: self._loop.call_soon_threadsafe(self._report.log, text))
        self._monitor = MonitorLoop(job, self.known_steps, history)
        stack.push_async_callback(asyncio.to_thread, self._monitor.close)
        self._monitor.start()

    def _check_descriptors(self) -> None:
        ranks = len(self.options.started_here) * self.options.ranks_per_replica
        try:
            room_for(PER_RANK * ranks, f"ftcomm run, which starts {ranks} ranks on this host,")
        except TransportError as error:
            raise SettingsError(str(error)) from None

    async def _open_coordinator(
        self, stack: contextlib.AsyncExitStack, mine: Credentials, host: str, views: Path
    ) -> str:
        """Start the coordinator and torch's store, and on the first of several hosts wait for the others; returns the
        endpoint of that store. Raises `InitError`."""
        node = self.options.node
        self._coordinator = EmbeddedCoordinator(
            self.options,
            mine,
            host,
            views,
            self._events.hear,
            self._report.emit,
            0 if node is None else node.port,
            self._hosts.served,
        )
        stack.push_async_callback(self._stop_coordinator)
        await self._coordinator.start()
        self.endpoint = self.coordinator.endpoint
        store = TorchStore(host, self._report.log)
        stack.push_async_callback(store.close)
        await store.start()
        if node is not None:
            await self._hosts.gather(store.endpoint)
        return store.endpoint

    def _hosts_listener(self, recordings: Path) -> ReplicasElsewhere:
        return ReplicasElsewhere(
            self._job,
            self._removed,
            self._shutdown,
            self._events,
            judge=lambda replica: self._supervisor.ended(replica, away=self.away),
            exited=self._tell_exit,
            stands=lambda: stands_since(recordings) if self._runs_here else 0.0,
            log=self._report.log,
        )

    def _new_replicas(
        self, options: RunOptions, environment: Mapping[str, str], run_dir: RunDir
    ) -> list[ReplicaProcesses]:
        listener = ReplicaListener(
            self._report.line, self._rank_started, self._rank_exited, self._replica_ended, self._report.log
        )
        return [
            ReplicaProcesses(number, options, environment, run_dir, listener, self.network)
            for number in range(self.options.replicas)
        ]

    async def _open_admin(self, stack: contextlib.AsyncExitStack, path: Path) -> None:
        self._admin = AdminServer(path, lambda request: answer(self, request))
        stack.push_async_callback(self._admin.close)
        await self._admin.open()
        if self.options.dashboard is not None:
            dashboard = DashboardProcess(path, self.options.dashboard, self._report.log)
            stack.push_async_callback(asyncio.to_thread, dashboard.close)
        self._diagnosis = StallDiagnosis(lambda: status(self), self._tell_why)
        stack.push_async_callback(self._diagnosis.close)

    def _start(self) -> None:
        """Start all replicas of this host, and hear of the others."""
        for replica in self._job.replicas:
            if self._job.draining:  # interrupted before anything began
                replica.state = State.STOPPED
            elif replica.here:
                replica.start()
            else:  # until another is told
                replica.begin_life(1)
        self._hosts.ready()
        self._shutdown.check()

    async def _stop_coordinator(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            await coordinator.stop()

    async def _close_report(self) -> None:
        await asyncio.to_thread(self._report.close, 1.0 if self._job.killed else 30.0)

    def _handle_signals(self, stack: contextlib.AsyncExitStack) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("handle_signals works only in the main thread; call interrupt() from your own handler")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._loop.add_signal_handler(number, self._signalled)
                stack.callback(self._loop.remove_signal_handler, number)
        self._loop.add_signal_handler(signal.SIGUSR1, self._dump, "signal", 0.0)
        stack.callback(self._loop.remove_signal_handler, signal.SIGUSR1)

    def _signalled(self) -> None:
        now = self._loop.time()
        if now - self._signalled_at >= SAME:
            self._signalled_at = now
            self.interrupt()

    # -- what happens ------------------------------------------------------------------------------------------------

    def _rank_started(self, replica: int, rank: int, pid: int) -> None:
        self._report.emit("process_started", replica=replica, shard=rank, pid=pid)

    def _rank_exited(self, replica: int, rank: int, pid: int, code: int) -> None:
        killed_by = signal_name(code)
        exit_code = None if killed_by else code
        known: Event = {"replica": replica, "shard": rank, "pid": pid, "code": exit_code, "signal": killed_by}
        if code != 0:
            lines = self._job.replicas[replica].last_lines(rank)
            known["lines"] = [without(line, (self._token,)) for line in lines]
        if code == -signal.SIGKILL and self._kernel is not None and self._kernel.killed(pid):
            known["out_of_memory"] = True
        self._report.emit("process_exited", **known)
        if code != 0 and not self._job.replicas[replica].asked_to_end and not (self._job.is_ending or self._job.killed):
            self._dump("crash")
            if code > 0 and self._diagnosis is not None:
                self._diagnosis.look({"kind": "process_exited"})  # members may have made different calls
        if code > 0:  # by a signal: it may have finished first
            self._tell_exit(replica, code)

    def _tell_exit(self, replica: int, code: int) -> None:
        """Let the coordinator know that a rank has exited by an error."""
        if self._coordinator is not None:
            self._coordinator.server.exited(replica, code)
        else:
            self._hosts.tell(RankFailed(replica, code))

    def _replica_ended(self, replica: ReplicaProcesses) -> None:
        """All ranks of `replica` are gone."""
        if replica.state is not State.RUNNING:
            return  # it could not be started, and we have given it up already
        if not self._hosts.asks(replica.number, replica.starts):
            self._supervisor.ended(replica, away=self.away)

    # -- what is said -------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Tell what the coordinator says, and find out what is behind it."""
        self._dump(cause_of(event))
        self._report.record(event)
        if self._diagnosis is not None and stands_still(event):
            self._diagnosis.look(event)
        if (text := describe(event)) is not None:
            self._report.log(text)

    def _dump(self, cause: str, delay: float = DELAY) -> None:
        if cause and self._dumper is not None:
            self._dumper.dump(cause, delay)

    def _tell_why(self, found: Diagnosis) -> None:
        self._report.emit("diagnosis", verdict=msgspec.to_builtins(found.verdict))
        self._report.log(
            f"why: {' '.join(found.verdict.sentences(found.facts.at))} (all of it: ftcomm why {self.run_id})"
        )

    def _host_name(self, replica: int) -> str:
        """The name of the host of a replica: its address, if it has a network of its own."""
        node = self.options.node
        if node is not None and not self._job.replicas[replica].here:
            return f"host {self._job.node_of(self._job.replicas[replica])}"
        return socket.gethostname() if self.network is None else self._job.replicas[replica].host

    def _happened(self, event: Event) -> None:
        if self._monitor is not None:
            self._monitor.event(event)
        if self._admin is not None:
            self._admin.tell(event)
        self._on_event(event)

    def _hold_output(self, held: bool) -> None:
        for replica in self._job.replicas:
            replica.hold(held)


def _exit_code(job: JobState) -> int:
    """The exit code of `ftcomm run`: 0 if the training is complete and no replica was given up.

    How a replica died does not matter where a step loop says that the training is complete, nor who was not back in
    time then. Without a step loop an error or a crash fails the job, see `JobState.has_failed`.
    """
    if job.killed:
        return KILLED
    if job.lost or job.those_in(State.FAILED):
        return FAILED
    if job.draining:
        return FAILED if job.unclean else DRAINED
    # Each was told to go away on its own: that is a drain.
    return FINISHED if job.those_in(State.FINISHED) else DRAINED


def run(options: RunOptions) -> int:
    """Run a job from a command line: signals drain it, the exit code is returned. Blocks until the job is over."""
    return asyncio.run(Launcher(options).run(handle_signals=True))
