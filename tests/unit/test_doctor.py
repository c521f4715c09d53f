"""`ftcomm doctor`: verdicts, the exit code, and what is said where NIXL is not there or cannot start."""

from __future__ import annotations

import queue
import re
import sys
import threading

import msgspec
import pytest
from click.testing import CliRunner

from ftcomm.doctor import cli, network, rdma, transports
from ftcomm.doctor.check import Finding
from ftcomm.errors import SettingsError, TransportError
from ftcomm.transport.nixl import library as nixl_library

FINDINGS = [Finding("a", "ok", "fine"), Finding("b", "note", "slow", "buy"), Finding("c", "wrong", "broken", "mend it")]


@pytest.mark.parametrize(("count", "code"), [(2, 0), (3, 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_printed(monkeypatch: pytest.MonkeyPatch, count: int, code: int, as_json: bool) -> None:
    monkeypatch.setattr(cli, "checks", lambda: [lambda each=each: [each] for each in FINDINGS[:count]])
    result = CliRunner().invoke(cli.doctor, ["--json"] if as_json else [])
    assert result.exit_code == code, result.output
    if as_json:
        assert msgspec.json.decode(result.output, type=list[Finding]) == FINDINGS[:count]
    else:
        assert result.output.splitlines()[:3] == ["ok     a                 fine", "note   b                 slow",
                                                  "                         -> buy"]  # fmt: skip


def test_a_put_to_oneself() -> None:
    pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")
    found = {finding.name: finding for finding in rdma.library()}
    assert found["put"].verdict == "ok", found
    assert "GB/s from this process to itself" in found["put"].said
    assert found["nixl"].said.startswith("NIXL ")
    assert "puts by " in found["ucx"].said


class Missing:
    """An interpreter in which no flavour of NIXL is installed, or one is that lacks a shared library."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def find_spec(self, name: str, *rest: object) -> None:
        if name.split(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13"):
            if name.startswith("nixl_cu12") and self.broken:
                raise ImportError(self.broken)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("broken", "wanted", "verdict", "said"),
    [
        ("", False, "note", "NIXL is not installed"),
        ("", True, "wrong", "NIXL is not installed"),
        ("libcuda.so.1: cannot open", True, "wrong", "cannot be loaded: nixl_cu12: libcuda.so.1: cannot open"),
    ],
)
def test_without_nixl(monkeypatch: pytest.MonkeyPatch, broken: str, wanted: bool, verdict: str, said: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0].startswith("nixl")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(broken), *sys.meta_path])
    monkeypatch.setattr(nixl_library, "_library", None)
    monkeypatch.setenv("FTCOMM_TRANSPORT", "nixl" if wanted else "auto")
    [found] = rdma.library()
    assert found.verdict == verdict
    assert said in found.said
    assert "pip install 'ftcomm[rdma]'" in found.mend
    with pytest.raises(TransportError, match="FTCOMM_TRANSPORT=tcp"):
        nixl_library.load()


@pytest.mark.parametrize(
    ("mode", "verdict", "said"),
    [
        ("auto", "ok", "shm within a host, nixl to other hosts"),
        ("tcp", "ok", "FTCOMM_TRANSPORT=tcp, to all; unset, it would be nixl"),
        ("rdma", "wrong", "FTCOMM_TRANSPORT=rdma"),
    ],
)
def test_which_transport(monkeypatch: pytest.MonkeyPatch, mode: str, verdict: str, said: str) -> None:
    monkeypatch.setenv("FTCOMM_TRANSPORT", mode)
    monkeypatch.setattr(transports.nixl_network, "rdma_available", lambda: True)
    [found] = transports.chosen()
    assert found.verdict == verdict
    assert said in found.said


ADDRESSES = [
    ({"lo": "127.0.0.1", "eth0": "10.0.0.7"}, {}, "10.0.0.7"),
    ({"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "192.0.2.1"}, {"FTCOMM_HOST": "192.0.2.1"}, "192.0.2.1"),
    ({"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "192.0.2.1"}, {}, None),
    ({"lo": "127.0.0.1"}, {}, None),
]


@pytest.mark.parametrize(("interfaces", "env", "host"), ADDRESSES)
def test_who_serves_listens_at_one_address(
    monkeypatch: pytest.MonkeyPatch, interfaces: dict[str, str], env: dict[str, str], host: str | None
) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: interfaces)
    for name in ("FTCOMM_COORDINATOR", "FTCOMM_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if host is not None:
        assert network.where() == host
        return
    with pytest.raises(SettingsError, match=r"FTCOMM_HOST is not set.*set it to the address"):
        network.where()


def test_who_serves_without_a_token_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else may send it anything, not even who knows this program."""
    monkeypatch.delenv("FTCOMM_TOKEN", raising=False)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=network.serve, args=("127.0.0.1", 0, said.put), daemon=True).start()
    found = re.search(r"on another host, FTCOMM_TOKEN=(\w{32}) ftcomm doctor --peer (\S+)$", said.get(timeout=60))
    assert found is not None
    token, where = found.groups()
    [without] = network.peer(where)
    assert (without.verdict, without.said) == ("wrong", "FTCOMM_TOKEN is not set")
    for tried, verdict in (("ftcomm doctor", "wrong"), (token, "ok")):
        monkeypatch.setenv("FTCOMM_TOKEN", tried)
        [reached] = network.peer(where)
        assert reached.verdict == verdict, reached.said
