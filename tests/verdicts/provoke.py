"""A real job of three replicas under `ftcomm run`, in which one stall follows the other, and what was said of each."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec

from ftcomm.diagnosis.causes import StallCause
from ftcomm.errors import FtcommError
from ftcomm.launch.admin.client import AdminClient
from ftcomm.launch.admin.protocol import Status
from ftcomm.launch.diagnose import diagnose, place_of
from tests.rigs.orphan_watch import end_with_pytest
from tests.verdicts.acts import BEGINS, COMMAND, FIFO, FULL, KEPT, LATE, TAKEN
from tests.verdicts.kinds import CULPRIT, NAMED, StallKind, wrong

VERDICT_TIMEOUT = 180.0  # s for a verdict, and for a job that is whole again
HEARTBEAT, FLOOR, TIMEOUT = 3.0, 4.0, 16.0  # s
BEFORE = 0.3  # s by which the clock of the file and the times of a wait may be wrong
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # before a command: it is killed when this process ends
HOGS = 4  # processes on the CPU of the one that gets none
RATE = "1mbit"  # of a slow network

Event = dict[str, Any]


class Told(msgspec.Struct, frozen=True):
    """What was said of a stall. `mistake` is empty if all was right. `latency` is in seconds, from the deadline that
    defines the stall: the floor of the op timeout after the wait has begun, half of the heartbeat timeout after a
    network was cut, the error on a mismatch, the question of a person else. `reported` is from the first report of a
    rank on."""

    kind: str
    mistake: str
    latency: float
    reported: float | None
    who: str
    load: float
    others: tuple[str, ...] = ()  # verdicts on waits that had begun before: a busy machine has stalls of its own
    seconds: float = 0.0  # in all

    @property
    def sentence(self) -> str:
        how = f"{self.latency:.2f} s after the deadline, {self.seconds:.1f} s in all, load {self.load:.0f}"
        return f"{self.kind}: {self.mistake or 'right'} ({how}): {self.who}"


def with_small_disk(folder: Path) -> tuple[str, ...]:
    """Returns what to put before a command that is to have a small disk in `folder`: a mount that nobody else has, and
    that the kernel takes away with the last process of the command, however that ends."""
    folder.mkdir()
    mount = f'mount -t tmpfs -o size=1500k none {shlex.quote(str(folder))} && exec "$@"'
    return *ENDS_WITH_US, "unshare", "--mount", "sh", "-c", mount, "sh"


class StallJob(contextlib.AbstractContextManager["StallJob"]):
    """A job whose ranks run `tests.verdicts.acts`. `kinds` are to follow."""

    def __init__(self, folder: Path, kinds: list[StallKind]) -> None:
        self._folder, self._runtime = folder, folder / "run"
        self._runtime.mkdir(mode=0o700)
        os.mkfifo(folder / FIFO)
        names = {kind.name for kind in kinds}
        if "never joined" in names:
            (folder / LATE).touch()
        if "garbage collector" in names:
            (folder / KEPT).touch()
        if names & {"data loader", "compilation"}:
            (folder / "torch").touch()
        hosts = ["--hosts", "netns"] if any(kind.network for kind in kinds) else []
        times = ["--op-timeout", TIMEOUT, "--op-timeout-floor", FLOOR, "--heartbeat-timeout", HEARTBEAT]
        options = ["--replicas", 3, "--events", self._events_file, "--transport", "tcp", "--max-restarts", 1000]
        command = ["-m", "ftcomm.cli", "run", *options, *times, *hosts, "-m", "tests.verdicts.acts", folder]
        begins = with_small_disk(folder / FULL) if "full disk" in names else ENDS_WITH_US
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [*begins, sys.executable, *map(str, command)],
                env={**os.environ, "XDG_RUNTIME_DIR": str(self._runtime), "FTCOMM_HISTORY": "off"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if error[0] else 5)
        self._process.kill()  # the reaper kills what is left
        self._process.wait()

    @property
    def _full(self) -> Path:
        """The disk that is full, which only the processes of the job see under its name."""
        return Path(f"/proc/{self._process.pid}/root{self._folder}", FULL)

    @property
    def _events_file(self) -> Path:
        return self._folder / "events"

    def events(self) -> list[Event]:
        found = []
        if self._events_file.exists():
            for line in self._events_file.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
                    found.append(json.loads(line))
        return found

    def status(self) -> Status | None:
        for socket in self._runtime.glob("*/*/control"):
            with contextlib.suppress(FtcommError), AdminClient(socket) as remote:
                return remote.status()
        return None

    def until(self, what: str, found: Callable[[], Any]) -> Any:
        end = time.monotonic() + VERDICT_TIMEOUT
        while time.monotonic() < end and self._process.poll() is None:
            if value := found():
                return value
            time.sleep(0.05)
        log = (self._folder / "log").read_text()[-6000:]
        raise AssertionError(f"{what}: not within {VERDICT_TIMEOUT:g} s, or the job has ended:\n{log}")

    def whole(self) -> Status:
        """Wait until all contribute, and have come so far that it is known how long ops take: until then some may not
        reach others yet."""

        def contribute() -> Status | None:
            seen = self.status()
            found = seen is not None and all(x.contributes and x.pids and x.step > BEGINS for x in seen.replicas)
            return seen if found else None

        seen: Status = self.until("all contribute", contribute)
        return seen

    # -- stalls --------------------------------------------------------------------------------------------------

    def provoke(self, kind: StallKind) -> Told:
        """Let the stall happen once; returns what was said. The job is whole before and afterwards."""
        if kind.name == "never joined":
            return self._never_joined(kind)
        seen = self.whole()
        if not kind.heals:
            (self._folder / "torch").unlink(missing_ok=True)  # the next life of the culprit comes sooner
        before = len(self.events())
        pid, taken = seen.replicas[CULPRIT].pids["0"], time.time()
        if not kind.network or kind.name == "slow network":
            (self._folder / f"{COMMAND}.new").write_text(kind.name)
            (self._folder / f"{COMMAND}.new").rename(self._folder / COMMAND)
            self.until("the command is taken", lambda: not (self._folder / COMMAND).exists())
            pid = int((self._folder / TAKEN).read_text())  # another life may have come since
            taken = (self._folder / TAKEN).stat().st_mtime  # on a busy machine it is seen seconds later
        asked: Told | None = None
        with self._cause(kind, seen, pid):
            cut = time.time()  # later than `taken`: to enter the networks takes a moment
            if kind.name == "slow network":
                time.sleep(2 * FLOOR)  # it makes progress, so no rank reports it
                asked = self._ask(kind, seen)
            else:
                self.until(f"a verdict on {kind.name}", lambda: self._verdicts(before, taken))
        self._heal(kind, pid)
        if kind.network:
            time.sleep(3 * HEARTBEAT)  # TCP sends again, and a complaint that was made is acted upon, or withdrawn
        self.whole()
        if asked is not None:
            return asked
        load = os.getloadavg()[0]
        told, events = self._verdicts(before, taken), self.events()[before:]
        others = [e["verdict"]["who"] for e in events if e["kind"] == "diagnosis" and e not in told]
        mistakes = [
            f"{mistake} ({event['verdict']['who']})" for event in told if (mistake := wrong(kind, event["verdict"]))
        ]
        first = told[0]
        reports = [e["time"] for e in events if e["kind"] in ("stalled", "suspect") and e["time"] <= first["time"]]
        if kind.network:
            deadline = cut + HEARTBEAT / 2  # then those that hear nothing complain
        elif kind.cause in (StallCause.MISMATCH, StallCause.SWAPPED):
            deadline = min(e["time"] for e in events if e["kind"] == "step_failed" or e == first)
        else:
            deadline = first["verdict"]["since"] + FLOOR
        reported = first["time"] - min(reports) if reports else None
        mistake = "; ".join(mistakes)
        return Told(
            kind.name, mistake, first["time"] - deadline, reported, first["verdict"]["who"], load, tuple(others)
        )

    def _verdicts(self, before: int, taken: float) -> list[Event]:
        """Returns the verdicts on waits that have begun since the stall was provoked."""
        told = [event for event in self.events()[before:] if event["kind"] == "diagnosis"]
        return [event for event in told if event["verdict"]["since"] > taken - BEFORE]

    def _never_joined(self, kind: StallKind) -> Told:
        def waits() -> Status | None:
            """Whether the others have come, and wait."""
            seen = self.status()
            if seen is None or not all(replica.pids for replica in seen.replicas):
                return None
            with self._runtime_dir():
                come = {path.name.partition(".")[0] for path in place_of(seen).folder.glob("*.recording")}
            return seen if come == {"replica-0", "replica-1"} else None

        return self._ask(kind, self.until("two replicas wait for the third", waits))

    def _ask(self, kind: StallKind, seen: Status) -> Told:
        asked = time.time()
        with self._runtime_dir():
            found = diagnose(seen)
        verdict = msgspec.to_builtins(found.verdict)
        return Told(
            *(kind.name, wrong(kind, verdict), time.time() - asked, None, verdict["who"], os.getloadavg()[0]),
        )

    @contextlib.contextmanager
    def _runtime_dir(self) -> Iterator[None]:
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = str(self._runtime)
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_RUNTIME_DIR"]
            else:
                os.environ["XDG_RUNTIME_DIR"] = before

    def _cause(self, kind: StallKind, seen: Status, pid: int) -> AbstractContextManager[object]:
        """What is done from outside while the stall lasts."""
        if kind.name == "frozen process":
            return _stopped(pid)
        if kind.name == "no CPU":
            return _starved(pid)
        if kind.network:
            return _network(kind, seen)
        return contextlib.nullcontext()

    def _heal(self, kind: StallKind, pid: int) -> None:
        if kind.network or kind.cause in (StallCause.MISMATCH, StallCause.SWAPPED):
            return
        if not kind.heals:
            with contextlib.suppress(ProcessLookupError):  # it was removed before
                os.kill(pid, signal.SIGKILL)
        elif kind.name == "full disk":
            (self._full / "checkpoint").unlink(missing_ok=True)
            (self._full / "healed").touch()
            self.whole()
            (self._full / "healed").unlink()
        else:
            with contextlib.suppress(OSError):  # nobody reads: it was removed before
                fd = os.open(self._folder / FIFO, os.O_WRONLY | os.O_NONBLOCK)
                os.write(fd, b"x")
                os.close(fd)


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _starved(pid: int) -> Iterator[None]:
    """All threads of a process on one CPU, behind all others there."""
    cpus = os.sched_getaffinity(0)
    first = {min(cpus)}
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(HOGS)]
    for hog in hogs:
        os.sched_setaffinity(hog.pid, first)
    try:
        _schedule(pid, os.SCHED_IDLE, first)
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        _schedule(pid, os.SCHED_OTHER, cpus)


def _schedule(pid: int, policy: int, cpus: set[int]) -> None:
    with contextlib.suppress(OSError):  # the kernel may share the CPU between sessions first
        Path(f"/proc/{pid}/autogroup").write_text("0" if policy == os.SCHED_OTHER else "19")
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
            os.sched_setaffinity(int(task.name), cpus)


@contextlib.contextmanager
def _network(kind: StallKind, seen: Status) -> Iterator[None]:
    from ftcomm.lab.chaos.network_faults import BURST, QUEUE, Both, Misrouted, Shaped, Unplugged

    there, here = [1], [CULPRIT]
    causes: dict[str, Callable[[], Any]] = {
        "cut network": lambda: Both(Misrouted(seen, here, there), Misrouted(seen, there, here)),
        "cut network, one way": lambda: Misrouted(seen, here, there),
        "dead host": lambda: Unplugged(seen, CULPRIT),
        "slow network": lambda: Shaped(seen, CULPRIT, "tbf", rate=RATE, burst=BURST, latency=QUEUE),
    }
    fault = causes[kind.name]()
    try:
        yield
    finally:
        fault.close()


def once(name: str, folder: Path) -> tuple[Told, Event]:
    """A job of its own for one stall; returns what was said, and the verdict."""
    kind = NAMED[name]
    with StallJob(folder, [kind]) as job:
        told = job.provoke(kind)
        verdicts = [event["verdict"] for event in job.events() if event["kind"] == "diagnosis"]
    return told, verdicts[0] if verdicts else {}


def run(kinds: list[StallKind], found: Queue[Told]) -> None:
    """Lets a job have these stalls, one after the other, and a new one go on where it ends; tells what was said of
    each."""
    end_with_pytest()  # or whoever has begun this process
    rest = list(kinds)
    while rest:
        with tempfile.TemporaryDirectory() as folder, StallJob(Path(folder), rest) as job:
            whole = True
            while rest and whole:
                kind, begun = rest.pop(0), time.monotonic()
                try:
                    told = job.provoke(kind)
                except (AssertionError, OSError) as error:
                    print(error, flush=True)  # with what the job has said
                    said = f"no verdict: {str(error).splitlines()[0]}"
                    told, whole = Told(kind.name, said, math.nan, None, "", os.getloadavg()[0]), False
                found.put(msgspec.structs.replace(told, seconds=time.monotonic() - begun))
