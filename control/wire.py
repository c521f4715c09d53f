"""Frames and the handshake that opens every connection of ftcomm, over blocking sockets and in asyncio.

    client                                            server
      Opening(version, purpose, fields, nonce)  ---->
                                                <----   Challenge(version, nonce, refused)
      HMAC(token, both nonces, opening), filler ---->
                                                <----   Accepted(HMAC(token, both nonces), refused, filler)

The filler is longer than a packet. On a way that loses long packets without a word (a tunnel, jumbo frames on one side)
everything would work until there are data to move; so the handshake fails there, and says why.

Both sides prove that they hold the job's token and neither sends it. Each contributes a nonce, so that a recorded
handshake proves nothing a second time; a nonce has exactly 16 bytes, so that no part of what is signed can be taken for
another. A frame is a 4-byte big-endian length and that many bytes of msgpack. Nothing from an unauthenticated peer may
be longer than `MAX_HANDSHAKE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ftcomm.control.dropped import Kind, drop, printable
from ftcomm.control.unpack import unpack
from ftcomm.control.within import within

VERSION = 3
MAX_HANDSHAKE = 4096  # bytes
MAX_MESSAGE = 16 << 20  # bytes of a frame of the control plane; a longer one is refused before it is read
MAX_UNSENT = 64 << 20  # bytes that wait for a peer that does not read, before it is given up
NONCE = 16  # bytes
FILLER = 3600  # bytes

_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

Fields = dict[str, "str | int"]


class HandshakeError(ConnectionError):
    """The other side refused, or is not what it should be; the message says which, and the mend.

    `kind` is what it counts as at a server that drops the connection for it.
    """

    def __init__(self, text: str, kind: Kind = "handshake") -> None:
        super().__init__(text)
        self.kind = kind


class Unspoken(HandshakeError):
    """The other side hung up before it had said anything, as who only looks whether somebody listens here does."""


class Refused(HandshakeError):
    """It was a clear no: trying again is no use."""


class BadFields(HandshakeError):
    """The fields of an opening are not those that its purpose needs."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "fields")


Nonce = Annotated[bytes, Meta(min_length=NONCE, max_length=NONCE)]
Mac = Annotated[bytes, Meta(max_length=32)]
Filler = Annotated[bytes, Meta(max_length=FILLER)]
Word = Annotated[str, Meta(max_length=256)]


class Spoken(msgspec.Struct, frozen=True):
    """What the first frame of either side has in every version, and is looked at before the rest."""

    version: int


class Opening(Spoken, frozen=True):
    purpose: Word
    fields: Annotated[dict[Word, Word | int], Meta(max_length=16)]
    nonce: Nonce


class Challenge(Spoken, frozen=True):
    nonce: Nonce
    refused: str = ""


class Proof(msgspec.Struct, frozen=True):
    mac: Mac
    filler: Filler = b""


class Accepted(msgspec.Struct, frozen=True):
    mac: Mac
    refused: str = ""
    filler: Filler = b""


def number(fields: Mapping[str, Any], name: str, least: int = 0, most: int = (1 << 31) - 1) -> int:
    """The field `name` of an opening, from `least` to `most`. Raises `BadFields`."""
    value = fields.get(name)
    if not isinstance(value, int) or not least <= value <= most:
        raise BadFields(f"its field {name!r} is {value!r}, expected a number from {least} to {most}")
    return value


def text(fields: Mapping[str, Any], name: str) -> str:
    """The field `name` of an opening. Raises `BadFields`."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise BadFields(f"its field {name!r} is {value!r}, expected a text")
    return value


# The handshake is a generator that yields what to send (bytes) or None to be sent the next frame it receives, or to be
# thrown a TimeoutError, with the longest packet in bytes, if there is none.
Steps = Generator["bytes | None", bytes, Any]

_encode = msgspec.msgpack.encode
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in (Spoken, Opening, Challenge, Proof, Accepted)}


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return unpack(_decoders[kind], data)
    except msgspec.DecodeError as error:
        raise HandshakeError(f"the other side does not speak ftcomm ({error}); is the port right?") from None


def _mac(token: str, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(token.encode(), side + b"".join(parts), hashlib.sha256).digest()


_BAD_TOKEN = "wrong token; give every process of the job the same FTCOMM_TOKEN as its coordinator"


def client_steps(token: str, purpose: str, fields: dict[str, str | int]) -> Steps:
    opening = _encode(Opening(VERSION, purpose, fields, secrets.token_bytes(NONCE)))
    yield opening
    raw = yield None
    if (other := _decode(raw, Spoken).version) != VERSION:
        raise Refused(_version_text(other), "version")
    challenge = _decode(raw, Challenge)
    if challenge.refused:
        raise Refused(printable(challenge.refused))
    yield _encode(Proof(_mac(token, b"client", challenge.nonce, opening), bytes(FILLER)))
    try:
        raw = yield None
    except TimeoutError as late:
        raise HandshakeError(
            f"it answers short messages, and not one of {FILLER} bytes in time. Unless that host is very busy, long "
            f"packets get lost on the way; those from here carry {late.args[0]} bytes. Set the MTU of all hosts to "
            "what the network carries, as in: ip link set eth0 mtu 1400"
        ) from None
    accepted = _decode(raw, Accepted)
    if accepted.refused:
        raise Refused(printable(accepted.refused))
    if not hmac.compare_digest(accepted.mac, _mac(token, b"server", challenge.nonce, opening)):
        raise Refused("the server does not hold this job's token; is the address that of another job?", "token")


def server_steps(token: str) -> Steps:
    """Returns the peer's `Opening`."""
    raw = yield None
    if (other := _decode(raw, Spoken).version) != VERSION:
        refused = _version_text(other)
        yield _encode(Challenge(VERSION, bytes(NONCE), refused))
        raise Refused(refused, "version")
    opening = _decode(raw, Opening)
    nonce = secrets.token_bytes(NONCE)
    yield _encode(Challenge(VERSION, nonce))
    proof = _decode((yield None), Proof)
    if not hmac.compare_digest(proof.mac, _mac(token, b"client", nonce, raw)):
        yield _encode(Accepted(b"", _BAD_TOKEN))
        raise Refused(_BAD_TOKEN, "token")
    yield _encode(Accepted(_mac(token, b"server", nonce, raw), filler=bytes(FILLER)))
    return opening


def _version_text(other: int) -> str:
    return f"protocol version {other}, expected {VERSION}; install the same ftcomm on every host of the job"


_THIN_LINEAR_TIMEOUTS, _RTO_MAX_MS = 16, 44  # <linux/tcp.h>


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a connection whose other end has vanished ends in seconds, not in a quarter of
    an hour.

    After an outage a heartbeat has to come through soon: TCP would wait twice as long before each further attempt, so
    a network that was away for half a heartbeat timeout would be away for all of it.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    sock.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
    with contextlib.suppress(OSError):  # Linux 6.15
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)


def unreached(error: OSError) -> OSError:
    """Why there is no connection: `error`, in words if it says too little."""
    return ConnectionError(no_ports()) if error.errno == errno.EADDRNOTAVAIL else error


def no_ports() -> str:
    """Why the kernel has no port left, with the mend."""
    least, most = _PORTS.read_text().split()
    return (
        f"all ports that this host gives away by itself, {least} to {most}, are in use; end what holds them (ss -tan), "
        "or give more: sysctl -w net.ipv4.ip_local_port_range='10240 65535'"
    )


def late(steps: Steps, sock: socket.socket, timeout: float) -> HandshakeError:
    """Nothing more came on `sock`: how far the handshake had got tells why."""
    try:
        steps.throw(TimeoutError(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)))
    except HandshakeError as error:
        return error
    except (TimeoutError, StopIteration):
        pass
    return HandshakeError(f"no answer to the handshake within {timeout:g} s")


# -- blocking sockets --------------------------------------------------------------------------------------------


def connect(
    address: tuple[str, int], token: str, purpose: str, fields: dict[str, str | int], timeout: float
) -> socket.socket:
    """An authenticated blocking connection. Raises `OSError` (`HandshakeError` if refused)."""
    deadline = time.monotonic() + timeout
    try:
        sock = socket.create_connection(address, timeout=timeout)
    except OSError as error:
        raise unreached(error) from None
    steps = client_steps(token, purpose, fields)
    try:
        tune(sock)
        received: bytes | None = None
        while True:
            try:
                data = steps.send(received) if received is not None else next(steps)
            except StopIteration:
                break
            received = None
            if data is None:
                received = _recv_frame(sock, deadline)
            else:
                sock.sendall(len(data).to_bytes(4, "big") + data)
        sock.settimeout(None)
        return sock
    except TimeoutError:
        why = late(steps, sock, timeout)
        sock.close()
        raise why from None
    except BaseException:
        sock.close()
        raise


def _recv_frame(sock: socket.socket, deadline: float) -> bytes:
    return _recv_exactly(sock, _length(_recv_exactly(sock, 4, deadline), MAX_HANDSHAKE), deadline)


def _recv_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """`deadline` is for all of it: a byte now and then is no progress."""
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        part = sock.recv(count - len(data))
        if not part:
            raise HandshakeError("the connection was closed during the handshake")
        data += part
    return data


def _length(header: bytes, limit: int, kind: Kind = "handshake") -> int:
    length = int.from_bytes(header, "big")
    if length > limit:
        raise HandshakeError(f"a frame of {length} bytes, at most {limit} are allowed here; is the port right?", kind)
    return length


# -- asyncio -----------------------------------------------------------------------------------------------------


async def handshake(sock: socket.socket, steps: Steps, timeout: float) -> Any:
    """Drive either side over a non-blocking socket; closes nothing. Raises `OSError` (incl. on timeout)."""
    try:
        return await within(timeout, _drive(sock, steps))
    except (asyncio.TimeoutError, TimeoutError):
        raise late(steps, sock, timeout) from None


async def _drive(sock: socket.socket, steps: Steps) -> Any:
    loop = asyncio.get_running_loop()
    received: bytes | None = None
    closed: type[HandshakeError] = Unspoken
    while True:
        try:
            data = steps.send(received) if received is not None else next(steps)
        except StopIteration as stop:
            return stop.value
        received = None
        if data is None:
            length = _length(await _receive(loop, sock, 4, closed), MAX_HANDSHAKE)
            closed = HandshakeError
            received = await _receive(loop, sock, length, closed)
        else:
            await loop.sock_sendall(sock, len(data).to_bytes(4, "big") + data)


async def _receive(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int, closed: type[HandshakeError]
) -> bytes:
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise (HandshakeError if data else closed)("the connection was closed during the handshake")
        data += part
    return data


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    """One frame. Raises `asyncio.IncompleteReadError` at the end, and `HandshakeError` (of the kind "frame") if it is
    longer than `limit`, before any of it is kept."""
    return await reader.readexactly(_length(await reader.readexactly(4), limit, "frame"))


def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Does not block: what the other side does not read is kept, up to `MAX_UNSENT`, then the connection is given up.

    A frame above `MAX_MESSAGE` would cost the connection at the other end, and is not sent.
    """
    if len(data) > MAX_MESSAGE:
        drop("unsent", f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
    elif writer.transport.get_write_buffer_size() > MAX_UNSENT:
        drop("unsent", f"gave up a connection whose other side has left more than {MAX_UNSENT} bytes unread")
        writer.transport.abort()
    else:
        writer.write(len(data).to_bytes(4, "big") + data)
