"""What `ftcomm doctor` says of networks that are right and of such as are not."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftcomm.doctor import network
from ftcomm.errors import SettingsError
from ftcomm.lab.netns.slow_network import SlowNetwork

pytestmark = pytest.mark.protocol


@pytest.fixture
def line() -> Iterator[SlowNetwork]:
    try:
        hosts = SlowNetwork(2)
    except SettingsError as error:
        pytest.skip(str(error))
    with hosts:
        yield hosts


@pytest.fixture
def there(line: SlowNetwork, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a doctor on host 1 answers."""
    monkeypatch.setenv("FTCOMM_TOKEN", "token")
    said: queue.Queue[str] = queue.Queue()

    def serve() -> None:
        with line.inside(1):
            network.serve(line.address(1), 0, said.put)

    threading.Thread(target=serve, daemon=True).start()
    return said.get(timeout=60).rpartition(" ")[2]


def test_the_way_to_another_host(line: SlowNetwork, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with line.inside(0):
        [found] = network.peer(there)
        assert found.verdict == "ok"
        assert f"from {line.address(0)}: a handshake takes" in found.said
        assert "in packets of 8948 bytes" in found.said

        for change, words, mend in (
            ({"longest": 1500}, "short messages, and not one of 3600 bytes", "mend what it says"),
            ({"up": False}, "no answer from .* within 3 s: a firewall drops packets", "let TCP through to port"),
        ):
            before = line.change([0], [1], **change)
            _wrong(network.peer(there), words, mend)
            line.restore(before)
        _wrong(network.peer(f"{line.address(1)}:1"), "nothing listens at", "start it there")
        _wrong(network.peer("192.0.2.1:5"), "192.0.2.1:5 cannot be reached: .*unreachable", "ip route get 192.0.2.1")
        _wrong(
            network.peer("no.such.host.invalid:5"), "the name no.such.host.invalid is not known here", "mend the name"
        )
        monkeypatch.setenv("FTCOMM_TOKEN", "other")
        _wrong(network.peer(there), "was reached, but wrong token", "mend what it says")


def _wrong(found: list[network.Finding], words: str, mend: str) -> None:
    [finding] = found
    assert finding.verdict == "wrong"
    assert re.search(words, finding.said), finding.said
    assert mend in finding.mend


def test_the_coordinator_and_the_own_address(line: SlowNetwork, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with line.inside(0):
        monkeypatch.setenv("FTCOMM_COORDINATOR", there)
        [found] = network.coordinator()
        assert found.verdict == "ok"
        assert f"{there} answers in" in found.said
        [found] = network.address()
        assert found.verdict == "ok"
        assert f"{line.address(0)}, interface eth0 (MTU 9000): as the way to FTCOMM_COORDINATOR" in found.said
        assert network.where() == line.address(0)

        monkeypatch.setenv("FTCOMM_HOST", "eth0")
        [found] = network.address()
        assert found.verdict == "ok"
        assert "(MTU 9000): FTCOMM_HOST=eth0" in found.said
        monkeypatch.setenv("FTCOMM_HOST", "127.0.0.1")
        _wrong(network.address(), "FTCOMM_HOST=127.0.0.1 is reached from this host alone", "unset FTCOMM_HOST")
        monkeypatch.setenv("FTCOMM_HOST", "10.9.9.9")
        _wrong(network.address(), "none of this host's", "set FTCOMM_HOST to one of them")

        monkeypatch.delenv("FTCOMM_TOKEN")
        _wrong(network.coordinator(), "FTCOMM_TOKEN is not set", "export FTCOMM_TOKEN")


def test_few_ports(line: SlowNetwork) -> None:
    with line.inside(0):
        [found] = network.ports()
        assert found.verdict == "ok"
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40099")
        _wrong(network.ports(), "from 40000 to 40099, of which 100 are free", "sysctl -w")
