"""What a joiner and a source say to each other, and how a state is cut into blocks.

    joiner                                source
      |  dial(purpose="state", {step, incarnation})
      |----------------------------------->|
      |            Wait, once a second,    |   until it has passed the boundary of `step` itself
      |<-----------------------------------|
      |  Offer(skeleton, nbytes, block)    |   or Refusal(reason)
      |<-----------------------------------|
      |  Want(number)   up to DEPTH ahead  |
      |----------------------------------->|
      |  Block(number, nbytes, crc32), then the bytes
      |<-----------------------------------|
      |  Done                              |   the snapshot may go
      |----------------------------------->|

Frames are a 4-byte big-endian length and a msgpack struct. The connection is authenticated by the control plane.
"""

from __future__ import annotations

import bisect
import socket
import struct

import msgspec

from ftcomm.hsdp.state import Flat

BLOCK = 1 << 20  # bytes of one request; large enough to stream, small enough to spread over the sources
MAX_FRAME = 256 << 20  # bytes; a skeleton has about 100 a tensor


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Base of what passes between a joiner and a source."""


class Wait(Frame, frozen=True):
    """The source has not reached the boundary of that step yet."""


class Offer(Frame, frozen=True):
    skeleton: bytes
    nbytes: int
    block: int


class Refusal(Frame, frozen=True):
    reason: str


class Want(Frame, frozen=True):
    number: int


class Block(Frame, frozen=True):
    number: int
    nbytes: int
    crc: int


class Done(Frame, frozen=True):
    """The joiner has everything, from whomever."""


_DECODER = msgspec.msgpack.Decoder(Wait | Offer | Refusal | Want | Block | Done)


class Stream:
    """The tensors of a `Flat` as one run of bytes, cut into blocks."""

    def __init__(self, flat: Flat, block: int = BLOCK) -> None:
        self.nbytes = flat.nbytes
        self.block = block
        self.count = -(-self.nbytes // block)
        self._views = [view for view in flat.views() if view.nbytes]
        self._starts = [0]
        for view in self._views:
            self._starts.append(self._starts[-1] + view.nbytes)

    def pieces(self, number: int) -> list[memoryview]:
        """The bytes of one block, as adjacent pieces of tensors, writable and without a copy."""
        at, stop = number * self.block, min((number + 1) * self.block, self.nbytes)
        pieces = []
        index = bisect.bisect_right(self._starts, at) - 1
        while at < stop:
            end = min(stop, self._starts[index + 1])
            pieces.append(self._views[index][at - self._starts[index] : end - self._starts[index]])
            at, index = end, index + 1
        return pieces


class Wrong(Exception):
    """The other side broke the protocol; its connection is given up."""


def send(sock: socket.socket, frame: Frame) -> None:
    payload = msgspec.msgpack.encode(frame)
    sock.sendall(struct.pack(">I", len(payload)) + payload)


def receive(sock: socket.socket) -> Frame:
    """The next frame; raises `OSError` when the connection ends, `msgspec.DecodeError` or `Wrong` on foreign bytes."""
    head = bytearray(4)
    read_into(sock, memoryview(head))
    (size,) = struct.unpack(">I", head)
    if size > MAX_FRAME:
        raise Wrong(f"a frame of {size} bytes")
    payload = bytearray(size)
    read_into(sock, memoryview(payload))
    return _DECODER.decode(payload)


def read_into(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionError("the connection was closed")
        view = view[got:]
