"""Frames and the handshake that opens every connection of ftcomm, over blocking sockets and in asyncio.

    client                                            server
      Opening(version, purpose, fields, nonce)  ---->
                                                <----   Challenge(version, nonce, refused)
      HMAC(token, both nonces, opening)         ---->
                                                <----   Accepted(HMAC(token, both nonces), refused)

Both sides prove that they hold the job's token and neither sends it. A frame is a 4-byte big-endian length and that
many bytes of msgpack. Nothing from an unauthenticated peer may be longer than `MAX_HANDSHAKE`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
from collections.abc import Generator
from typing import Any

import msgspec

VERSION = 1
MAX_HANDSHAKE = 4096  # bytes

Fields = dict[str, "str | int"]


class HandshakeError(ConnectionError):
    """The other side refused, or is not what it should be; the message says which, and the mend."""


class Refused(HandshakeError):
    """It was a clear no: trying again is no use."""


class Opening(msgspec.Struct, frozen=True):
    version: int
    purpose: str
    fields: dict[str, str | int]
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True):
    version: int
    nonce: bytes
    refused: str = ""


class Proof(msgspec.Struct, frozen=True):
    mac: bytes


class Accepted(msgspec.Struct, frozen=True):
    mac: bytes
    refused: str = ""


# The handshake is a generator that yields what to send (bytes) or None to be sent the next frame it receives.
Steps = Generator["bytes | None", bytes, Any]

_encode = msgspec.msgpack.encode


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise HandshakeError(f"the other side does not speak ftcomm ({error}); is the port right?") from None


def _mac(token: str, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(token.encode(), side + b"".join(parts), hashlib.sha256).digest()


_BAD_TOKEN = "wrong token; give every process of the job the same FTCOMM_TOKEN as its coordinator"


def client_steps(token: str, purpose: str, fields: dict[str, str | int]) -> Steps:
    opening = _encode(Opening(VERSION, purpose, fields, secrets.token_bytes(16)))
    yield opening
    challenge = _decode((yield None), Challenge)
    if challenge.refused:
        raise Refused(challenge.refused)
    if challenge.version != VERSION:
        raise Refused(_version_text(challenge.version))
    yield _encode(Proof(_mac(token, b"client", challenge.nonce, opening)))
    accepted = _decode((yield None), Accepted)
    if accepted.refused:
        raise Refused(accepted.refused)
    if not hmac.compare_digest(accepted.mac, _mac(token, b"server", challenge.nonce, opening)):
        raise Refused("the server does not hold this job's token; is the address that of another job?")


def server_steps(token: str) -> Steps:
    """Returns the peer's `Opening`."""
    raw = yield None
    opening = _decode(raw, Opening)
    if opening.version != VERSION:
        refused = _version_text(opening.version)
        yield _encode(Challenge(VERSION, b"", refused))
        raise Refused(refused)
    nonce = secrets.token_bytes(16)
    yield _encode(Challenge(VERSION, nonce))
    proof = _decode((yield None), Proof)
    if not hmac.compare_digest(proof.mac, _mac(token, b"client", nonce, raw)):
        yield _encode(Accepted(b"", _BAD_TOKEN))
        raise Refused(_BAD_TOKEN)
    yield _encode(Accepted(_mac(token, b"server", nonce, raw)))
    return opening


def _version_text(other: int) -> str:
    return f"protocol version {other}, expected {VERSION}; install the same ftcomm on every host of the job"


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a connection whose other end has vanished ends in seconds, not in a quarter of
    an hour."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


# -- blocking sockets --------------------------------------------------------------------------------------------


def connect(
    address: tuple[str, int], token: str, purpose: str, fields: dict[str, str | int], timeout: float
) -> socket.socket:
    """An authenticated blocking connection. Raises `OSError` (`HandshakeError` if refused)."""
    sock = socket.create_connection(address, timeout=timeout)
    try:
        tune(sock)
        steps = client_steps(token, purpose, fields)
        received: bytes | None = None
        while True:
            try:
                data = steps.send(received) if received is not None else next(steps)
            except StopIteration:
                break
            received = None
            if data is None:
                received = _recv_frame(sock)
            else:
                sock.sendall(len(data).to_bytes(4, "big") + data)
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def _recv_frame(sock: socket.socket) -> bytes:
    return _recv_exactly(sock, _length(_recv_exactly(sock, 4), MAX_HANDSHAKE))


def _recv_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise HandshakeError("the connection was closed during the handshake")
        data += part
    return data


def _length(header: bytes, limit: int) -> int:
    length = int.from_bytes(header, "big")
    if length > limit:
        raise HandshakeError(f"a frame of {length} bytes, at most {limit} are allowed here; is the port right?")
    return length


# -- asyncio -----------------------------------------------------------------------------------------------------


async def handshake(sock: socket.socket, steps: Steps, timeout: float) -> Any:
    """Drive either side over a non-blocking socket; closes nothing. Raises `OSError` (incl. on timeout)."""
    try:
        return await asyncio.wait_for(_drive(sock, steps), timeout)
    except (asyncio.TimeoutError, TimeoutError):
        raise HandshakeError(f"no answer to the handshake within {timeout:g} s") from None


async def _drive(sock: socket.socket, steps: Steps) -> Any:
    loop = asyncio.get_running_loop()
    received: bytes | None = None
    while True:
        try:
            data = steps.send(received) if received is not None else next(steps)
        except StopIteration as stop:
            return stop.value
        received = None
        if data is None:
            length = _length(await _receive(loop, sock, 4), MAX_HANDSHAKE)
            received = await _receive(loop, sock, length)
        else:
            await loop.sock_sendall(sock, len(data).to_bytes(4, "big") + data)


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise HandshakeError("the connection was closed during the handshake")
        data += part
    return data


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    """One frame. Raises `asyncio.IncompleteReadError` at the end, `HandshakeError` if it is longer than `limit`."""
    return await reader.readexactly(_length(await reader.readexactly(4), limit))


def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(4, "big") + data)
