"""The messages between a joiner and a source, and the blocks into which a state is cut.

    joiner                                source
      |  dial(purpose="state", {step, incarnation})
      |----------------------------------->|
      |            Wait, once a second,    |   until it has passed the boundary of `step` itself
      |<-----------------------------------|
      |  Offer(skeleton, nbytes, block)    |   or Refusal(reason)
      |<-----------------------------------|
      |  Want(number)   up to DEPTH ahead  |
      |----------------------------------->|
      |            Wait, once a second,    |   until its copy of the state is complete,
      |<-----------------------------------|   or Refusal(reason) if that was in vain
      |  BlockHeader(number, nbytes), then the bytes
      |<-----------------------------------|
      |  CatchUpDone                       |   the snapshot may go
      |----------------------------------->|

Frames (`ftcomm.control.framing`) and blocks travel in the records of an authenticated connection
(`ftcomm.control.sealed`), so that a changed bit is noticed.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ftcomm.control.field_types import Text
from ftcomm.control.framing import Framing
from ftcomm.control.sealed import Connection
from ftcomm.training.state import FlatState

BLOCK = 1 << 20  # bytes of one request; large enough to stream, small enough to spread over the sources
MIN_BLOCK = 1 << 16  # bytes; a list of all smaller ones could fill the memory of a joiner
MAX_FRAME = 256 << 20  # bytes of a frame of a source; a skeleton has about 100 a tensor
MAX_REQUEST = 4096  # bytes of a frame of a joiner

Got = TypeVar("Got")

_Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class CatchUpFrame(msgspec.Struct, frozen=True, tag=True):
    """The base of the frames between a joiner and a source."""


class Wait(CatchUpFrame, frozen=True):
    """The source has not reached the boundary of that step yet, or still copies its state."""


class Offer(CatchUpFrame, frozen=True):
    skeleton: bytes
    nbytes: _Count
    block: Annotated[int, Meta(ge=MIN_BLOCK, le=MAX_FRAME)]


class Refusal(CatchUpFrame, frozen=True):
    reason: Text


class Want(CatchUpFrame, frozen=True):
    number: _Count


class BlockHeader(CatchUpFrame, frozen=True):
    number: _Count
    nbytes: _Count


class CatchUpDone(CatchUpFrame, frozen=True):
    """The joiner says that it has all of the state, whichever sources it came from."""


class SampleOffer(CatchUpFrame, frozen=True):
    """Digests of samples of the state, by entry, and the skeleton of what the source can send with it
    (`ftcomm.training.samples`)."""

    digests: dict[str, bytes]
    skeleton: bytes


_FRAMES: Framing[CatchUpFrame] = Framing(
    Wait | Offer | Refusal | Want | BlockHeader | CatchUpDone | SampleOffer, MAX_FRAME
)


class BlockStream:
    """The tensors of a `FlatState`, as one run of bytes that is cut into blocks."""

    def __init__(self, flat: FlatState, block: int = BLOCK) -> None:
        self.nbytes = flat.nbytes
        self.block = block
        self.count = -(-self.nbytes // block)
        self._views = [view for view in flat.views() if view.nbytes]
        self._starts = [0]
        for view in self._views:
            self._starts.append(self._starts[-1] + view.nbytes)

    def pieces(self, number: int) -> list[memoryview]:
        """Returns the bytes of one block as adjacent pieces of tensors, writable and without a copy."""
        at, stop = number * self.block, min((number + 1) * self.block, self.nbytes)
        pieces = []
        index = bisect.bisect_right(self._starts, at) - 1
        while at < stop:
            end = min(stop, self._starts[index + 1])
            pieces.append(self._views[index][at - self._starts[index] : end - self._starts[index]])
            at, index = end, index + 1
        return pieces


class BadFrame(Exception):
    """The other side broke the protocol; its connection is given up."""


class NoSource(Exception):
    """A source does not serve, or is not needed any more, without having sent anything wrong."""


def send(sock: Connection, frame: CatchUpFrame) -> None:
    sock.sendall(_FRAMES.frame(frame))


def _never() -> bool:
    return False


def receive(sock: Connection, limit: int = MAX_FRAME, goes_on: Callable[[], bool] = _never) -> CatchUpFrame:
    """Returns the next frame. Raises `OSError` when the connection ends, `msgspec.DecodeError` on foreign bytes. When
    the timeout of `sock` is over without a byte, `goes_on` says whether to wait as long again."""
    return _FRAMES.read(lambda most: _received(lambda: sock.recv(most), goes_on), limit)


def read_into(sock: Connection, view: memoryview, goes_on: Callable[[], bool] = _never) -> None:
    while view.nbytes:
        got = _received(functools.partial(sock.recv_into, view), goes_on)
        if got == 0:
            raise ConnectionError("the connection was closed")
        view = view[got:]


def _received(get: Callable[[], Got], goes_on: Callable[[], bool]) -> Got:
    while True:
        try:
            return get()
        except TimeoutError:
            if not goes_on():
                raise
