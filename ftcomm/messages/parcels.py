"""What the sender and the receiver of messages say to each other, and what each keeps of their connection.

See `ftcomm.messages.post` for the picture.
"""

from __future__ import annotations

import enum
import itertools
import socket
import struct
import threading
from collections import deque
from typing import Any

from ftcomm.messages.mailbox import Letter

WHOLE = 64 << 10  # bytes of the longest message that is sent unasked
MAX_MESSAGE = 1 << 48  # bytes

HEAD = struct.Struct("<IIQqQ16s")  # magic, kind, number, tag, bytes, dtype
ANSWER = struct.Struct("<IIQ")  # magic, kind, number
MAGIC = 0x66747032


class Kind(enum.IntEnum):
    """What a sender says; each begins with a `HEAD`."""

    WHOLE = 1
    OFFER = 2
    DATA = 3
    WITHDRAW = 4


class Answer(enum.IntEnum):
    """What a receiver says; each is an `ANSWER`."""

    GO = 1
    REFUSED = 2


class Message:
    """A send or a receive that was started; of `nbytes` bytes in `memory`. Ends once, with `error` or without."""

    def __init__(self, tag: int, dtype: str, memory: memoryview, deadline: float) -> None:
        self.tag, self.dtype, self.memory = tag, dtype, memory
        self.nbytes = memory.nbytes
        self.deadline = deadline
        self.number = -1  # of its connection
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def end(self, error: BaseException | None = None) -> None:
        """The first end counts."""
        if not self.ended.is_set():
            self.error = error
            self.memory = memoryview(b"")  # not ours any more
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


class Connection:
    """`queue`: what is to be written, and the send that ends with it. Any thread appends to it, with the lock of the
    post; the thread of the post alone takes from it."""

    def __init__(self, peer: int, sock: socket.socket | None) -> None:
        self.peer, self.sock = peer, sock
        self.queue: deque[tuple[memoryview, Send | None]] = deque()
        self.interest = 0  # what the selector looks for
        self.head = bytearray()
        self.rest = memoryview(b"")  # of what is being read: the head, or what belongs to it


class Outlet(Connection):
    """To a receiver. Without a socket while it is dialled."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer, None)
        self.numbers = itertools.count()
        self.held: deque[Send] = deque()  # not sent yet, since the receiver has enough, or there is no connection
        self.offers: dict[int, Send] = {}
        self.unasked: dict[int, int] = {}  # number -> bytes of each that was sent whole and not received yet
        self.nbytes = 0  # of those


class Inlet(Connection):
    """From a sender."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        super().__init__(peer, sock)
        self.expected: dict[int, Receive] = {}  # offers that were accepted
        self.letter: Letter | None = None  # whose bytes are being read
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
