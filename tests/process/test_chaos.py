"""`ftcomm chaos` against real jobs: faults of every kind, networks of the kernel, and a job that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftcomm.errors import FtcommError, SettingsError
from ftcomm.lab.chaos import leaks
from ftcomm.lab.chaos import run as run_of_chaos
from ftcomm.lab.chaos.network_faults import PERMANENT, cut
from ftcomm.lab.chaos.plan import COORDINATOR, Fault, Plan
from ftcomm.lab.chaos.run import Chaos, ChaosOptions, ChaosOutcome
from ftcomm.lab.netns.hosts import NamespaceHosts
from ftcomm.lab.netns.network import HUB_ADDRESS, LabNetwork, address, inside, netlink
from ftcomm.launch import Launcher, RunOptions, run
from ftcomm.launch.admin import client, protocol
from tests.rigs import preforked_ranks
from tests.rigs.deadlines import DEADLINE

from .job import ENGINE

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol]

CUTS = ("partition", "oneway")
_NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not importlib.util.find_spec("nixl_cu12"), reason="no NIXL"))

# Both say that the weights differ, which they do, and open ever more; then nothing goes on.
STUCK = """
import os, threading, time
import ftcomm
from ftcomm.lab.chaos.train import differ
def leak():
    while True:
        os.dup(1)
        time.sleep(0.05)
threading.Thread(target=leak, daemon=True).start()
group = ftcomm.init()
for step in ftcomm.steps(1000000):
    if differ(group, group.replica if step == 20 else 7):
        group.emit("divergence", step=step)
    while step == 25 or step == 10 and not os.path.exists("go"):
        time.sleep(0.01)
    time.sleep(0.01)
"""


def chaos(job: dict[str, Any], options: ChaosOptions) -> tuple[ChaosOutcome, list[str], list[dict[str, Any]]]:
    """Start a job, do that to it, drain it; what came out, what was said, and the events of the job."""
    said: list[str] = []
    events: list[dict[str, Any]] = []
    job = {"backoff": 0.01, "backoff_limit": 0.1, "max_restarts": 100, "env": {"FTCOMM_LOG": "error"}, **job}
    launcher = Launcher(RunOptions(**job), events.append, lambda *_: None, said.append)

    def training() -> bool:
        return len(launcher.contributing()) == launcher.options.replicas

    async def main() -> ChaosOutcome:
        running = asyncio.ensure_future(launcher.run())
        while not training() and not running.done():
            await asyncio.sleep(0.01)
        try:
            assert not running.done(), said
            doing = asyncio.ensure_future(
                asyncio.to_thread(lambda: Chaos(client.find(None), options, said.append).run())
            )
            while not listened_to(launcher) and not doing.done():
                await asyncio.sleep(0.01)
            Path("go").touch()
            return await doing
        finally:
            launcher.drain()
            launcher.interrupt()  # what hangs does not leave
            launcher.interrupt()
            await running

    return asyncio.run(asyncio.wait_for(main(), DEADLINE)), said, events


def listened_to(launcher: Launcher) -> bool:
    return launcher._admin is not None and bool(launcher._admin._subscribers)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if ENGINE == "host":  # the others have no FTCOMM_VERIFY
        monkeypatch.setenv("FTCOMM_VERIFY", "1")
    return tmp_path


@pytest.fixture
def hosts() -> Iterator[LabNetwork]:
    """Networks of the kernel, where root is at hand."""
    try:
        network = LabNetwork(2)
    except SettingsError as error:
        pytest.skip(str(error))
    yield network
    network.close()


TRAIN: dict[str, Any] = {
    "script": "ftcomm.lab.chaos.train",
    "module": True,
    "heartbeat_timeout": 4.0,
    "op_timeout": 24.0,
}


@pytest.mark.slow
def test_a_job_lives_through_every_fault_of_processes(here: Path) -> None:
    kinds = ("kill", "stop", "coordinator", "slow")
    outcome, said, events = chaos({**TRAIN, "replicas": 3}, ChaosOptions(0.1, 60.0, kinds, 1, overlap=0.0, faults=4))
    records = {record.fault.kind: record for record in outcome.ledger.records}
    assert outcome.failures == [], said
    assert set(records) == set(kinds)
    assert all(record.closed is not None for record in records.values()), said
    for kind in ("kill", "stop"):
        assert set(records[kind].removed) == set(records[kind].fault.replicas)
        assert records[kind].detection is not None
        assert records[kind].restarts >= 1
    assert {"coordinator_stopped", "coordinator_started"} <= {event["kind"] for event in events}
    assert outcome.leaks.ranks


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.sweep)])
def test_nobody_is_removed_who_is_held_or_not_heard(here: Path, transport: str) -> None:
    """Nor who forks; and who dies is replaced though its children, and workers that it forked before, live on for a
    moment. The launcher is not stopped: here that is the test itself."""
    kinds = ("hold", "coordinator", "fork", "orphan")
    outcome, said, _ = chaos(
        {**TRAIN, "replicas": 3, "args": ("--workers", "1"), "transport": transport},
        ChaosOptions(0.1, 60.0, kinds, 3, overlap=0.0, faults=4),
    )
    records = {record.fault.kind: record for record in outcome.ledger.records}
    assert outcome.failures == [], said
    assert set(records) == set(kinds)
    for kind in set(kinds) - {"orphan"}:
        assert not records[kind].removed, said
    assert set(records["orphan"].removed) == set(records["orphan"].fault.replicas)


@pytest.mark.slow
def test_an_older_store_is_refused_and_the_job_goes_on(here: Path) -> None:
    """By its sentence; the right one is taken, and one that is killed then is replaced."""
    outcome, said, events = chaos(
        {**TRAIN, "replicas": 3}, ChaosOptions(0.1, 60.0, ("roll-back", "kill"), 4, overlap=0.0, faults=3)
    )
    assert outcome.failures == [], said
    rolled_back = [record for record in outcome.ledger.records if record.fault.kind == "roll-back"]
    assert rolled_back
    assert all(record.refused and record.closed is not None and not record.removed for record in rolled_back), said
    outdated = [event["reason"] for event in events if event["kind"] == "outdated"]
    assert outdated
    assert all(reason.startswith("the store is older than the job: it ends with epoch ") for reason in outdated)
    epochs = [event["epoch"] for event in events if event["kind"] == "view"]
    assert epochs == list(range(1, len(epochs) + 1))
    assert {record.fault.kind for record in outcome.ledger.records} == {"roll-back", "kill"}


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("transport", [pytest.param("tcp", marks=pytest.mark.sweep), "shm", _NIXL])
def test_nobody_is_removed_when_the_coordinator_is_cut_off_from_all(
    here: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a network of its own, also where the replicas share memory."""
    monkeypatch.setenv("FTCOMM_TRUSTED_NETWORK", "1")  # UCX has nothing but TCP here
    outcome, said, events = chaos(
        {**TRAIN, "replicas": 2, "hosts": NamespaceHosts(), "transport": transport, "heartbeat_timeout": 2.0},
        ChaosOptions(0.1, 60.0, ("cut-off",), 5, overlap=0.0, faults=1),
    )
    assert outcome.failures == [], said
    until = itertools.takewhile(lambda event: event["kind"] != "draining", events)  # then all are ended
    assert [event["epoch"] for event in until if event["kind"] == "view"] == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_a_job_lives_through_cuts_of_the_network(here: Path) -> None:
    """The seed draws cuts from everybody, which are noticed within a heartbeat timeout."""
    seed = next(seed for seed in range(100) if all(_far(fault.other) for fault in _draw(seed)))
    outcome, said, _ = chaos(
        {**TRAIN, "replicas": 3, "hosts": NamespaceHosts(), "transport": "tcp"},
        ChaosOptions(0.1, 60.0, CUTS, seed, overlap=0.0, faults=2),
    )
    records = outcome.ledger.records
    assert outcome.failures == [], said
    assert sorted(record.fault.kind for record in records) == sorted(CUTS)
    for record in records:
        assert set(record.removed) >= set(record.fault.replicas), said
        assert record.closed is not None, said


def test_a_coordinator_that_stands_still_removes_nobody(here: Path) -> None:
    """By the commands: the launcher is a process of its own. While it stands, so do its answers."""
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()"]
    run_it = ["run", "--replicas", "2", "--heartbeat-timeout", "2", "--op-timeout", "24", "--events", "events.jsonl"]
    training = [*preforked_ranks.FTCOMM, *run_it, "-m", "ftcomm.lab.chaos.train"]  # that imports torch
    with open(os.devnull, "wb") as nowhere:
        job = preforked_ranks.Rank(training, os.environ, {1: nowhere.fileno(), 2: 2})
    try:
        events = here / "events.jsonl"
        end = time.monotonic() + DEADLINE
        while not (events.exists() and '"view"' in events.read_text()):
            assert time.monotonic() < end
            assert job.poll() is None
            time.sleep(0.05)
        options = ["--kinds", "coordinator-stop", "--faults", "1", "--for", "60s", "--every", "0.1s", "--seed", "2"]
        done = subprocess.run([*command, "chaos", *options], capture_output=True, text=True, timeout=230)
        assert done.returncode == 2
        assert "There is no terminal to ask at" in done.stderr
        done = subprocess.run([*command, "chaos", "--yes", *options], capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "1: coordinator stopped for " in done.stderr
        assert "no hang, no divergence" in done.stdout
        assert events.read_text().count('"view"') == 1
    finally:
        job.send_signal(signal.SIGCONT)
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(30)
        finally:
            job.kill()


def _draw(seed: int) -> list[Any]:
    plan = Plan(CUTS, 1, seed, cables=True)
    return [plan.next({0, 1, 2}, False) for _ in range(2)]


def _far(other: int | None) -> bool:
    return other is None


def test_a_job_that_hangs_or_diverges_or_leaks_is_found_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "WARM_UP", 0.5)
    monkeypatch.setattr(run_of_chaos, "SAMPLE", 0.1)
    monkeypatch.setitem(leaks.LIMITS, "memory", math.inf)  # it grows in the first seconds of a process
    (here / "stuck.py").write_text(STUCK)
    outcome, said, _ = chaos(
        {**TRAIN, "replicas": 2, "script": "stuck.py", "module": False},
        ChaosOptions(50.0, 60.0, ("slow",), 1, hang_after=10.0),
    )
    assert len(outcome.failures) == 3, said
    assert outcome.failures[0].startswith("no step for ")
    assert outcome.failures[1] == "2 reports of divergence"
    assert outcome.failures[2].startswith("a leak: fds of the ranks grow by ")
    assert any("shard 0 python" in line or "shard 0 ftcomm" in line for line in outcome.ranks), outcome.ranks


def test_a_job_that_ends_and_faults_that_cannot_be_are_told(here: Path) -> None:
    (here / "sleep.py").write_text("import time\ntime.sleep(600)")
    launcher = Launcher(RunOptions(replicas=2, script="sleep.py"), on_line=lambda *_: None, on_log=lambda text: None)

    async def main() -> None:
        running = asyncio.ensure_future(launcher.run())
        while len(launcher.pids()) < 2:
            await asyncio.sleep(0.01)
        path = client.find(None)
        with pytest.raises(FtcommError, match="--kinds partition: the replicas share this host's network"):
            await asyncio.to_thread(Chaos(path, ChaosOptions(1.0, 1.0, ("kill", "partition"), 1)).run)
        doing = asyncio.ensure_future(asyncio.to_thread(Chaos(path, ChaosOptions(9.0, 60.0, ("kill",), 1)).run))
        while not listened_to(launcher):
            await asyncio.sleep(0.01)
        launcher.drain()
        assert await running == run.DRAINED
        [failure] = (await doing).failures
        assert failure.startswith("the job ")

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


# -- networks --------------------------------------------------------------------------------------------------------


def made_by(launcher: int) -> set[str]:
    """The namespaces that the launcher holds, but for its own: other tests make and end theirs meanwhile."""
    found = set()
    for path in Path(f"/proc/{launcher}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return {name for name in found if name.startswith("net:")} - {os.readlink("/proc/self/ns/net")}


def namespaces() -> set[str]:
    """Of all processes."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{name}/ns/net"))
    return found


@pytest.mark.usefixtures("hosts")
def test_replicas_have_addresses_of_their_own_and_nothing_is_left(here: Path) -> None:
    """However the launcher ends: here it is killed."""
    (here / "tell.py").write_text(
        "import os, time\n"
        "open('told-' + os.environ['FTCOMM_REPLICA'], 'w').write(' '.join(\n"
        "    [os.environ['FTCOMM_HOST'], os.environ['FTCOMM_COORDINATOR'], os.readlink('/proc/self/ns/net'), '.']))\n"
        "time.sleep(600)\n"
    )
    made: set[str] = set()
    command = [sys.executable, "-m", "ftcomm.cli", "run", "--replicas", "2", "--hosts", "netns", "tell.py"]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    told: list[list[str]] = []
    try:
        deadline = time.monotonic() + DEADLINE
        while len(told) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            told = [line for path in here.glob("told-*") if (line := path.read_text().split())[-1:] == ["."]]
        made = made_by(launcher.pid)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(20)
    assert sorted(line[0] for line in told) == [address(0), address(1)]
    assert all(line[1].startswith(f"{HUB_ADDRESS}:") for line in told)
    assert len({line[2] for line in told} | {os.readlink("/proc/self/ns/net")}) == 3
    assert made > {line[2] for line in told}  # and that of the hub
    while namespaces() & made and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not namespaces() & made


def test_every_fault_of_the_network_is_done_and_taken_back(hosts: LabNetwork) -> None:
    """What the tables of the kernel say during each, and that they say afterwards what they said before."""
    places = {COORDINATOR: hosts.hub, 0: hosts.hosts[0], 1: hosts.hosts[1]}
    status = _status(hosts)
    before = _settled(places)
    changed = {
        Fault(1, "slow", (0,), cable=True): {0},
        Fault(2, "partition", (1,)): {COORDINATOR, 1},  # the other end of the cable sees it
        Fault(3, "partition", (0, 1), other=1): {0, 1},
        Fault(4, "partition", (0,), other=COORDINATOR): {0, COORDINATOR},
        Fault(5, "oneway", (0,)): {0},
        Fault(6, "oneway", (0,), outgoing=False): {1, COORDINATOR},
        Fault(7, "oneway", (0, 1), other=1, outgoing=False): {1},
    }
    for fault, where in changed.items():
        active = cut(fault, status)
        assert {place for place, fd in places.items() if _tables(fd) != before[place]} == where, str(fault)
        active.close()
        assert {place: _tables(fd) for place, fd in places.items()} == before, str(fault)


def _status(hosts: LabNetwork) -> protocol.Status:
    def path(fd: int) -> str:
        return f"/proc/self/fd/{fd}"

    replicas = [
        protocol.ReplicaStatus(number, "running", 1, {}, True, True, 0, address(number), path(fd))
        for number, fd in enumerate(hosts.hosts)
    ]
    return protocol.Status("", 0, "", 1, False, "", False, 1, "tcp", 2.0, 24.0, replicas, network=path(hosts.hub))


def _settled(places: dict[int, int]) -> dict[int, Any]:
    """What `_tables` has of each, once it stays so: links that were just made take a moment to carry."""
    last, since = None, time.monotonic()
    while last is None or time.monotonic() < since + 0.5:
        found = {place: _tables(fd) for place, fd in places.items()}
        if found != last:
            last, since = found, time.monotonic()
        time.sleep(0.05)
    return last


def _tables(namespace: int) -> Any:
    """Links and whether they carry, disciplines, and neighbours that were set by hand."""
    with inside(namespace), netlink() as ip:
        links = sorted((x.get_attr("IFLA_IFNAME"), x.get_attr("IFLA_CARRIER")) for x in ip.get_links())
        disciplines = sorted(x.get_attr("TCA_KIND") for x in ip.get_qdiscs())
        neighbours = sorted(x.get_attr("NDA_DST") for x in ip.get_neighbours() if x["state"] == PERMANENT)
        return links, disciplines, [x for x in neighbours if x.startswith("10.")]


def test_a_thread_comes_home_from_a_namespace(hosts: LabNetwork) -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with contextlib.suppress(KeyError), inside(hosts.hub):
        assert os.readlink("/proc/thread-self/ns/net") != home
        raise KeyError
    assert os.readlink("/proc/thread-self/ns/net") == home
