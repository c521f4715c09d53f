"""The promises over NIXL between hosts: UCX puts by TCP from one network to another, which fails in the middle of it.

NIXL says nothing of a peer that is stopped or cut off: its puts stay under way. So all here rests on our own times.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from ftcomm.errors import TransportError
from ftcomm.lab.netns.network import LabNetwork, inside, port
from ftcomm.transport.nixl import network as nixl_network
from ftcomm.transport.nixl.agent import NixlEndpoint

from .bodies import mixed
from .job import HostJob
from .test_promises import (  # noqa: F401  (a fixture)
    ENDLESS,
    ROUNDS,
    SEED,
    Watch,
    agree,
    assert_removed,
    cables,
    cut_off,
    half_open,
    killed,
    one_way,
    slowed,
)

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")
pytestmark = [pytest.mark.protocol, pytest.mark.timeout(480 + 60 * ROUNDS)]

HEARTBEAT = 5.0  # s; what a line that flaps loses is sent again after ever longer waits
ELEMENTS = 600_011  # five chunks; what is put is 100 KB and more


def stopped(job: HostJob, watch: Watch, rng: random.Random) -> None:
    """It takes in no more of what is put to it; UCX keeps what its own puts still have to send."""
    victim = rng.randrange(job.replicas)
    job.signal(victim, signal.SIGSTOP)
    assert watch.without(victim) == victim
    watch.goes_on(watch.everybody - {victim})
    job.signal(victim, signal.SIGCONT)
    assert_removed(job, victim)
    watch.comes_back(victim)


def flaps(job: HostJob, watch: Watch, rng: random.Random) -> None:
    """A cable is pulled again and again, for less than a heartbeat timeout."""
    victim = rng.randrange(job.replicas)
    for _ in range(4):
        cable = job.unplug(victim)
        time.sleep(rng.uniform(0.05, 0.2))
        cable.close()
        time.sleep(rng.uniform(0.0, 0.2))
    watch.goes_on(watch.everybody)
    watch.nobody()


ONCE = (flaps, slowed, cut_off, half_open, one_way, stopped)
FAULTS = (*ONCE, killed)


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no RDMA here, and nobody else in these networks."""
    monkeypatch.setenv(nixl_network.TRUSTED, "1")


def test_hosts_that_put_to_each_other(cables: LabNetwork, tmp_path: Path) -> None:  # noqa: F811
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    settings = dict(body=mixed, steps=ENDLESS, heartbeat_timeout=HEARTBEAT, op_timeout=30.0, transport="nixl")
    with HostJob(tmp_path, cables, elements=ELEMENTS, **settings) as job:
        everybody = set(range(job.replicas))
        job.wait_contributing(everybody)
        watch = Watch(job)
        before, steps = carried(cables, 0), watch.steps(0)
        watch.goes_on(everybody)
        payload = 4 * ELEMENTS * (watch.steps(0) - steps) // 2
        assert carried(cables, 0) - before > payload, "what was put did not go by the cable"
        for fault in [*rng.sample(ONCE, len(ONCE)), *rng.choices(FAULTS, k=ROUNDS)]:
            print(fault.__name__)
            fault(job, watch, rng)
            watch.goes_on(everybody)
        job.drain()
        for replica in everybody:
            assert job.join(replica) == [0], job.errors()
        agree(job)


def test_a_host_without_free_ports_says_so(cables: LabNetwork) -> None:  # noqa: F811
    """UCX listens at one for each device, and by itself looks for it for ever."""
    with inside(cables.hosts[0]), contextlib.ExitStack() as held:
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40001")
        for _ in range(2):
            held.enter_context(socket.create_server(("", 0)))
        with pytest.raises(TransportError, match=r"cannot start: all ports .* 40000 to 40001, are in use.*sysctl"):
            NixlEndpoint("0.0")


def carried(network: LabNetwork, replica: int) -> int:
    """Bytes that its host has sent."""
    with inside(network.hub):
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == port(replica):
                return int(numbers.split()[0])
    raise AssertionError(f"no port {port(replica)}")
