"""`ftcomm bench dashboard`: how much of a core the live view takes, for a small job and for one of 98,304 ranks.

The job is emulated: a monitor behind a real admin socket, which hears of a kill now and then and of new waits of all
ranks each second; up to `RECORDED` ranks also have recordings, in which ops are written. The server is the one of
`ftcomm dashboard`, with a reader that takes every event. With --browser Chromium shows the page, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import mmap
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, option
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch.admin import protocol
from ftcomm.launch.admin.server import AdminServer
from ftcomm.launch.commands.option_types import Parsed, Several
from ftcomm.monitoring.job import JobMonitor
from ftcomm.recorder import files, layout
from ftcomm.recorder.layout import GroupKind
from ftcomm.recorder.recorder import Owner, Recorder

RECORDED = 1024  # ranks that a host may have
OPS = 20.0  # a second that each of them records
SMALL, BIG = 2.0, 10.0  # per cent of a core that are allowed, up to RECORDED ranks and beyond
WARM = 3.0  # s before the clock runs
TICKS = os.sysconf("SC_CLK_TCK")
_ADDRESS = re.compile(r"live view: (?P<url>http://127\.0\.0\.1:(?P<port>\d+)/\?token=(?P<token>\S+))")


def parse_job(text: str) -> tuple[int, int]:
    """Takes `16x8`. Raises `SettingsError`."""
    if (found := re.fullmatch(r"(\d{1,4})x(\d{1,5})", text)) is None or "0" in found.groups():
        raise SettingsError(f"{text}: expected REPLICASxRANKS, as in 16x8.")
    return int(found.group(1)), int(found.group(2))


JOBS = Several(Parsed("JOB", parse_job, lambda job: f"{job[0]}x{job[1]}"), "JOB,...")


@dataclasses.dataclass(frozen=True)
class DashboardRequest:
    """Measure how much of a core the live view of emulated jobs takes.

    monitor: in the launcher, to sample and to answer. server: the process of ftcomm dashboard, with one reader.
    browser: Chromium, if asked for. The page is told of changes once a second.
    """

    jobs: Sequence[tuple[int, int]] = option(((16, 8), (12, 8192)), kind=JOBS, help="Replicas x ranks of each.")
    seconds: float = option(20.0, help="For so long each.")
    browser: bool = option(False, help="Also let Chromium show the page (selenium, chromium, chromium-driver).")

    def smoke(self) -> DashboardRequest:
        """A job of 2x2 for a second, to see that it runs."""
        return dataclasses.replace(self, jobs=((2, 2),), seconds=1.0)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if not self.seconds > 0:
            raise SettingsError(f"--seconds {self.seconds:g}: expected a positive number.")


class DashboardLoad(msgspec.Struct, frozen=True):
    """The load of one job's live view, in per cent of a core."""

    replicas: int
    ranks: int
    seconds: float
    monitor: float
    server: float
    browser: float | None
    events: int
    bytes: int
    allowed: float

    @property
    def good(self) -> bool:
        return self.monitor + self.server <= self.allowed and self.events >= 0.8 * self.seconds


COLUMNS = (
    Column("job", "", 10, lambda one: f"{one.replicas}x{one.ranks}"),
    Column("monitor", "(% core)", 8, lambda one: f"{one.monitor:.2f}"),
    Column("server", "(% core)", 8, lambda one: f"{one.server:.2f}"),
    Column("browser", "(% core)", 8, lambda one: "-" if one.browser is None else f"{one.browser:.1f}"),
    Column("events", "(1/s)", 7, lambda one: f"{one.events / one.seconds:.2f}"),
    Column("told", "(kB/s)", 8, lambda one: f"{one.bytes / 1e3 / one.seconds:.2f}"),
    Column("allowed", "(% core)", 8, lambda one: f"{one.allowed:g}"),
)


def measure(request: DashboardRequest, report: BenchReport) -> None:
    for number, (replicas, ranks) in enumerate(request.jobs):
        report.progress(f"{replicas}x{ranks}", number / len(request.jobs))
        report.add(_measure(replicas, ranks, request))


def _measure(replicas: int, ranks: int, request: DashboardRequest) -> DashboardLoad:
    allowed = SMALL if replicas * ranks <= RECORDED else BIG
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address, job, pid = stack.enter_context(_served(folder, replicas, ranks))
        reader = _Reader(int(address["port"]), address["token"])
        pids = stack.enter_context(_browser(address["url"], folder / "profile")) if request.browser else lambda: []
        time.sleep(WARM)
        job.send("reset")
        events, told, began = reader.events, reader.bytes, time.monotonic()
        server, shown = _cpu([pid]), _cpu(pids())
        time.sleep(request.seconds)
        seconds = time.monotonic() - began
        server, shown = _cpu([pid]) - server, _cpu(pids()) - shown
        job.send("tell")
        if not job.poll(60):
            raise FtcommError("the emulated job does not answer")
        share = 100 / seconds
        browser = share * shown if request.browser else None
        return DashboardLoad(
            *(replicas, ranks, seconds, share * job.recv(), share * server, browser),
            *(reader.events - events, reader.bytes - told, allowed),
        )


class _Reader(threading.Thread):
    """Reads the events as a page does."""

    def __init__(self, port: int, token: str) -> None:
        super().__init__(daemon=True)
        self.events = self.bytes = 0
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("GET", "/events", headers={"Authorization": f"Bearer {token}"})
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for line in self._connection.getresponse():
                self.events += line.startswith(b"data:")
                self.bytes += len(line)


@contextlib.contextmanager
def _served(folder: Path, replicas: int, ranks: int) -> Iterator[tuple[re.Match[str], Connection, int]]:
    """Yields the address of the live view of an emulated job, the way to ask the job, and the pid of the server."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_emulate, args=(folder, replicas, ranks, there), daemon=True)
    process.start()
    try:
        if not here.poll(120):
            raise FtcommError("the emulated job does not start")
        here.recv()
        command = [sys.executable, "-m", "ftcomm.dashboard", str(folder / protocol.SOCKET), "127.0.0.1", "0"]
        environment = {name: value for name, value in os.environ.items() if name != "FTCOMM_DASHBOARD_TOKEN"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout is not None
                line = server.stdout.readline().strip()
                if (address := _ADDRESS.fullmatch(line)) is None:
                    raise FtcommError(f"the live view does not start: {line}")
                yield address, here, server.pid
            finally:
                server.terminate()
    finally:
        process.terminate()
        process.join(10)


@contextlib.contextmanager
def _browser(url: str, profile: Path) -> Iterator[object]:
    """Yields a function that returns the processes of a browser that shows the page."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise SettingsError("--browser needs selenium, chromium and chromium-driver: pip install selenium") from None
    options = webdriver.ChromeOptions()
    for name in ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"):
        options.add_argument(f"--{name}")
    options.add_argument(f"--user-data-dir={profile}")
    driver = Service("/usr/bin/chromedriver")
    page = webdriver.Chrome(options=options, service=driver)
    try:
        page.get(url)
        yield lambda: _descendants(driver.process.pid)
    finally:
        page.quit()


def _descendants(root: int) -> list[int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _cpu(pids: Sequence[int]) -> float:
    """Returns the seconds of a core that processes have used."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


# -- the emulated job --------------------------------------------------------------------------------------------------


def _emulate(folder: Path, replicas: int, ranks: int, there: Connection) -> None:
    asyncio.run(_Emulation(folder, replicas, ranks, there).run())


class _Emulation:
    """A job without replicas: its monitor is real, and so is its admin socket."""

    def __init__(self, folder: Path, replicas: int, ranks: int, there: Connection) -> None:
        self._folder, self._replicas, self._ranks, self._there = folder, replicas, ranks, there
        self._job = JobMonitor("emulated", "train.py", replicas, ranks, lambda replica: f"host{replica}")
        self._draw = random.Random(1)
        self._spent, self._epoch = 0.0, 0  # seconds of a core, by what a launcher would do

    async def run(self) -> None:
        server = AdminServer(self._folder / protocol.SOCKET, self._answer)
        await server.open()
        for replica in range(self._replicas):
            for rank in range(self._ranks):
                self._say("process_started", replica=replica, shard=rank, pid=1)
        self._view(range(self._replicas))
        if self._replicas * self._ranks <= RECORDED:
            threading.Thread(target=self._record, daemon=True).start()
        self._there.send("ready")
        step = 0
        while True:
            started = time.thread_time()
            self._job.sample(time.monotonic(), dict.fromkeys(range(self._replicas), step))
            self._spent += time.thread_time() - started
            step += 3
            for replica in range(self._replicas):  # the emulation's own, which is not counted
                waits = array("f", bytes(4 * self._ranks))
                for _ in range(max(1, self._ranks // 20)):
                    waits[self._draw.randrange(self._ranks)] = self._draw.expovariate(1.0)
                self._job.waits(replica, waits)
            if step % 30 == 0:
                self._kill(self._draw.randrange(self._replicas))
            for _ in range(10):
                await asyncio.sleep(0.1)
                if self._there.poll():
                    if self._there.recv() == "reset":
                        self._spent = 0.0
                    else:
                        self._there.send(self._spent)

    def _answer(self, request: protocol.AnyRequest) -> protocol.AnyAnswer:
        started = time.thread_time()
        answer = protocol.OverviewAnswer(self._job.overview(time.time(), time.monotonic()))
        protocol.encode(answer)  # the server does so, out of our sight
        self._spent += time.thread_time() - started
        return answer

    def _say(self, kind: str, **fields: object) -> None:
        self._job.event({"kind": kind, "time": time.time(), "mono": time.monotonic(), **fields}, kind)

    def _view(self, members: Sequence[int]) -> None:
        self._epoch += 1
        listed = [{"replica": replica, "contributing": True} for replica in members]
        self._say("view", epoch=self._epoch, step=None, members=listed, why="")

    def _kill(self, replica: int) -> None:
        self._say("process_exited", replica=replica, shard=0, pid=1, code=None, signal="SIGKILL", lines=["the end"])
        self._say(
            "diagnosis", verdict={"cause": "own code", "culprits": [[replica, 0]], "who": "It is in its own code."}
        )
        self._view([other for other in range(self._replicas) if other != replica])
        self._say("process_started", replica=replica, shard=0, pid=1)
        self._view(range(self._replicas))

    def _record(self) -> None:
        """Write ops into recordings of all ranks, as ranks of this host would."""
        folder = self._folder / files.FOLDER
        folder.mkdir()
        groups = []
        for replica in range(self._replicas):
            for rank in range(self._ranks):
                path = folder / f"replica-{replica}.shard-{rank}.pid-1{files.SUFFIX}"
                with open(path, "w+b") as file:
                    file.truncate(layout.PROCESS_SHAPE.size)
                    recorder = Recorder(mmap.mmap(file.fileno(), layout.PROCESS_SHAPE.size), layout.PROCESS_SHAPE)
                recorder.describe(Owner(replica, rank, self._replicas, self._ranks, "emulated", "here"))
                groups.append(recorder.group("job", 0, GroupKind.JOB))
        for number in range(1, 1 << 40):
            for group in groups:
                group.called(op := _Op(number), time.monotonic())
                group.waits(op, (0,), time.monotonic() - 0.02, time.monotonic())
                group.returned(op, time.monotonic())
            time.sleep(1 / OPS)


@dataclasses.dataclass
class _Op:
    place: int
    call: int = 1000 << 16 | 2 << 8  # an all-reduce of 1000 floats
    detail: int = 0
    caller: int = 0
    record: int = 0


EXPERIMENT = Experiment(
    "dashboard",
    DashboardRequest,
    measure,
    [Table("loads", DashboardLoad, COLUMNS)],
    csv="loads",
    footer=lambda report: [
        f"# monitor and server within what is allowed, an event a second: "
        f"{'OK' if all(load.good for load in report['loads']) else 'FAILED'}"
    ],
    good=lambda report: all(load.good for load in report["loads"]),
)
