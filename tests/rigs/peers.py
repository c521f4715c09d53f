"""Strangers and peers of a listener, and a control thread that they reach: for tests of what they may do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from ftcomm.control import handshake
from ftcomm.control import messages as m
from ftcomm.control.control_thread import ControlThread
from ftcomm.control.links import Listener, listen
from ftcomm.control.sealed import Channel
from ftcomm.control.views import NO_ADDRESSES, Member
from tests.fuzz.choices import ADDRESS
from tests.fuzz.machines import TIMEOUTS
from tests.rigs.idle_data_plane import IdleDataPlane

CREDENTIALS = handshake.Credentials("secret")
DEADLINE = 60.0
MB = 1 << 20


@contextlib.asynccontextmanager
async def listening(on_peer: Callable[[Channel, handshake.Opening], Awaitable[None]]):
    sock = listen("127.0.0.1", 0)
    listener = Listener(sock, CREDENTIALS, on_peer)
    try:
        yield sock.getsockname()
    finally:
        await listener.close()


async def nobody(sock: Channel, opening: handshake.Opening) -> None:
    sock.close()
    raise AssertionError(f"let in: {opening}")


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side hangs up; what it did not read makes that a reset."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await asyncio.wait_for(reader.read(100), DEADLINE):
            got += part
    return got


def framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


def push(sock: socket.socket, parts: tuple[bytes, ...]) -> None:
    with contextlib.suppress(OSError):  # it hangs up on us
        for part in parts:
            sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)


GOOD = m.encode(m.Heartbeat(3))


NO_MESSAGE = {
    "no UTF-8": b"\x81\xa4type\xa1\xff",
    "deep": b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 100_000,
    "a list of 4 G": b"\xdd\xff\xff\xff\xff",
    "unknown kind": msgspec.msgpack.encode({"type": "Surrender"}),
    "truncated": m.encode(m.Removed("a reason"))[:-3],
    "with a tail": m.encode(m.Heartbeat(3)) + b"\x00",
    "empty": b"",
    "negative replica": msgspec.msgpack.encode({"type": "Reachable", "replica": -1}),
    "huge replica": msgspec.msgpack.encode({"type": "Reachable", "replica": 1 << 31}),
    "huge epoch": msgspec.msgpack.encode({"type": "Installed", "epoch": 1 << 32}),
    "huge step": msgspec.msgpack.encode({"type": "Heartbeat", "step": (1 << 64) - 1}),
    "long name": msgspec.msgpack.encode({"type": "Welcome", "incarnation": "x" * 1000}),
    "an event of the coordinator": msgspec.msgpack.encode({"type": "Report", "kind": "failed", "fields": {}}),
    "a member twice": msgspec.msgpack.encode(
        {
            "type": "NewView",
            "view": {
                "epoch": 1,
                "step": None,
                "members": [msgspec.to_builtins(Member(1, "a", NO_ADDRESSES, True))] * 2,
            },
        }
    ),
}


@contextlib.contextmanager
def a_control_thread(
    ranks: int = 1, coordinator: socket.socket | None = None
) -> Iterator[tuple[ControlThread, tuple[str, int]]]:
    """Rank 0 of replica 0, which never reaches its coordinator unless there is one, and where it listens."""
    sock, nowhere = listen("127.0.0.1", 0), coordinator or listen("127.0.0.1", 0)
    control = ControlThread(
        IdleDataPlane(),  # type: ignore[arg-type]
        coordinator=nowhere.getsockname(),
        credentials=CREDENTIALS,
        replica=0,
        shard=0,
        ranks=ranks,
        leader=None,
        leader_socket=None,
        sock=sock,
        address=ADDRESS,
        timeouts=TIMEOUTS,
    )
    try:
        yield control, sock.getsockname()
    finally:
        control.stop()
        nowhere.close()
