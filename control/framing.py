"""How two processes say a few things to each other, one after the other, over a connection that they have made.

A frame is a 4-byte big-endian length and that many bytes of msgpack. What protects them on the way is the connection
itself (`ftcomm.control.sealed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from ftcomm.control.decode import decode_with
from ftcomm.control.sealed import Connection

M = TypeVar("M", bound=msgspec.Struct)

Receive = Callable[[int], bytes]  # some of the bytes that come next, at most so many; none at the end of the connection

_LENGTH = 4  # bytes
_PART = 1 << 20  # bytes that are received at a time


class Framing(Generic[M]):
    """The messages of one conversation: `kind` is their struct, or the union of all of them, and none has more than
    `most` bytes."""

    def __init__(self, kind: Any, most: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._most = most

    @staticmethod
    def frame(message: M) -> bytes:
        data = msgspec.msgpack.encode(message)
        return len(data).to_bytes(_LENGTH, "big") + data

    def read(self, receive: Receive, most: int | None = None) -> M:
        """The next message. Memory is taken as bytes come, not for what the other side says will come. Raises
        `msgspec.DecodeError` on what is none, or one of more bytes than may be (`most` is for this one),
        `ConnectionError` at the end of the connection, and what `receive` raises."""
        length = self._length(_exactly(receive, _LENGTH), most)
        return self._decode(_exactly(receive, length))

    def cut(self, received: bytearray) -> M | None:
        """Take the first message off what was received so far; None if it is not whole yet. Raises
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
    """Receive from `sock` as long as `wanted()`, which is asked every `look` seconds; then it is a `TimeoutError`."""

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
