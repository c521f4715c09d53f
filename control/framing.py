"""Frames: a 4-byte big-endian length each, and that many bytes of msgpack.

The handshake is made of them, and short conversations of two processes over one connection, which are protected on the
way by the connection itself (`ftcomm.control.sealed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from ftcomm.control.decode import decode_with
from ftcomm.control.sealed import Connection

M = TypeVar("M", bound=msgspec.Struct)

Receive = Callable[[int], bytes]  # returns at most so many of the next bytes; none at the end

LENGTH = 4  # bytes
_PART = 1 << 20  # bytes that are received at a time


def framed(data: bytes) -> bytes:
    """Returns `data` as a frame."""
    return len(data).to_bytes(LENGTH, "big") + data


def missing(received: bytes | bytearray, most: int) -> int:
    """Returns how many bytes the first frame of `received` lacks: first those of its length, then the rest; 0 if it is
    complete. Raises `msgspec.DecodeError` if it has more than `most`."""
    if len(received) < LENGTH:
        return LENGTH - len(received)
    length = int.from_bytes(received[:LENGTH], "big")
    if length > most:
        raise msgspec.DecodeError(f"a frame of {length} bytes, at most {most} are allowed here")
    return max(0, LENGTH + length - len(received))


def cut(received: bytearray, most: int) -> bytearray | None:
    """Take the first frame off `received`, and return what is in it; None if it is not complete. Raises
    `msgspec.DecodeError`."""
    if missing(received, most):
        return None
    end = LENGTH + int.from_bytes(received[:LENGTH], "big")
    data = received[LENGTH:end]
    del received[:end]
    return data


class Framing(Generic[M]):
    """The messages of one conversation. `kind` is their struct, or the union of all of them; none has more than `most`
    bytes."""

    def __init__(self, kind: Any, most: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._most = most

    @staticmethod
    def frame(message: M) -> bytes:
        return framed(msgspec.msgpack.encode(message))

    def read(self, receive: Receive, most: int | None = None) -> M:
        """Returns the next message. Memory is taken as bytes come, not as the other side announces them. Raises
        `msgspec.DecodeError` on what is no message, or one of too many bytes (`most` is for this one),
        `ConnectionError` at the end of the connection, and what `receive` raises."""
        length = missing(_exactly(receive, LENGTH), self._most if most is None else most)
        return self._decode(_exactly(receive, length))

    def cut(self, received: bytearray) -> M | None:
        """Take the first message off what was received so far; None if it is not complete. Raises
        `msgspec.DecodeError`."""
        data = cut(received, self._most)
        return None if data is None else self._decode(data)

    def _decode(self, data: bytearray) -> M:
        message: M = decode_with(self._decoder, data)
        return message


def receive_while(sock: Connection, wanted: Callable[[], bool], look: float = 0.05) -> Receive:
    """Receive from `sock` as long as `wanted()`, which is asked every `look` seconds; then raise `TimeoutError`."""

    def receive(most: int) -> bytes:
        sock.settimeout(look)
        while wanted():
            try:
                return sock.recv(most)
            except TimeoutError:
                continue
        raise TimeoutError("it is not wanted any more")

    return receive


def _exactly(receive: Receive, count: int) -> bytearray:
    data = bytearray()
    while left := count - len(data):
        part = receive(min(left, _PART))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
