"""Frames for short conversations of two processes over one connection.

A frame is a 4-byte big-endian length and that many bytes of msgpack. The connection itself protects them on the way
(`ftcomm.control.sealed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from ftcomm.control.decode import decode_with
from ftcomm.control.sealed import Connection

M = TypeVar("M", bound=msgspec.Struct)

Receive = Callable[[int], bytes]  # returns at most so many of the next bytes; none at the end

_LENGTH = 4  # bytes
_PART = 1 << 20  # bytes that are received at a time


class Framing(Generic[M]):
    """The messages of one conversation. `kind` is their struct, or the union of all of them; none has more than `most`
    bytes."""

    def __init__(self, kind: Any, most: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._most = most

    @staticmethod
    def frame(message: M) -> bytes:
        data = msgspec.msgpack.encode(message)
        return len(data).to_bytes(_LENGTH, "big") + data

    def read(self, receive: Receive, most: int | None = None) -> M:
        """Returns the next message. Memory is taken as bytes come, not as the other side announces them. Raises
        `msgspec.DecodeError` on what is no message, or one of too many bytes (`most` is for this one),
        `ConnectionError` at the end of the connection, and what `receive` raises."""
        length = self._length(_exactly(receive, _LENGTH), most)
        return self._decode(_exactly(receive, length))

    def cut(self, received: bytearray) -> M | None:
        """Take the first message off what was received so far; None if it is not complete. Raises
        `msgspec.DecodeError`."""
        if len(received) < _LENGTH:
            return None
        end = _LENGTH + self._length(received, None)
        if len(received) < end:
            return None
        data = received[_LENGTH:end]
        del received[:end]
        return self._decode(data)

    def _length(self, received: bytearray, most: int | None) -> int:
        length = int.from_bytes(received[:_LENGTH], "big")
        most = self._most if most is None else most
        if length > most:
            raise msgspec.DecodeError(f"a frame of {length} bytes, at most {most} are allowed here")
        return length

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
