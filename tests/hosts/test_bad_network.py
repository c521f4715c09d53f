"""What is wrong with a network is said within seconds, with the addresses and numbers of both sides."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftcomm.control import handshake, wire
from ftcomm.control.links import Listener
from ftcomm.errors import InitError, SettingsError
from ftcomm.lab.netns.network import HUB_ADDRESS, address
from ftcomm.lab.netns.slow_network import SlowNetwork
from ftcomm.launch.hosts import HUB
from ftcomm.transport.address import open_port, own_address
from tests.rigs.asyncio_client import open_socket
from tests.rigs.deadlines import DEADLINE

from .bodies import mixed
from .job import HostJob
from .test_promises import ENDLESS, HEARTBEAT

pytestmark = pytest.mark.protocol

CREDENTIALS = handshake.Credentials("token")
COORDINATOR = (HUB_ADDRESS, 29400)


@pytest.fixture(scope="module")
def line() -> Iterator[SlowNetwork]:
    try:
        network = SlowNetwork(3)
    except SettingsError as error:
        pytest.skip(str(error))
    with network:
        yield network


@pytest.fixture
def server(line: SlowNetwork) -> Iterator[tuple[str, int]]:
    """Where a process of ours listens on host 1."""
    with line.inside(1):
        sock = socket.create_server((line.address(1), 0))
    there = sock.getsockname()
    loop = asyncio.new_event_loop()

    async def drop(sock: socket.socket, opening: handshake.Opening) -> None:
        sock.close()

    async def serve() -> Listener:
        return Listener(sock, CREDENTIALS, drop)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(serve(), loop).result(DEADLINE)
    yield there
    asyncio.run_coroutine_threadsafe(listener.close(), loop).result(DEADLINE)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(DEADLINE)
    loop.close()


def test_the_address_of_a_host_is_that_of_the_way_to_the_coordinator(line: SlowNetwork) -> None:
    name = "FTCOMM_COORDINATOR"
    with line.inside(2):
        assert own_address("", COORDINATOR, name) == address(2)
        assert own_address("eth0", COORDINATOR, name) == address(2)
        assert own_address(address(2), COORDINATOR, name) == address(2)
        assert own_address("10.1.2.3", COORDINATOR, name) == "10.1.2.3"  # what listening will say
        assert own_address("", ("127.0.0.1", 29400), name) == "127.0.0.1"
        for asked, towards, words in (
            (
                "127.0.0.1",
                COORDINATOR,
                f"FTCOMM_HOST=127.0.0.1 is reached from this host alone.* leaves from {address(2)}",
            ),
            ("localhost", COORDINATOR, "FTCOMM_HOST=localhost is reached from this host alone"),
            ("ib7", COORDINATOR, f"neither an address nor an interface of this host, which has .*eth0 {address(2)}"),
            ("", ("192.0.2.1", 5), f"{name}=192.0.2.1:5: there is no way to it from this host, which has .*eth0"),
            ("", ("no.such.host.invalid", 5), f"{name}=no.such.host.invalid:5: there is no way"),
        ):
            with pytest.raises(SettingsError, match=words):
                own_address(asked, towards, name)
        with pytest.raises(InitError, match=f"FTCOMM_HOST=10.1.2.3: Cannot assign .* has .*eth0 {address(2)}"):
            open_port("10.1.2.3")


def test_a_host_without_free_ports_says_so(line: SlowNetwork, server: tuple[str, int]) -> None:
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    words = "all ports that this host gives away by itself, 40000 to 40001, are in use.*sysctl -w"
    with line.inside(0), contextlib.ExitStack() as held:
        before = ports.read_text()
        ports.write_text("40000 40001")
        try:
            for _ in range(2):
                held.enter_context(open_port(line.address(0)))
            with pytest.raises(InitError, match=f"cannot listen on {line.address(0)}: {words}"):
                open_port(line.address(0))
            held.close()
            for _ in range(2):
                held.enter_context(socket.create_connection(server))
            with pytest.raises(OSError, match=words):
                wire.connect(server, CREDENTIALS, "data", {}, DEADLINE)
            with pytest.raises(OSError, match=words):
                asyncio.run(open_socket(server, CREDENTIALS, "data", {}))
        finally:
            ports.write_text(before)


@pytest.mark.parametrize("senders", [(0,), (1,)])
def test_a_way_that_loses_long_packets_fails_the_handshake(
    line: SlowNetwork, server: tuple[str, int], senders: tuple[int, ...]
) -> None:
    """Whichever way it loses them, there or back."""
    with line.inside(0):
        wire.connect(server, CREDENTIALS, "data", {}, DEADLINE).close()
        before = line.change(senders, line.places, longest=1500)
        with pytest.raises(OSError, match=r"short messages, and not one of 3600 bytes.* carry 8948 bytes.*mtu 1400"):
            wire.connect(server, CREDENTIALS, "data", {}, 3.0)
        line.restore(before)
        wire.connect(server, CREDENTIALS, "data", {}, DEADLINE).close()


def test_two_hosts_that_never_reach_each_other_are_told_apart(line: SlowNetwork, tmp_path: Path) -> None:
    """One of the two goes and says why, with the addresses; the others begin without it."""
    ways = [*line.change([1], [2], longest=1500).items(), *line.change([2], [1], up=False).items()]
    with HostJob(
        tmp_path, line, body=mixed, steps=ENDLESS, elements=10_000, heartbeat_timeout=HEARTBEAT, op_timeout=30.0
    ) as job:
        job.wait_event("view without 2", lambda events: any(_members(event) == {0, 1} for event in events))
        assert job.join(2) == [1]
        [(_, _, text)] = job.errors()
        link = rf"silent for \d\.\d s at {re.escape(address(1)[:-1])}[23]:\d+"
        assert re.search(rf"replicas 1 and 2 cannot reach each other \(replica [12]: {link}", text), text
        job.drain()
        assert job.join(0) == job.join(1) == [0]
    line.restore(dict(ways))


def _members(event: dict[str, Any]) -> set[int]:
    return {member["replica"] for member in event["members"]} if event["kind"] == "view" else set()


def test_the_hub_is_a_place_like_the_others(line: SlowNetwork) -> None:
    with line.inside(HUB):
        assert own_address("", (line.address(0), 5), "FTCOMM_COORDINATOR") == HUB_ADDRESS
