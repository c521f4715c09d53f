"""The network that the other tests rely on: it delays, limits, loses and cuts as told, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ftcomm.errors import SettingsError
from ftcomm.lab.netns.hosts import NamespaceHosts, hosts_named, parse_delay, parse_rate
from ftcomm.lab.netns.relay import VNET, sizes
from ftcomm.lab.netns.slow_network import SlowNetwork
from ftcomm.launch.hosts import HUB
from tests.rigs.deadlines import DEADLINE

pytestmark = pytest.mark.protocol

DELAY = 0.02
PORT = 4000


@pytest.fixture
def line() -> Iterator[SlowNetwork]:
    try:
        network = SlowNetwork(2, rate=1e8, delay=DELAY, seed=5)
    except SettingsError as error:
        pytest.skip(str(error))
    with network:
        yield network


def echo(network: SlowNetwork, place: int) -> None:
    """Sends everything back, from `place`, for as long as the network is there."""
    with network.inside(place):
        server = socket.create_server((network.address(place), PORT))
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind((network.address(place), PORT))

    def streams() -> None:
        while True:
            sock, _ = server.accept()
            with sock, contextlib.suppress(OSError):
                while data := sock.recv(1 << 16):
                    sock.sendall(data)

    def packets() -> None:
        while True:
            datagrams.sendto(*datagrams.recvfrom(1 << 16))

    for serve in (streams, packets):
        threading.Thread(target=serve, daemon=True).start()


def dial(network: SlowNetwork, place: int, to: int) -> socket.socket:
    with network.inside(place):
        return socket.create_connection((network.address(to), PORT), timeout=DEADLINE)


def ping(network: SlowNetwork, to: int, sizes: list[int], cut: bool = False) -> list[int]:
    """Datagrams from host 0, of which each has its number; the numbers that come back. None overtakes another, so all
    have come when a later one comes that is sent until then; of a `cut` line nothing is expected."""
    with network.inside(0):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    last = len(sizes)
    end = time.monotonic() + (0.3 if cut else DEADLINE)
    with sock:
        sock.settimeout(0.1)
        for number, size in enumerate(sizes):
            sock.sendto(number.to_bytes(4, "big") + bytes(size - 4), (network.address(to), PORT))
        found: list[int] = []
        while last not in found and time.monotonic() < end:
            sock.sendto(last.to_bytes(4, "big"), (network.address(to), PORT))
            with contextlib.suppress(TimeoutError):
                while last not in found:
                    found.append(int.from_bytes(sock.recv(1 << 16)[:4], "big"))
        assert cut or found[-1:] == [last], "nothing comes"
        return [number for number in found if number != last]


def test_nothing_comes_sooner_than_the_line_allows(line: SlowNetwork) -> None:
    echo(line, 1)
    echo(line, HUB)
    begun = time.monotonic()
    with dial(line, 0, 1) as sock:
        assert time.monotonic() - begun >= 2 * DELAY  # of a handshake
        size = 1 << 20
        begun = time.monotonic()
        sending = threading.Thread(target=sock.sendall, args=(bytes(size),))
        sending.start()
        received = 0
        while received < size:
            received += len(sock.recv(1 << 16))
        sending.join()
        burst = 0.1 * size  # what a token bucket lets through at once
        assert time.monotonic() - begun >= 2 * DELAY + 8 * (size - burst) / 1e8
    with dial(line, 0, HUB) as sock:
        sock.sendall(b"hub")
        assert sock.recv(3) == b"hub"
    assert line.counts().lost == 0
    assert line.counts().bytes > 2 * size


def test_what_is_cut_lost_or_too_long_does_not_arrive(line: SlowNetwork) -> None:
    echo(line, 1)
    small, large = [100] * 3, [100, 2000, 100, 5000]
    assert ping(line, 1, small) == [0, 1, 2]

    before = line.change([1], [0], up=False)  # the way back
    assert ping(line, 1, small, cut=True) == []
    line.restore(before)
    assert ping(line, 1, small) == [0, 1, 2]

    before = line.change([0], [1], longest=1500)
    assert ping(line, 1, large) == [0, 2]
    line.restore(before)
    assert ping(line, 1, large) == [0, 1, 2, 3]

    before = line.change(line.places, line.places, loss=0.3)
    some = ping(line, 1, [100] * 50)
    assert 0 < len(some) < 50
    assert sorted(some) == some  # who is not lost is not overtaken
    line.restore(before)
    assert ping(line, 1, small) == [0, 1, 2]


def test_the_same_seed_loses_the_same_packets() -> None:
    found = []
    for seed in (1, 1, 2):
        try:
            network = SlowNetwork(2, loss=0.5, seed=seed)
        except SettingsError as error:
            pytest.skip(str(error))
        with network:
            echo(network, 1)
            found.append(ping(network, 1, [50] * 30))
    assert found[0] == found[1] != found[2]


KILLED = """
import os, sys, time
from ftcomm.lab.netns.slow_network import SlowNetwork
network = SlowNetwork(2, delay=0.001)
print(network._relay.pid, *(os.readlink(f"/proc/self/fd/{fd}") for fd in (network.hub, *network.hosts)), flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("line")
def test_a_killed_owner_leaves_neither_relay_nor_networks() -> None:
    owner = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    relay, *networks = owner.stdout.readline().split()
    assert len(networks) == 3
    holders = _in_networks(networks)
    assert str(owner.pid) in holders
    owner.send_signal(signal.SIGKILL)
    owner.wait(DEADLINE)
    owner.stdout.close()
    end = time.monotonic() + DEADLINE
    while holders & _in_networks(networks) or os.path.exists(f"/proc/{relay}"):
        assert time.monotonic() < end, "still there"
        time.sleep(0.01)


def _in_networks(networks: list[str]) -> set[str]:
    """Returns the processes that are in one of them, or have one open. The kernel soon gives the number of one that is
    gone to another, so a network of somebody else may have it."""
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            opened = [f"/proc/{process}/fd/{fd}" for fd in os.listdir(f"/proc/{process}/fd")]
            for place in (f"/proc/{process}/ns/net", *opened):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if os.readlink(place) in networks:
                        found.add(process)
    return found


def test_a_job_is_given_the_line_that_it_asks_for() -> None:
    hosts = hosts_named("netns", 1e8, DELAY)
    assert hosts == NamespaceHosts(1, 1e8, DELAY)
    try:
        network = hosts.open(2)
    except SettingsError as error:
        pytest.skip(str(error))
    with network:
        assert isinstance(network, SlowNetwork)
        assert {link.delay for link in network._links.values()} == {DELAY}
    with pytest.raises(SettingsError, match="add --hosts netns"):
        hosts_named("shared", 1e8, 0.0)


def test_packets_are_counted_as_the_card_would_send_them() -> None:
    def packet(kind: int, headers: int, segment: int, length: int) -> bytes:
        front = bytes([0, kind]) + headers.to_bytes(2, sys.byteorder) + segment.to_bytes(2, sys.byteorder)
        return front.ljust(VNET, b"\0") + bytes(length)

    assert sizes(packet(0, 0, 0, 1000)) == (1, 1000, 1000)
    assert sizes(packet(1, 40, 1460, 40 + 1460)) == (1, 1500, 1500)
    assert sizes(packet(1, 40, 1460, 40 + 3 * 1460 + 1)) == (4, 1500, 4 * 40 + 3 * 1460 + 1)


def test_rates_and_times_are_read_as_tc_has_them() -> None:
    assert (parse_rate("1gbit"), parse_rate("1.5Mbit")) == (1e9, 1.5e6)
    assert (parse_delay("5ms"), parse_delay("2s")) == (0.005, 2.0)
    for wrong in ("1", "1gbyte", "gbit", "0gbit", "-1gbit", "1e9bit"):
        with pytest.raises(SettingsError, match="expected a number with one of these, as 1gbit"):
            parse_rate(wrong)
