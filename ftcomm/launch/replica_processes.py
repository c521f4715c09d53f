"""One replica on this machine: its ranks, which live and die together, and their output."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping

from ftcomm.control.agent_ranks import agent_ranks
from ftcomm.control.links import BACKLOG
from ftcomm.control.rank_name import rank_name
from ftcomm.errors import InitError
from ftcomm.launch import reaper
from ftcomm.launch.hosts import HostNetwork
from ftcomm.launch.options import RunOptions
from ftcomm.launch.output import LineSplitter, LogFile
from ftcomm.launch.policy import Restarts, State
from ftcomm.launch.process import RankProcess
from ftcomm.launch.rundir import RunDir
from ftcomm.launch.several_hosts.messages import Heard, ReplicaIs
from ftcomm.launch.torchrun import environment as torchrun

LINES, WIDTH = 12, 300  # the last lines of a rank that are remembered, and bytes of each


@dataclasses.dataclass(frozen=True)
class Death:
    """The first rank that ended badly; `code` as in `Popen.returncode`."""

    rank: int
    pid: int
    code: int


@dataclasses.dataclass(frozen=True)
class ReplicaListener:
    """The listener to a replica. All of it is called on the event loop and must not block."""

    line: Callable[[int, int, int, bytes], None]  # replica, rank, stream (1 or 2), line without its end
    started: Callable[[int, int, int], None]  # replica, rank, pid
    exited: Callable[[int, int, int, int], None]  # replica, rank, pid, code
    ended: Callable[[ReplicaProcesses], None]  # all its ranks are gone
    trouble: Callable[[str], None]  # something to tell the user


class ReplicaProcesses:
    """Starts over after `start()`; `state` and `restarts` are others' to set. Lives on one event loop."""

    def __init__(
        self,
        number: int,
        options: RunOptions,
        environment: Mapping[str, str],
        run_dir: RunDir,
        listener: ReplicaListener,
        network: HostNetwork | None = None,
    ) -> None:
        self.number = number
        self.state = State.WAITING
        self.restarts = Restarts()
        self.starts = 0
        self.started = 0.0  # time.monotonic()
        self.timer: asyncio.TimerHandle | None = None  # of the next start, while waiting
        self._begin_anew()
        self.reason = ""  # why it is not in the job, or was not when it last ended; "" while it contributes
        # What no later life of it has made good, by contributing:
        self.failed_at_end = False  # it did all of its training, and failed then
        self.failed_by_itself = False  # it contributed, and ended by an error or a crash, not by a signal from outside
        self._options = options
        self._environment = environment
        self._run_dir = run_dir
        self._listener = listener
        self._network = network
        self.place = 0 if options.hosts is None else options.hosts.place(number)  # its host in `network`
        self.host = options.host if network is None else network.address(self.place)
        self.here = number in options.started_here  # started by this launcher, and not by that of another host
        self._ranks: dict[int, RankProcess] = {}
        self._last: dict[int, deque[bytes]] = {}

    @property
    def holds_state(self) -> bool:
        """Whether it holds the state of the training: this life of it contributed, and has not ended."""
        return self.state is State.RUNNING and self.contributed

    def pids(self) -> dict[tuple[int, int], int]:
        return {(self.number, rank): process.pid for rank, process in self._ranks.items()}

    def last_lines(self, rank: int) -> list[str]:
        """Returns the last lines that a rank has written since it started."""
        return [line.decode(errors="replace") for line in self._last.get(rank, ())]

    def begin_life(self, starts: int) -> None:
        """Note that it is started, for so many times now: nothing of its last life holds for this one."""
        self._begin_anew()
        self.state = State.RUNNING
        self.started = time.monotonic()
        self.timer = None
        self.starts = starts

    def _begin_anew(self) -> None:
        """Forget what holds for one life."""
        self.death: Death | None = None
        self.asked_to_end = False  # by the launcher, so its death is no failure
        self.came = False  # to a coordinator since it started: a view may still have its last life before
        self.ahead = False  # of what its launcher on another host has told: its next life has come to the coordinator
        self.joining = ""  # into a running job, and not in yet: "prepares", and then "joins"
        self.joined = False  # was in a view since it started
        self.contributed = False  # in some view since it started, so it held the state of the training
        self.said_finished = False  # since it started
        self.trained = False  # all steps of its newest loop, since it started
        self.left = False  # at a step boundary, since it started
        self.gives_up = False  # since it started: its script has ended with an error, and the process ends by itself
        self.removed = ""  # since it started: why the job goes on without it, though its process lived
        self.restart_wanted = False  # a restart was asked for: start again as soon as this life has ended
        self.unwanted = False  # it was asked to leave, and is not started again by itself

    def cancel_start(self, state: State) -> None:
        """Give the next start up, if there is to be one, and set the state."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None
        self.state = state

    def comes(self) -> None:
        """Note that a process of this replica has come to the coordinator, maybe before the launcher that started it
        has told so."""
        if self.came and not self.here:
            self.begin_life(self.starts)
            self.ahead = True
        self.came = True

    def is_told(self, message: ReplicaIs) -> None:
        """Note what its launcher on another host tells of it."""
        if message.starts != self.starts or (message.state is State.RUNNING and self.state is not State.RUNNING):
            if not self.ahead:
                self.begin_life(message.starts)
            self.starts, self.ahead = message.starts, False
        self.state = message.state

    def heard(self, number: int) -> Heard:
        """Returns what was heard of its present life, as the answer to question `number`."""
        said = self.joined, self.contributed, self.said_finished, self.trained, self.left
        return Heard(self.number, number, self.starts, *said, self.removed)

    def note(self, message: Heard) -> None:
        """Note what host 0 has heard of it, if that is of the life that is known here."""
        if message.starts == self.starts:
            self.came |= message.joined
            self.joined |= message.joined
            self.contributed |= message.contributed
            self.said_finished |= message.finished
            self.trained |= message.trained
            self.left |= message.left

    def start(self) -> None:
        """Start all its ranks. Raises `InitError` if the system refuses a process; those already started are killed."""
        self.begin_life(self.starts + 1)
        environment = {
            **self._environment,
            **self._options.env,
            "FTCOMM_REPLICA": str(self.number),
            "FTCOMM_HOST": self.host,
        }
        with contextlib.ExitStack() as stack:
            if self._network is not None:
                stack.enter_context(self._network.inside(self.place))
            leader: socket.socket | None = None
            if self._options.ranks_per_replica > 1:
                # Bound here and inherited by shard 0: no other process can take the port in between, and a rank that
                # comes first finds its leader listening.
                leader = stack.enter_context(socket.create_server((self.host, 0), backlog=BACKLOG))
                environment["FTCOMM_LEADER"] = f"{self.host}:{leader.getsockname()[1]}"
            agent: socket.socket | None = None
            for rank in range(self._options.ranks_per_replica):
                own = {"FTCOMM_SHARD": str(rank)}
                own |= torchrun.of_rank(self._options, self.number, rank, self.starts - 1)
                pass_fds: tuple[int, ...] = ()
                if leader is not None and rank == 0:
                    pass_fds = (leader.fileno(),)
                    own["FTCOMM_LEADER_FD"] = str(leader.fileno())
                agents = agent_ranks(rank, self._options.host_ranks, self._options.ranks_per_replica)
                if agents and rank == agents.start:
                    agent = stack.enter_context(socket.create_server((self.host, 0), backlog=BACKLOG))
                    pass_fds = (agent.fileno(),)
                    own["FTCOMM_HOST_AGENT_FD"] = str(agent.fileno())
                if agents and agent is not None:
                    own["FTCOMM_HOST_AGENT"] = f"{self.host}:{agent.getsockname()[1]}"
                    own["FTCOMM_HOST_RANKS"] = str(self._options.host_ranks)
                self._start_rank(rank, {**environment, **own}, pass_fds)

    def _start_rank(self, rank: int, environment: Mapping[str, str], pass_fds: tuple[int, ...]) -> None:
        mark = self._run_dir.mark(self.number, self.starts - 1, rank)
        splitters = {1: LineSplitter(), 2: LineSplitter()}
        log = self._log_file(rank)
        last = self._last[rank] = deque(maxlen=LINES)

        def on_line(stream: int, line: bytes) -> None:
            last.append(line[:WIDTH])
            self._listener.line(self.number, rank, stream, line)

        def on_output(stream: int, data: bytes) -> None:
            if log is not None:
                log.write(data)
            for line in splitters[stream].feed(data, time.monotonic()):
                on_line(stream, line)

        def on_exit(code: int) -> None:
            for stream, splitter in splitters.items():
                for line in splitter.flush():
                    on_line(stream, line)
            if log is not None:
                log.close()
            self._rank_ended(rank, mark, code)

        try:
            environment = {**environment, reaper.MARK: mark}
            process = RankProcess(self._options.command(), environment, pass_fds, on_output, on_exit)
        except OSError as error:
            self.kill()
            raise InitError(
                f"cannot start {rank_name(self.number, rank)}: {error.strerror or error}. Raise the limit on "
                "processes (ulimit -u) or open files (ulimit -n), or start fewer replicas."
            ) from error
        self._ranks[rank] = process
        self._run_dir.started(process.pid)
        self._listener.started(self.number, rank, process.pid)

    def _log_file(self, rank: int) -> LogFile | None:
        if self._options.log_dir is None:
            return None
        name = f"replica-{self.number}.shard-{rank}.incarnation-{self.starts - 1}.log"
        return LogFile(self._options.log_dir / name, self._listener.trouble)

    def _rank_ended(self, rank: int, mark: str, code: int) -> None:
        pid = self._ranks.pop(rank).pid
        self._run_dir.ended(pid, mark)
        if code != 0 and self.death is None:
            self.death = Death(rank, pid, code)
            self.kill()  # the others of this replica
        self._listener.exited(self.number, rank, pid, code)
        if not self._ranks:
            self._listener.ended(self)

    def signal(self, number: int) -> None:
        """Send a signal to each of its ranks."""
        for process in self._ranks.values():
            process.signal(number)

    def kill(self) -> None:
        """SIGKILL to its ranks and all in their process groups."""
        for process in self._ranks.values():
            process.kill()

    def hold(self, held: bool) -> None:
        """Stop or go on reading its output."""
        for process in self._ranks.values():
            process.hold(held)


def rank_environment(options: RunOptions, coordinator: str, token: str, job: str, store: str) -> dict[str, str]:
    """Returns the variables that all ranks of a run have in common, on top of the launcher's own environment but for
    the token of the live view: a script that prints its environment as it fails would show it to whoever may read the
    history."""
    agents = ("FTCOMM_HOST_AGENT", "FTCOMM_HOST_AGENT_FD", "FTCOMM_HOST_RANKS")
    inherited = ("FTCOMM_LEADER", "FTCOMM_LEADER_FD", *agents, *torchrun.OUTER)  # of another launcher around us
    kept = os.environ.keys() - {*inherited, "FTCOMM_DASHBOARD_TOKEN"}
    environment = {name: os.environ[name] for name in kept}
    environment.update(torchrun.of_job(options, job, store))
    environment.update(
        FTCOMM_COORDINATOR=coordinator,
        FTCOMM_TOKEN=token,
        FTCOMM_JOB=job,
        FTCOMM_STORE=store,
        FTCOMM_REPLICAS=str(options.replicas),
        FTCOMM_RANKS_PER_REPLICA=str(options.ranks_per_replica),
        FTCOMM_TRANSPORT=options.transport,
        FTCOMM_HEARTBEAT_TIMEOUT=repr(options.timeouts.heartbeat),
        FTCOMM_OP_TIMEOUT_FLOOR=repr(options.timeouts.op_floor),
        FTCOMM_OP_TIMEOUT=repr(options.timeouts.op),
        FTCOMM_INIT_TIMEOUT=repr(options.init_timeout),
    )
    # Each rank's numerical libraries would else start a thread for every core of the machine.
    threads = len(os.sched_getaffinity(0)) // (len(options.started_here) * options.ranks_per_replica)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    return environment
