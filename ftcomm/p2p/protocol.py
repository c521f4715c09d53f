"""The messages between sender and receiver: their frames, and the sends and receives that callers have started.

`ftcomm.p2p.progress` has the picture.
"""

from __future__ import annotations

import enum
import struct
import threading
from typing import Any

import numpy as np

from ftcomm.p2p.slots import DeviceMemory

EAGER = 64 << 10  # bytes of the longest message that is sent unasked
MAX_MESSAGE = 1 << 48  # bytes

HEAD = struct.Struct("<IIQqQ16s")  # magic, kind, number, tag, bytes, dtype
ANSWER = struct.Struct("<IIQ")  # magic, kind, number
MAGIC = 0x66747032


class SenderKind(enum.IntEnum):
    """The kinds of what a sender says; each begins with a `HEAD`."""

    EAGER = 1
    RTS = 2
    DATA = 3
    CANCEL = 4
    SLOTS = 5  # an offer by copy engines; for this and the rest see `ftcomm.p2p.slots`
    READY = 6
    DONE = 7


class ReceiverKind(enum.IntEnum):
    """The kinds of what a receiver says; each is an `ANSWER`."""

    CTS = 1
    NACK = 2
    PLAIN = 3
    FREE = 4


class MessageRequest:
    """A send or a receive that was started, of `nbytes` bytes in `memory`, or at `place`, which copy engines reach.

    It ends once, with `error` or without; if a copy is under way, then after the copy.
    """

    def __init__(
        self, tag: int, dtype: str, memory: memoryview, deadline: float, place: DeviceMemory | None = None
    ) -> None:
        self.tag, self.dtype, self.memory, self.place = tag, dtype, memory, place
        self.nbytes = memory.nbytes if place is None else place.nbytes
        self.deadline = deadline
        self.number = -1  # counts the messages of its connection
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._lock = threading.Lock()  # guards the next two, and the end
        self._held = False
        self._fate: list[BaseException | None] = []  # the one end, which waits until the message is not held

    def end(self, error: BaseException | None = None) -> None:
        """End the message. The first end counts."""
        with self._lock:
            if not self._fate:
                self._fate.append(error)
                self._settle()

    def hold(self) -> bool:
        """Hold the memory for a copy, until `let_go`. False if the message has ended. By one thread at a time."""
        with self._lock:
            self._held = not self._fate
            return self._held

    def let_go(self) -> None:
        with self._lock:
            self._held = False
            self._settle()

    def address(self) -> int:
        """The address of the memory, while the message is held."""
        if self.place is not None:
            return self.place.address
        return int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def _settle(self) -> None:
        if self._fate and not self._held:
            self.error = self._fate[0]
            self.memory, self.place = memoryview(b""), None  # the caller's again
            self.ended.set()


class SendRequest(MessageRequest):
    """A send to the member `target`."""

    def __init__(self, target: int, *args: Any) -> None:
        super().__init__(*args)
        self.target = target


class RecvRequest(MessageRequest):
    """A receive from the member `source`, None for any; `found` is the one from which the message came."""

    def __init__(self, source: int | None, *args: Any) -> None:
        super().__init__(*args)
        self.source = source
        self.found: int | None = None
        self.landed: memoryview | None = None  # bytes for `place` that came over the connection
        self.by_slots = False
        self.started = self.copied = 0  # bytes announced in slots, and bytes copied

    def land(self) -> None:
        """Let bytes of the connection go into `memory` from now on."""
        if self.place is not None and self.landed is None:
            self.memory = self.landed = np.empty(self.nbytes, np.uint8).data


def head(kind: int, message: MessageRequest) -> bytes:
    return HEAD.pack(MAGIC, kind, message.number, message.tag, message.nbytes, message.dtype.encode())


def dtype_of(name: bytes) -> str:
    return name.rstrip(b"\0").decode("ascii", "replace")


def shorten(parts: list[memoryview], sent: int) -> None:
    """Take the first `sent` bytes off `parts`."""
    while parts and sent >= parts[0].nbytes:
        sent -= parts.pop(0).nbytes
    if sent:
        parts[0] = parts[0][sent:]
