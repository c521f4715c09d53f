"""Jobs whose views are in etcd, while coordinators die, stop, wake up and move, and etcd itself goes and comes.

The ranks know one address, as that of a Service in Kubernetes: behind it is whichever coordinator the test says. New
lives come by it. Who runs already is called by a coordinator that takes the place of another, from wherever that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftcomm.control.etcd import EtcdPlace
from ftcomm.control.etcd_store import EtcdStore
from ftcomm.control.store import ViewStore
from ftcomm.control.views import View
from tests.rigs.etcd import EtcdServer, etcd_server

from .bodies import PAUSE
from .job import DEADLINE, JOB, TOKEN, Job
from .rank_points import watch_points
from .test_faults import _members, _until, go_on
from .test_growth import ALL, Excused, begin, hold_at_every_step, lose, wait_back, wait_without
from .test_kills import ENDLESS, SEED, check
from .test_leader_process import VICTIM, hold, leader_of, led
from .training import train

pytestmark = pytest.mark.protocol

HEARTBEAT = 6.0  # s, and so the lease of a coordinator; long enough that on a busy machine nobody is lost by chance
RETURN_TIMEOUT = 60.0  # s for what comes after a process has started and a lease has ended


class Service:
    """Forwards connections to the port `to`, on one loop."""

    def __init__(self) -> None:
        self.to, self.port = 0, 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


class Process:
    """`ftcomm coordinator`."""

    def __init__(self, job: EtcdJob, *options: str) -> None:
        self.log = job.folder / f"coordinator-{len(job.coordinators)}.log"
        command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "coordinator", "--port", "0"]
        command += ["--replicas", str(job.replicas), "--store", job.etcd.url("job"), "--op-timeout", "60"]
        command += ["--ranks-per-replica", str(job.ranks), "--heartbeat-timeout", str(HEARTBEAT), *options]
        with self.log.open("w") as log:
            environment = {**os.environ, "FTCOMM_TOKEN": TOKEN, "FTCOMM_JOB": JOB}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def port(self) -> int:
        """Waits until it has the job."""
        return int(self.until(r"coordinator at 127\.0\.0\.1:(\d+)"))

    def until(self, pattern: str) -> str:
        """Waits until it has said that; returns the first group."""
        for _ in _until(
            lambda: re.search(pattern, self.said()) or self.process.poll() is not None,
            f"no {pattern!r}",
            RETURN_TIMEOUT,
        ):
            pass
        found = re.search(pattern, self.said())
        assert found, self.said()
        return found.group(found.re.groups and 1)

    def said(self) -> str:
        return self.log.read_text()

    def epochs(self) -> list[int]:
        return [int(epoch) for epoch in re.findall(r"ftcomm: view (\d+)", self.said())]


class EtcdJob(Job):
    """With a coordinator in the test, until that is stopped."""

    def __init__(self, folder: Path, etcd: EtcdServer, **settings: Any) -> None:
        self.etcd = etcd
        self.service = Service()
        self.coordinators: list[Process] = []
        arguments: dict[str, Any] = dict(replicas=3, body=train, steps=ENDLESS, pace=PAUSE, prepare=watch_points)
        arguments.update({"heartbeat_timeout": HEARTBEAT, **settings})
        super().__init__(folder, transport="shm", **arguments)
        self.do(self.service.start())
        self.service.to = int(self.server.endpoint.rpartition(":")[2])

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.service.port}"

    def _server(self, port: int, **other: Any) -> Any:
        store = EtcdStore(EtcdPlace.parse(self.etcd.url("job"), {}), port, self._settings["timeouts"].heartbeat)
        return super()._server(port, **{"store": store, **other})

    def start_elsewhere(self) -> None:
        """The coordinator of the test, at another port."""
        self.server = self._server(0)
        self.do(self.server.start())
        self.service.to = int(self.server.endpoint.rpartition(":")[2])

    def coordinator(self, *options: str) -> Process:
        process = Process(self, *options)
        self.coordinators.append(process)
        return process

    def die(self, replica: int) -> None:
        self.kill(replica)
        self.processes[replica, 0].join(10)

    def __exit__(self, *exc: object) -> None:
        for each in self.coordinators:
            each.process.kill()
            each.process.wait(10)
        super().__exit__(*exc)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path) as server:
        yield server


def end(running: EtcdJob, excused: Excused = lambda *error: False) -> None:
    for replica in ALL:
        running.die(replica)
    hold_at_every_step(running, excused)
    epochs = [event["epoch"] for event in running.events if event["kind"] == "view"]
    for each in running.coordinators:
        epochs += each.epochs()
    assert len(set(epochs)) == len(epochs), f"an epoch was used twice: {epochs}"


def coordinator_and_standby(running: EtcdJob) -> tuple[Process, Process]:
    """In place of the one that the job began with."""
    begin(running)
    running.stop_coordinator()
    first = running.coordinator()
    running.service.to = first.port()
    second = running.coordinator("--standby")
    second.until("takes over when it is gone")
    return first, second


def test_a_coordinator_that_is_killed_and_started_elsewhere(tmp_path: Path, etcd: EtcdServer) -> None:
    with EtcdJob(tmp_path, etcd) as running:
        begin(running)
        running.stop_coordinator()
        first = running.coordinator()
        first.port()
        running.die(1)
        first.until(
            r"view \d+[^:]*: replicas 0, 2 "
        )  # the members were called: the address that they know leads nowhere
        first.process.kill()
        first.process.wait(10)
        go_on(running, {0, 2}, 20)
        second = running.coordinator()
        running.service.to = second.port()
        running.start(1)
        second.until(r"view \d+[^:]*: replicas 0, 1, 2 ")
        go_on(running, ALL)
        end(running)


def test_a_coordinator_that_is_stopped_is_replaced_and_ends_when_it_wakes_up(tmp_path: Path, etcd: EtcdServer) -> None:
    """Its connections are there all the while, and whom it takes for dead are alive."""
    with EtcdJob(tmp_path, etcd) as running:
        first, second = coordinator_and_standby(running)
        go_on(running, ALL)
        for _ in _until(lambda: "view" in first.said() or connections(first) >= 3, "not all are there"):
            pass
        first.process.send_signal(signal.SIGSTOP)
        running.die(2)
        second.until(r"view \d+[^:]*: replicas 0, 1 ")
        go_on(running, {0, 1})
        first.process.send_signal(signal.SIGCONT)
        assert first.process.wait(DEADLINE) == 1
        assert re.search(r"the coordinator on \S+, port 0 \(process \d+\) has taken the job /job over", first.said())
        assert not first.epochs()
        running.service.to = second.port()
        running.start(2)
        second.until(r"view \d+[^:]*: replicas 0, 1, 2 ")
        go_on(running, ALL)
        end(running)


def test_the_last_that_contributes_keeps_the_job_when_the_others_die_with_the_coordinator(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """The last change was the one by which it contributes, and only it has run in that. The standby that takes over
    does not take the change back."""
    with EtcdJob(tmp_path, etcd) as running:
        first, second = coordinator_and_standby(running)
        running.die(0)
        first.until(r"view \d+[^:]*: replicas 1, 2 ")
        running.start(0)
        first.until(r"view \d+[^:]*: replicas 0, 1, 2 \(contribute 0\)")
        go_on(running, ALL)
        first.process.kill()
        running.die(1)
        running.die(2)
        second.until(r"view \d+[^:]*: replica 0 ")
        go_on(running, {0})
        assert "catching up" not in second.said()
        running.service.to = second.port()
        running.start(1)
        second.until(r"view \d+[^:]*: replicas 0, 1 ")
        go_on(running, {0, 1})
        end(running)


def test_a_standby_that_has_the_job_hears_of_the_end_of_a_leader_while_all_its_ranks_are_held(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """By the witness of the leader, which was started with the address of the first coordinator."""
    with EtcdJob(tmp_path, etcd, ranks=2, body=led, elements=1000) as running:
        first, second = coordinator_and_standby(running)
        for _ in _until(lambda: connections(first) >= 3, "not all are there"):
            pass
        leader = leader_of(running, VICTIM)
        first.process.kill()
        second.port()
        for _ in _until(lambda: connections(second) >= 3, "not all have come"):
            pass
        ways = [hold(running, rank) for rank in range(2)]
        os.kill(leader, signal.SIGKILL)
        second.until(rf"view \d+: replicas 0, 2 \(lost {VICTIM}: its leader, process {leader}, has ended")
        go_on(running, {0, 2})
        for way in ways:
            os.write(way, b"x")
            os.close(way)
        assert running.join(VICTIM) == [1, 1]
        for replica in (0, 2):
            running.die(replica)
        check(running)


def connections(coordinator: Process) -> int:
    """Established ones, at the port that it listens on."""
    port = f":{coordinator.port():04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(line[1].endswith(port) and line[3] == "01" for line in lines)


def test_training_goes_on_without_etcd_and_changes_wait_for_it(tmp_path: Path, etcd: EtcdServer) -> None:
    with EtcdJob(tmp_path, etcd) as running:
        begin(running)
        etcd.kill()
        running.wait_event("message of etcd", lambda events: any("cannot be used" in e.get("text", "") for e in events))
        go_on(running, ALL, 50)
        for _ in _until(lambda: running.server._machine is None, "the coordinator has not given up", RETURN_TIMEOUT):
            pass
        go_on(running, ALL, 50)
        seen = len(running.events)
        running.die(1)
        etcd.start()
        wait_without(running, 1, seen)
        go_on(running, {0, 2})
        running.start(1)
        running.wait_contributing(ALL, since=seen)
        go_on(running, ALL)
        end(running)


def test_a_member_is_lost_while_etcd_is_slow(tmp_path: Path, etcd: EtcdServer) -> None:
    with EtcdJob(tmp_path, etcd, heartbeat_timeout=30.0) as running:  # so the lease outlives what etcd is slow for
        begin(running)
        seen = len(running.events)
        etcd.signal(signal.SIGSTOP)
        running.die(1)
        for _ in _until(lambda: running.server._writing is not None, "no view is written"):
            pass
        assert not [event for event in running.events[seen:] if event["kind"] == "view"]
        etcd.signal(signal.SIGCONT)
        wait_without(running, 1, seen)
        go_on(running, {0, 2})
        running.start(1)
        running.wait_contributing(ALL, since=seen)
        end(running)


def test_everything_at_random(tmp_path: Path, etcd: EtcdServer) -> None:
    """Replicas die and come, the coordinator goes and comes at another port, etcd dies and comes, as a seed has it."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    away, down, dead = False, False, set[int]()

    def bring_back(replica: int) -> None:
        running.start(replica)
        dead.discard(replica)

    with EtcdJob(tmp_path, etcd, pace=0.005) as running:  # many of the moments fall into an op
        begin(running)
        for _ in range(25):
            what = rng.choice(["coordinator", "etcd", "replica", "replica", "rest"])
            if what == "coordinator" and not down:  # one that starts or stops without etcd waits for it
                (running.start_elsewhere if away else running.stop_coordinator)()
                away = not away
            elif what == "etcd":
                (etcd.start if down else etcd.kill)()
                down = not down
            elif what == "replica":
                replica = rng.choice([1, 2])  # 0 keeps the state of the training
                (bring_back if replica in dead else running.die)(replica)
                dead.symmetric_difference_update({replica} if running.processes[replica, 0].exitcode else set())
            time.sleep(rng.uniform(0.0, 0.3))  # no synchronisation: the moment is what is random
        if down:
            etcd.start()
        if away:
            running.start_elsewhere()
        for replica in dead:
            running.start(replica)
        wait_back(running, ALL, (1, 2), seconds=2 * RETURN_TIMEOUT)
        go_on(running, ALL)
        end(running, lambda replica, _, text: replica != 0 and text.startswith("RemovedError"))


class SlowStore(ViewStore):
    """Every view takes `seconds`."""

    seconds = 0.0

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written: dict[int, float] = {}  # epoch -> when

    def append(self, view: View) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._append(view))

    async def _append(self, view: View) -> None:
        await asyncio.sleep(self.seconds)
        self.append_now(view)

    def append_now(self, view: View) -> None:
        super().append(view)
        self.written[view.epoch] = time.monotonic()


def test_who_lives_is_heard_while_a_view_is_being_written(tmp_path: Path) -> None:
    """For longer than the heartbeat timeout; and nobody is told of the view before that is done."""
    store = SlowStore(tmp_path / "slow")
    arguments: dict[str, Any] = dict(body=train, steps=ENDLESS, pace=PAUSE, prepare=watch_points, transport="shm")
    with Job(tmp_path, replicas=3, heartbeat_timeout=4.0, **arguments) as running:
        begin(running)
        running.stop_coordinator()
        store.open()
        store.append_now(running.server._store.views[-1])
        store.close()
        running.start_coordinator(store=store)
        go_on(running, ALL)
        store.seconds = 6.0
        seen = len(running.events)
        lose(running, 1)
        go_on(running, {0, 2})
        [view] = [event for event in running.events[seen:] if event["kind"] == "view"]
        assert _members(view) == [0, 2]
        assert view["mono"] > store.written[view["epoch"]]
