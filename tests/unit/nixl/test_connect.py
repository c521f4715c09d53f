"""How two endpoints of NIXL meet, what they say when they cannot, and which way is taken then."""

from __future__ import annotations

import socket
import threading
import time
import types

import pytest

from ftcomm.control.views import Address
from ftcomm.errors import TransportError
from ftcomm.transport import connect
from ftcomm.transport.nixl import handshake as hello
from ftcomm.transport.nixl import mirror
from ftcomm.transport.nixl import network as nixl_network
from ftcomm.transport.nixl.writer import NixlMirrorWriter
from ftcomm.transport.segment import (
    CHUNK,
    SLOTS,
)
from tests.rigs.exchange import socket_pair
from tests.unit.nixl.rig import EPOCH, NONCE, ExceptionPair, Link

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")


def test_another_chunk_size_is_said_on_both_sides(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = mirror.kind_of
    monkeypatch.setattr(
        mirror,
        "kind_of",
        lambda endpoint: hello.Compatibility(hello.VERSION, 4, CHUNK if endpoint is link.writer._endpoint else 4096),
    )
    with pytest.raises(ExceptionPair) as caught:
        link.connect()
    monkeypatch.setattr(mirror, "kind_of", kind)
    there, here = caught.value.args
    assert f"replica 1 differs: bytes of a chunk (C) 4096 there, {CHUNK} here" in str(there)
    assert f"bytes of a chunk (C) 4096 there, {CHUNK} here" in str(here)


def test_nobody_gets_through(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way by NIXL is cut, as with interfaces of two networks: said within the time, with both sides' devices."""
    passed = [0.0]  # seconds, when all is said but what goes by NIXL
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr(mirror, "time", clock)
    monkeypatch.setattr(NixlMirrorWriter, "greet", lambda *args: passed.append(passed.pop() + hello.HANDSHAKE_TIMEOUT))
    with pytest.raises(ExceptionPair) as caught:
        link.connect()
    text = str(caught.value.args[1])
    assert "nothing that replica 0 puts gets here within 10 s" in text
    assert text.count("lo") >= 2
    assert "UCX_NET_DEVICES" in text


def test_who_says_nothing_is_not_waited_for(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "HANDSHAKE_TIMEOUT", 0.2)
    near, far = socket.socketpair()
    with pytest.raises((TimeoutError, OSError)):
        link.reader.connect(0, EPOCH, NONCE, lambda: near, lambda *args: None)
    far.close()


class Asked:
    """What `connect` dials and what becomes of it: the other side as `accept` makes it, or one that has no NIXL."""

    def __init__(self, link: Link, refuses: bool) -> None:
        self.link, self.refuses = link, refuses
        self.asked: list[str] = []

    def dial(self, what: str) -> socket.socket:
        near, far = socket_pair()
        self.asked.append(what)
        if what == connect.NIXL:
            accept = self.refuse if self.refuses else self.accept
            threading.Thread(target=accept, args=(far,), daemon=True).start()
        return near

    def accept(self, sock: socket.socket) -> None:
        self.link.writer.accept(1, EPOCH, sock, lambda *args: None)

    def refuse(self, sock: socket.socket) -> None:
        hello.receive(sock)
        kind = hello.Compatibility(hello.VERSION, SLOTS, CHUNK)
        hello.send(sock, hello.WriterAnswer(kind, problem="NIXL is not installed. Install it"))


@pytest.mark.parametrize(
    ("mode", "rdma", "refuses", "how"),
    [
        ("nixl", False, False, "nixl"),
        ("auto", True, False, "nixl"),
        ("auto", True, True, "tcp"),
        ("auto", False, False, "tcp"),
        ("tcp", True, False, "tcp"),
    ],
)
def test_which_way_is_taken(
    link: Link, monkeypatch: pytest.MonkeyPatch, mode: str, rdma: bool, refuses: bool, how: str
) -> None:
    monkeypatch.setattr(connect, "rdma_available", lambda: rdma)
    monkeypatch.setattr(connect, "own_nixl", lambda: link.reader)
    monkeypatch.setenv(nixl_network.TRUSTED, "1")  # between these two "hosts"
    asked = Asked(link, refuses)
    here, there = (Address("127.0.0.1", 1, boot, 1, 1, NONCE) for boot in ("a", "b"))
    peer = connect.connect(1, here, 0, there, epoch=EPOCH, mode=mode, dial=asked.dial, on_lost=lambda *args: None)
    assert peer.transport == how
    assert asked.asked == (["nixl"] if how == "nixl" else ["nixl", "data"] if refuses else ["data"])
    peer.close()


def test_who_wants_nixl_is_told_why_not(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "own_nixl", lambda: link.reader)
    monkeypatch.setenv(nixl_network.TRUSTED, "1")
    asked = Asked(link, refuses=True)
    here, there = (Address("127.0.0.1", 1, boot, 1, 1, NONCE) for boot in ("a", "b"))
    with pytest.raises(TransportError, match=r"replica 0 cannot be reached by NIXL: .* NIXL is not installed"):
        connect.connect(1, here, 0, there, epoch=EPOCH, mode="nixl", dial=asked.dial, on_lost=lambda *args: None)
