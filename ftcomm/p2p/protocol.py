"""The messages between sender and receiver, and what each keeps of their connection.

`ftcomm.p2p.progress` has the picture.
"""

from __future__ import annotations

import enum
import itertools
import struct
import threading
from collections import deque
from typing import Any

import numpy as np

from ftcomm.control.sealed import Connection as Socket
from ftcomm.p2p.matching import Unexpected
from ftcomm.p2p.slots import DeviceMemory, Track

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


class MessageConnection:
    """A connection. `queue` has what is to be written, each with the send that ends with it. Any thread appends to it,
    with the lock of the engine; only the engine's thread takes from it."""

    def __init__(self, peer: int, sock: Socket | None) -> None:
        self.peer, self.sock = peer, sock
        self.queue: deque[tuple[memoryview, SendRequest | None]] = deque()
        self.interest = 0  # the events of the selector
        self.head = bytearray()
        self.rest = memoryview(b"")  # the rest of the head, or of its bytes, being read


class SendChannel(MessageConnection):
    """A connection to a receiver. It has no socket while it is dialled."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer, None)
        self.numbers = itertools.count()
        self.held: deque[SendRequest] = deque()  # not sent yet, for want of room or of a connection
        self.offers: dict[int, SendRequest] = {}
        self.unasked: dict[int, int] = {}  # number -> bytes of each message sent ahead and not received yet
        self.nbytes = 0  # their sum
        self.track = Track()
        self.fetching: list[SendRequest] = []  # being copied to the host, to be sent as bytes


class RecvChannel(MessageConnection):
    """A connection from a sender."""

    def __init__(self, peer: int, sock: Socket, nonce: str = "") -> None:
        super().__init__(peer, sock)
        self.nonce = nonce  # names the sender's memory
        self.expected: dict[int, RecvRequest] = {}  # offers that were accepted
        self.arrival: Unexpected | None = None  # the arrival whose bytes are being read
        self.receive: RecvRequest | None = None


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
