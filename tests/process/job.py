"""Real jobs for tests: real processes, a real coordinator, real kills, started in milliseconds.

A fork server imports torch and ftcomm once; every rank is a fork of it, so that two hundred deaths cost two hundred
forks and not two hundred imports. The coordinator runs in a thread of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import pytest

import ftcomm
from ftcomm.control.agent_ranks import agent_ranks
from ftcomm.control.handshake import Credentials
from ftcomm.control.liveness import state
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.timeouts import Timeouts
from ftcomm.settings import Settings
from ftcomm.settings.engines import engine_kind
from tests.rigs import forked_companions
from tests.rigs.deadlines import DEADLINE
from tests.rigs.orphan_watch import end_with_pytest
from tests.rigs.ports import free_port

TOKEN = "token-of-the-test"
JOB = "job of the test"
ENGINE = os.environ.get("FTCOMM_ENGINE", "host")  # that all ranks of all jobs of this session have
MOST = 1 << 30 if ENGINE == "host" else 50_000  # elements: a chunk takes the interpreter as long as 4 MB the host
SLOWER = 1 if ENGINE == "host" else 10  # roughly, so that tests end within their times
SILENCE = 5.0  # s, the heartbeat timeout where a test waits for it: so long that on a busy machine nobody else is lost
STALL: dict[str, float] = {  # where a test waits for a stall, as which a stopped process is removed
    "heartbeat_timeout": SILENCE,
    "op_timeout": 16.0,
    "op_floor": 6.0,
}

_context = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes seconds; a checkpoint, and what ranks of `ftcomm
# bench` and workers of pytest have in common, tenths of one.
_OURS = ["ftcomm.groups.default_group", "ftcomm.training.steps", "ftcomm.bench.job", "ftcomm.training.checkpoint"]
_TESTS = ["tests.process.job", "tests.process.exchange_process"]
PRELOADED = [
    "torch",
    "torch._dynamo",
    *_OURS,
    *_TESTS,
    *forked_companions.MODULES,
    "tests.rigs.rewritten_kernels",
    "tests.rigs.frozen",
]
_context.set_forkserver_preload(PRELOADED)


def trainers() -> list[str]:
    """Returns what ranks of `tests/integrations` import first, as far as it is installed. It takes seconds."""
    libraries = ("transformers.trainer", "lightning.pytorch")
    return [name for name in libraries if find_spec(name.partition(".")[0]) is not None]


def only_on_host(what: str, engine: str = ENGINE) -> None:
    """Skip the test that asks for `what` if the engine is another."""
    if engine != "host":
        pytest.skip(f"FTCOMM_ENGINE={engine} has no {what}")


def fewer(count: int) -> int:
    """As many steps, or losses, as do not take much longer than `count` of them with the host's engine."""
    return max(1, count // SLOWER)


Body = Callable[[ftcomm.Group, "Notes", dict[str, Any]], None]


class Notes:
    """What a rank writes down, a line at a time, so that nothing is lost when it is killed."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **fields: Any) -> None:
        os.write(self._fd, json.dumps(fields).encode() + b"\n")


def _rank(
    settings: Settings,
    path: Path,
    body: Body,
    arguments: dict[str, Any],
    listener: socket.socket | None,
    agents: socket.socket | None,
    fork_companions: bool,
) -> None:
    """One rank. It listens for its leader, or for the agent of its host."""
    end_with_pytest()
    if fork_companions:
        forked_companions.in_this_rank()
    os.environ.setdefault("FTCOMM_LOG", "error")
    faulthandler.register(signal.SIGUSR1, file=path.with_suffix(".stack").open("w"))
    notes = Notes(path)
    if listener is not None:
        settings = dataclasses.replace(settings, leader_fd=listener.detach())
    if agents is not None:
        settings = dataclasses.replace(settings, host_agent_fd=agents.detach())
    try:
        arguments.get("prepare", lambda *_: None)(settings, arguments)
        group = ftcomm.init(settings)
        notes.write(kind="joined", epoch=group.epoch)
        body(group, notes, arguments)
        ftcomm.shutdown()
        notes.write(kind="end", drained=group.drained)
    except BaseException as error:
        notes.write(kind="error", type=type(error).__name__, text=str(error))
        raise SystemExit(1) from None


class OwnCoordinator:
    """`ftcomm coordinator`, which says goodbye to nobody when it is killed."""

    def __init__(self, command: list[str], log: IO[str]) -> None:
        self._command, self._log = command, log
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "FTCOMM_TOKEN": TOKEN, "FTCOMM_JOB": JOB}
        self._process = subprocess.Popen(self._command, env=environment, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        return self._process.wait(DEADLINE)


class Job:
    """`with Job(tmp_path, replicas=4, body=...) as job:` starts all ranks; leaving kills whatever still runs. A test
    that fails in it shows `what_happened`."""

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int,
        body: Body,
        ranks: int = 1,
        transport: str = "auto",
        heartbeat_timeout: float = 10.0,  # no test waits for it; long, so that a slow machine loses nobody
        op_timeout: float = 60.0,
        op_floor: float | None = None,
        verify: bool = False,
        engine: str = ENGINE,
        algorithm: str = "auto",
        data: str = "none",
        host_ranks: int = 0,
        fork_companions: bool = True,
        **arguments: Any,
    ) -> None:
        """`host_ranks`: so many ranks of a replica count as those of one host, and have an agent. `fork_companions`:
        leaders, agents and witnesses are forks, too, and no new interpreters. `arguments` are handed to the body, with
        the folder as `marks`; one named `prepare` is called with the settings and them before a rank joins. Skips the
        test if the engine cannot do what it asks for; over a transport where kernels cannot run whole ops, those of the
        session reduce."""
        if transport not in ("auto", "shm"):
            engine = engine_kind(engine).reducer or engine
        if verify and engine_kind(engine).runs_ops:
            only_on_host("FTCOMM_VERIFY=1", engine)
        self.folder, self.replicas, self.ranks, self._host_ranks = folder, replicas, ranks, host_ranks
        self._fork_companions = fork_companions
        if "elements" in arguments:
            arguments["elements"] = min(arguments["elements"], MOST)
        self._body, self._arguments = body, {**arguments, "marks": str(folder)}
        for replica in range(replicas):
            (folder / f"pace-{replica}").write_bytes(bytes(8 * ranks))  # steps of the ranks, see `bodies.Pace`
        timeouts = Timeouts.derive(op_timeout, heartbeat_timeout, op_floor)
        self._settings = dict(
            transport=transport, timeouts=timeouts, verify=verify, engine=engine, algorithm=algorithm, data=data
        )
        self.processes: dict[tuple[int, int], Any] = {}
        self.events: list[dict[str, Any]] = []
        self._read: dict[Path, tuple[int, list[dict[str, Any]]]] = {}  # bytes of each life's notes, and their lines
        self._reading = threading.Lock()
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self._server(free_port())
        self.do(self.server.start())
        self._lives = 0

    # -- the coordinator -----------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where the ranks look for the coordinator."""
        return self.server.endpoint

    def _server(self, port: int, **other: Any) -> CoordinatorServer:
        settings = dict(
            replicas=self.replicas,
            ranks_per_replica=self.ranks,
            store=self.folder / "views",
            timeouts=self._settings["timeouts"],
            on_event=self._event,
        )
        return CoordinatorServer(credentials=Credentials(TOKEN, JOB), port=port, **{**settings, **other})

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE)

    def stop_coordinator(self) -> None:
        self.do(self.server.stop())

    def start_coordinator(self, **other: Any) -> None:
        """At the same address; with `other` arguments, if somebody makes a mistake."""
        self.server = self._server(int(self.server.endpoint.rpartition(":")[2]), **other)
        self.do(self.server.start())

    @contextlib.contextmanager
    def own_coordinator(self) -> Iterator[OwnCoordinator]:
        """A process in place of the coordinator of the test, with its file of views; afterwards there is none."""
        self.stop_coordinator()
        timeouts = self._settings["timeouts"]
        command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "coordinator"]
        for option, value in (
            ("--replicas", self.replicas),
            ("--ranks-per-replica", self.ranks),
            ("--port", self.server.endpoint.rpartition(":")[2]),
            ("--store", self.folder / "views"),
            ("--heartbeat-timeout", timeouts.heartbeat),
            ("--op-timeout", timeouts.op),
            ("--op-timeout-floor", timeouts.op_floor),
        ):
            command += [option, str(value)]
        with (self.folder / "coordinator.log").open("w") as log:
            own = OwnCoordinator(command, log)
            try:
                yield own
            finally:
                own.kill()

    def drain(self) -> None:
        self._loop.call_soon_threadsafe(self.server.drain)

    def _event(self, event: dict[str, Any]) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_event(self, what: str, found: Callable[[list[dict[str, Any]]], bool], timeout: float = DEADLINE) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: found(self.events), timeout):
                raise AssertionError(f"no {what} within {timeout:g} s")

    def contribute(self, replicas: set[int], since: int = 0) -> bool:
        """Whether the newest view has all of `replicas`, contributing."""
        views = [event for event in self.events[since:] if event["kind"] == "view"]
        return bool(views) and replicas <= {x["replica"] for x in views[-1]["members"] if x["contributing"]}

    def wait_contributing(self, replicas: set[int], since: int = 0) -> None:
        """Until that is so."""
        what = f"view in which {sorted(replicas)} contribute"
        self.wait_event(what, lambda _: self.contribute(replicas, since))

    # -- processes -----------------------------------------------------------------------------------------------

    def host(self, replica: int, rank: int = 0) -> str:
        """The address that its ranks listen on."""
        return "127.0.0.1"

    def _listener(self, replica: int) -> socket.socket:
        """At which its leader is to listen."""
        return socket.create_server((self.host(replica), 0))

    def start(self, replica: int) -> None:
        self._lives += 1
        listener = self._listener(replica) if self.ranks > 1 else None
        leader = f"{self.host(replica)}:{listener.getsockname()[1]}" if listener else ""
        agent = ""
        for rank in range(self.ranks):
            shards = agent_ranks(rank, self._host_ranks, self.ranks)
            agents = self._listener(replica) if rank in shards[:1] else None
            agent = f"{self.host(replica)}:{agents.getsockname()[1]}" if agents else agent
            settings = Settings(
                coordinator=self.endpoint,
                token=TOKEN,
                job=JOB,
                replica=replica,
                replicas=self.replicas,
                shard=rank,
                ranks_per_replica=self.ranks,
                leader=leader,
                host_agent=agent,
                host_ranks=self._host_ranks,
                host=self.host(replica, rank),
                init_timeout=DEADLINE,
                **self._settings,
            )
            path = self.folder / f"notes-{replica}-{rank}-{self._lives:04d}"
            sockets = listener if rank == 0 else None, agents
            arguments = settings, path, self._body, self._arguments, *sockets, self._fork_companions
            process = _context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            self.processes[replica, rank] = process
            if agents:
                agents.close()  # the first rank of the host has inherited it
        if listener:
            listener.close()  # rank 0 has inherited it

    def kill(self, replica: int, rank: int | None = None) -> None:
        """SIGKILL to one rank, or to all of the replica; the others of a replica die with it, as under `ftcomm run`:
        they stand still meanwhile, so that none of them has time to say that it is left alone."""
        order = [rank] if rank is not None else []
        order += [other for other in range(self.ranks) if other not in order]
        for each in order[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[replica, each].pid, signal.SIGSTOP)
        for each in order:
            self.processes[replica, each].kill()

    def signal(self, replica: int, number: signal.Signals) -> None:
        for rank in range(self.ranks):
            os.kill(self.processes[replica, rank].pid, number)

    def join(self, replica: int, timeout: float = DEADLINE) -> list[int | None]:
        """Exit codes of the replica's ranks."""
        end = time.monotonic() + timeout
        for rank in range(self.ranks):
            self.processes[replica, rank].join(max(0.0, end - time.monotonic()))
            assert not self.processes[replica, rank].is_alive(), f"replica {replica} hangs"
        return [self.processes[replica, rank].exitcode for rank in range(self.ranks)]

    def __enter__(self) -> Job:
        for replica in range(self.replicas):
            self.start(replica)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            print(self.what_happened())
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError, AttributeError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
        for process in self.processes.values():
            process.join(10)
        with contextlib.suppress(Exception):
            self.do(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # -- what they wrote down ------------------------------------------------------------------------------------

    def _notes(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("notes-*") if not path.suffix)

    def notes(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(replica, rank, line) of all lives; a last line cut short by a kill is left out."""
        for path in self._notes():
            _, replica, rank, _ = path.name.split("-")
            for line in self._lines(path):
                yield int(replica), int(rank), line

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        """Parses what was added since the last look: tests look fifty times a second, for as long as ranks write."""
        with self._reading:
            seen, lines = self._read.get(path, (0, []))
            with path.open("rb") as file:
                file.seek(seen)
                added = file.read().rpartition(b"\n")[0]
            if added:
                lines = lines + [json.loads(line) for line in added.split(b"\n")]
                self._read[path] = seen + len(added) + 1, lines
            return lines

    def what_happened(self) -> str:
        """The newest events, the last notes of each life, what the kernel says of each process, the errors, the state
        of the coordinator, and where each rank stands.

        Only for a job that is over: Python writes the stacks of threads while they run, which may end the process. That
        is likely in one that was stopped, where any thread may take the signal.
        """
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # they write it in a signal handler; there is nothing to wait for
        lines = [f"{time.monotonic():.3f} is now; the events:", *map(str, self.events[-30:])]
        for path in self._notes():
            notes = path.read_text().splitlines()
            lines.append(f"{path.name}: {len(notes)} notes, the last: {notes[-2:]}")
        for (replica, rank), process in self.processes.items():
            pid, code = process.pid, process.exitcode
            lines.append(f"replica {replica} shard {rank}: process {pid}, state {state(pid)!r}, exit code {code}")
        lines += [f"errors: {self.errors()}", f"coordinator: {self.server._machine and vars(self.server._machine)}"]
        stacks = sorted(self.folder.glob("notes-*.stack"))
        return "\n".join([*lines, *(f"{path.name}:\n{path.read_text()}" for path in stacks)])

    def errors(self) -> list[tuple[int, int, str]]:
        return [(r, k, f"{n['type']}: {n['text']}") for r, k, n in self.notes() if n["kind"] == "error"]
