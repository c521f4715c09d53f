"""What the sender and the receiver of messages say to each other, and what each keeps of their connection.

See `ftcomm.messages.post` for the picture.
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
from ftcomm.messages.matching import Unexpected
from ftcomm.messages.slots import Place, Track

EAGER = 64 << 10  # bytes of the longest message that is sent unasked
MAX_MESSAGE = 1 << 48  # bytes

HEAD = struct.Struct("<IIQqQ16s")  # magic, kind, number, tag, bytes, dtype
ANSWER = struct.Struct("<IIQ")  # magic, kind, number
MAGIC = 0x66747032


class Kind(enum.IntEnum):
    """What a sender says; each begins with a `HEAD`."""

    EAGER = 1
    RTS = 2
    DATA = 3
    CANCEL = 4
    SLOTS = 5  # an offer of what goes by copy engines; for this and what follows see `ftcomm.messages.slots`
    READY = 6
    DONE = 7


class Answer(enum.IntEnum):
    """What a receiver says; each is an `ANSWER`."""

    CTS = 1
    NACK = 2
    PLAIN = 3
    FREE = 4


class Message:
    """A send or a receive that was started; of `nbytes` bytes in `memory`, or at `place`, which copy engines reach.

    Ends once, with `error` or without; if a copy is under way, then when that is done.
    """

    def __init__(self, tag: int, dtype: str, memory: memoryview, deadline: float, place: Place | None = None) -> None:
        self.tag, self.dtype, self.memory, self.place = tag, dtype, memory, place
        self.nbytes = memory.nbytes if place is None else place.nbytes
        self.deadline = deadline
        self.number = -1  # of its connection
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._lock = threading.Lock()  # guards the next two, and the end
        self._held = False
        self._fate: list[BaseException | None] = []  # one, with which it ends, or will when it is not held any more

    def end(self, error: BaseException | None = None) -> None:
        """The first end counts."""
        with self._lock:
            if not self._fate:
                self._fate.append(error)
                self._settle()

    def hold(self) -> bool:
        """A copy uses its memory until `let_go`; False: it has ended. By one thread at a time."""
        with self._lock:
            self._held = not self._fate
            return self._held

    def let_go(self) -> None:
        with self._lock:
            self._held = False
            self._settle()

    def address(self) -> int:
        """Of its memory, while it is held."""
        if self.place is not None:
            return self.place.address
        return int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def _settle(self) -> None:
        if self._fate and not self._held:
            self.error = self._fate[0]
            self.memory, self.place = memoryview(b""), None  # not ours any more
            self.ended.set()


class Send(Message):
    """`target` is the member that gets it."""

    def __init__(self, target: int, *args: Any) -> None:
        super().__init__(*args)
        self.target = target


class Receive(Message):
    """`source` is the member that it is to come from, None: anybody, `found` the one from which it has come."""

    def __init__(self, source: int | None, *args: Any) -> None:
        super().__init__(*args)
        self.source = source
        self.found: int | None = None
        self.landed: memoryview | None = None  # what has come for `place`, but not by copy engines
        self.by_slots = False
        self.started = self.copied = 0  # bytes that lay in slots, and those that are where they belong

    def land(self) -> None:
        """From now on `memory` is where bytes of the connection may be put."""
        if self.place is not None and self.landed is None:
            self.memory = self.landed = memoryview(np.empty(self.nbytes, np.uint8))


class Connection:
    """`queue`: what is to be written, and the send that ends with it. Any thread appends to it, with the lock of the
    post; the thread of the post alone takes from it."""

    def __init__(self, peer: int, sock: Socket | None) -> None:
        self.peer, self.sock = peer, sock
        self.queue: deque[tuple[memoryview, Send | None]] = deque()
        self.interest = 0  # what the selector looks for
        self.head = bytearray()
        self.rest = memoryview(b"")  # of what is being read: the head, or what belongs to it


class SendChannel(Connection):
    """To a receiver. Without a socket while it is dialled."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer, None)
        self.numbers = itertools.count()
        self.held: deque[Send] = deque()  # not sent yet, since the receiver has enough, or there is no connection
        self.offers: dict[int, Send] = {}
        self.unasked: dict[int, int] = {}  # number -> bytes of each that was sent whole and not received yet
        self.nbytes = 0  # of those
        self.track = Track()
        self.fetching: list[Send] = []  # copied to the host, to be sent as bytes


class RecvChannel(Connection):
    """From a sender."""

    def __init__(self, peer: int, sock: Socket, nonce: str = "") -> None:
        super().__init__(peer, sock)
        self.nonce = nonce  # of the sender's memory
        self.expected: dict[int, Receive] = {}  # offers that were accepted
        self.arrival: Unexpected | None = None  # whose bytes are being read
        self.receive: Receive | None = None


def head(kind: int, message: Message) -> bytes:
    return HEAD.pack(MAGIC, kind, message.number, message.tag, message.nbytes, message.dtype.encode())


def dtype_of(name: bytes) -> str:
    return name.rstrip(b"\0").decode("ascii", "replace")


def shorten(parts: list[memoryview], sent: int) -> None:
    """Take the first `sent` bytes away."""
    while parts and sent >= parts[0].nbytes:
        sent -= parts.pop(0).nbytes
    if sent:
        parts[0] = parts[0][sent:]
