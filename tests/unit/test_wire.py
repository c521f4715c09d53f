"""The handshake and frames: both drivers, and everything that may go wrong with them."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import socket
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftcomm.control
import ftcomm.launch
from ftcomm.control import handshake, wire
from ftcomm.control import messages as m
from ftcomm.control.links import Listener, listen
from ftcomm.control.sealed import Channel
from tests.rigs.asyncio_client import open_socket

DEADLINE = 60.0  # s
SECRET, GUESS = handshake.Credentials("secret"), handshake.Credentials("guess")


def answer(sock: socket.socket, mine: handshake.Credentials) -> list[object]:
    """Drive the server side of a handshake in a thread; the list gets what came of it."""
    outcome: list[object] = []

    def serve() -> None:
        async def run() -> None:
            conn, _ = sock.accept()
            conn.setblocking(False)
            try:
                outcome.append(await wire.handshake(conn, handshake.server(mine), DEADLINE))
            except OSError as error:
                outcome.append(error)
            finally:
                conn.close()

        asyncio.run(run())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    outcome.append(thread)
    return outcome


@pytest.fixture
def port():
    sock = listen("127.0.0.1", 0)
    yield sock
    sock.close()


def test_blocking_client_is_let_in(port: socket.socket) -> None:
    outcome = answer(port, SECRET)
    with wire.connect(port.getsockname(), SECRET, "data", {"replica": 3, "name": "x"}, DEADLINE):
        pass
    outcome[0].join(DEADLINE)
    opening = outcome[1][0]
    assert isinstance(opening, handshake.Opening)
    assert opening.purpose == "data"
    assert opening.fields == {"replica": 3, "name": "x"}


def test_wrong_token_is_refused_on_both_sides_with_the_mend(port: socket.socket) -> None:
    outcome = answer(port, SECRET)
    with pytest.raises(handshake.HandshakeError, match="FTCOMM_TOKEN"):
        wire.connect(port.getsockname(), GUESS, "data", {}, DEADLINE)
    outcome[0].join(DEADLINE)
    assert isinstance(outcome[1], handshake.HandshakeError)


def test_server_without_the_token_is_not_trusted(port: socket.socket) -> None:
    """It could send a challenge, but not the proof: the client does not talk to whoever sits on the port."""

    def serve() -> None:
        conn, _ = port.accept()
        with conn:
            conn.recv(4096)
            for reply in (handshake.Challenge(handshake.VERSION, b"n" * 16), handshake.Accepted(b"m" * 32)):
                data = msgspec.msgpack.encode(reply)
                conn.sendall(len(data).to_bytes(4, "big") + data)
                conn.recv(4096)

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(handshake.HandshakeError, match="token"):
        wire.connect(port.getsockname(), SECRET, "data", {}, DEADLINE)


def test_another_version_is_refused_with_both_versions(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = answer(port, SECRET)
    steps = handshake.client_steps(SECRET, "data", {})
    opening = msgspec.msgpack.decode(next(steps), type=handshake.Opening)
    old = msgspec.msgpack.encode(msgspec.structs.replace(opening, version=handshake.VERSION + 1))
    with socket.create_connection(port.getsockname(), timeout=DEADLINE) as sock:
        sock.sendall(len(old).to_bytes(4, "big") + old)
        length = int.from_bytes(sock.recv(4), "big")
        challenge = msgspec.msgpack.decode(sock.recv(length), type=handshake.Challenge)
    outcome[0].join(DEADLINE)
    assert f"version {handshake.VERSION + 1}, expected {handshake.VERSION}" in challenge.refused


@given(st.binary(min_size=1, max_size=64))
def test_garbage_never_gets_past_the_server(data: bytes) -> None:
    steps = handshake.server_steps(SECRET)
    next(steps)
    try:
        steps.send(data)
    except handshake.HandshakeError:
        return
    except StopIteration:
        pytest.fail("let in")
    steps.close()


def test_a_long_first_frame_is_not_read(port: socket.socket) -> None:
    outcome = answer(port, SECRET)
    with socket.create_connection(port.getsockname(), timeout=DEADLINE) as sock:
        sock.sendall((1 << 30).to_bytes(4, "big"))
        outcome[0].join(DEADLINE)
    assert "at most" in str(outcome[1])


def test_asyncio_client_and_listener() -> None:
    async def run() -> str:
        sock = listen("127.0.0.1", 0)
        arrived: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def peer(conn: Channel, opening: handshake.Opening) -> None:
            arrived.set_result(opening.purpose)
            conn.close()

        listener = Listener(sock, SECRET, peer)
        client = await open_socket(sock.getsockname(), SECRET, "member", {})
        client.close()
        purpose = await asyncio.wait_for(arrived, DEADLINE)
        await listener.close()
        return purpose

    assert asyncio.run(run()) == "member"


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_raise_only_decode_errors(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        m.decode(data)


def test_every_message_survives_the_wire() -> None:
    progress = m.Progress(3, (m.OpProgress(3, (m.Final((0, 2), b"\x05"),)),), (m.FailedOp(2, "why"),))
    message = m.MemberProgress(1, "abc", 7, progress)
    assert m.decode(m.encode(message)) == message


def test_a_connection_tries_again_soon_after_an_outage() -> None:
    """TCP would double the time each time, beyond a heartbeat timeout."""
    with socket.socket() as sock:
        wire.tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, wire._THIN_LINEAR_TIMEOUTS) == 1
        with contextlib.suppress(OSError):  # a kernel before 6.15
            assert sock.getsockopt(socket.IPPROTO_TCP, wire._RTO_MAX_MS) == 1000


def test_a_rank_cannot_report_what_only_the_coordinator_or_a_launcher_says() -> None:
    """Every literal kind of an event of theirs, found in the source."""
    packages = [Path(ftcomm.control.__file__).parent, Path(ftcomm.launch.__file__).parent]
    said = set()
    for path in (path for package in packages for path in package.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            kind = call.args[0]
            if name in ("Log", "_log", "emit", "_emit") and isinstance(kind, ast.Constant):
                said.add(kind.value)
    assert {"view", "not_removed", "restarting"} <= said
    assert said == m.RESERVED
    for kind in said:
        with pytest.raises(ValueError, match="choose another"):
            m.Report(kind, {})
        forged = msgspec.msgpack.encode({"type": "Report", "kind": kind, "fields": {}})
        with pytest.raises(msgspec.DecodeError):
            m.decode(forged)
