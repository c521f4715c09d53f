"""What UCX may use and what it opens: nobody without the token reaches the memory of a rank."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import socket
import struct
import time

import pytest

from ftcomm.control.views import Address
from ftcomm.doctor import rdma, transports
from ftcomm.errors import TransportError
from ftcomm.transport.connect import connect
from ftcomm.transport.nixl.network import TRUSTED, UcxNetwork, choose, listeners

RDMA = {"rc", "ud", "dc", "srd"}


@pytest.mark.parametrize(
    ("env", "rdma", "tls", "between_hosts"),
    [
        ({}, False, {"posix", "cma", "self"}, False),
        ({}, True, {*RDMA, "posix", "cma", "self", "cuda"}, True),
        ({TRUSTED: "0"}, False, {"posix", "cma", "self"}, False),
        ({TRUSTED: "1"}, False, None, True),
        ({TRUSTED: "1"}, True, None, True),
        ({"UCX_TLS": "rc"}, True, None, True),
        ({"UCX_TLS": "tcp"}, False, None, True),
    ],
)
def test_tcp_is_used_only_if_somebody_says_so(
    env: dict[str, str], rdma: bool, tls: set[str] | None, between_hosts: bool
) -> None:
    network = choose(env, rdma)
    named = network.ucx.get("UCX_TLS")
    assert (None if named is None else set(named.split(","))) == tls
    assert network.between_hosts == between_hosts
    assert network.ports == (env.get(TRUSTED) == "1")


def test_listeners_are_those_of_this_process() -> None:
    before = listeners()
    with contextlib.ExitStack() as held:
        expected = set()
        for family, host, form in ((socket.AF_INET, "127.0.0.1", "{}:{}"), (socket.AF_INET6, "::1", "[{}]:{}")):
            server = held.enter_context(socket.socket(family))
            try:
                server.bind((host, 0))
            except OSError:
                continue  # no IPv6 here
            assert listeners() - before == expected, "it does not listen yet"
            server.listen()
            expected.add(form.format(host, server.getsockname()[1]))
            assert listeners() - before == expected
            held.enter_context(socket.create_connection(server.getsockname()[:2]))  # listens at nothing
            assert listeners() - before == expected
    assert listeners() == before


nixl = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("nixl_cu12", "nixl_cu13"))),
    reason="NIXL is not installed: pip install 'ftcomm[rdma]'",
)


def write_by_anybody(where: str, address: int, data: bytes) -> None:
    """UCX's own PUT, by a socket that shows no token: a magic number, what kind, of how many bytes, to where."""
    host, _, port = where.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), 5.0) as sock:
        sock.sendall(struct.pack("<Q", 0xCAFEBABE12345678))
        sock.sendall(struct.pack("<BI", 33, 20) + struct.pack("<QQI", address, len(data), 1) + data)


@nixl
def test_an_endpoint_opens_no_port(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """So nobody can connect who would write its memory; see the next test."""
    from ftcomm.transport.nixl.agent import NixlEndpoint

    monkeypatch.delenv(TRUSTED, raising=False)
    before = listeners()
    endpoint = NixlEndpoint("0.0")
    try:
        assert listeners() == before
        assert "listens" not in caplog.text
    finally:
        endpoint.close()


@nixl
def test_in_a_trusted_network_the_ports_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ftcomm.transport.nixl.agent import NixlEndpoint

    monkeypatch.setenv(TRUSTED, "1")
    before = listeners()
    endpoint = NixlEndpoint("0.0", ("lo",))
    try:
        opened = sorted(listeners() - before)
        assert f"UCX listens at {', '.join(opened)}: whoever reaches that can write" in caplog.text
        memory = ctypes.create_string_buffer(b"." * 32, 32)  # that is registered nowhere
        write_by_anybody(opened[0], ctypes.addressof(memory), b"WRITTEN-NO-TOKEN")
        end = time.monotonic() + 5.0
        while memory.raw[:16] != b"WRITTEN-NO-TOKEN" and time.monotonic() < end:
            time.sleep(0.001)
        assert memory.raw[:16] == b"WRITTEN-NO-TOKEN", "this UCX asks who writes: then it may have its ports"
    finally:
        endpoint.close()


@nixl
def test_transports_that_open_ports_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftcomm.transport.nixl.agent import NixlEndpoint

    monkeypatch.delenv(TRUSTED, raising=False)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    before = listeners()
    with pytest.raises(TransportError, match=rf"UCX_TLS=tcp,self UCX listens at \S+.*Unset UCX_TLS.*{TRUSTED}=1"):
        NixlEndpoint("0.0")
    assert listeners() == before


@nixl
def test_ports_of_transports_that_we_chose_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version of UCX may open some with transports that open none in this one."""
    from ftcomm.transport.nixl.library import load

    monkeypatch.delenv("UCX_TLS", raising=False)
    before = listeners()
    chosen = UcxNetwork("memory of this host alone", {"UCX_TLS": "tcp,self"})
    agent = load().agent("0.0", "lo", chosen)
    opened = ", ".join(sorted(listeners() - before))
    assert opened
    assert f"UCX listens at {opened}: whoever reaches that" in caplog.text
    del agent


@nixl
@pytest.mark.parametrize("trusted", [False, True])
def test_the_doctor_names_ports(monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    monkeypatch.setenv(TRUSTED, "1" if trusted else "0")
    [found] = [finding for finding in rdma.library() if finding.name == "ports"]
    assert found.verdict == ("note" if trusted else "ok")
    assert ("127.0.0.1:" in found.said) == trusted


def test_another_host_is_not_tried_without_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUSTED, raising=False)
    monkeypatch.setattr("ftcomm.transport.nixl.network.rdma_devices", lambda: [])
    here, there = (Address("127.0.0.1", 1, boot, 1, 1, "ab" * 16) for boot in ("a boot", "another"))

    def dial(*where: object) -> socket.socket:
        raise AssertionError("it was dialled")

    monkeypatch.setenv("FTCOMM_TRANSPORT", "nixl")
    [said] = transports.chosen()
    assert ("only ranks of this host" in said.said, f"{TRUSTED}=1" in said.mend) == (True, True)
    with pytest.raises(TransportError, match=rf"replica 1 .*another host.*memory of this host alone.*{TRUSTED}=1"):
        connect(0, here, 1, there, epoch=1, mode="nixl", dial=dial, on_lost=lambda *lost: None)
