"""A connected socket of messages: frames that wait to be written, and the head or the bytes that are being read."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

from ftcomm.control.sealed import Connection, flush, pending, unsent
from ftcomm.p2p.channels import MessageChannel, SendChannel
from ftcomm.p2p.protocol import ANSWER, EAGER, HEAD, SendRequest, shorten

_TURN = 4 << 20  # bytes from one connection before others have their turn

Whole = Callable[["MessageWire", "bytes | bytearray | None"], "memoryview | None"]


class MessageWire:
    """The socket of `channel`. Any thread writes, with the lock of the engine; one thread alone flushes and reads, and
    takes from the queue."""

    def __init__(self, channel: MessageChannel, sock: Connection) -> None:
        self.channel, self.sock = channel, sock
        self.queue: deque[tuple[memoryview, SendRequest | None]] = deque()  # each with the send that ends with it
        self.interest = 0  # the events of the selector
        self._head = bytearray(ANSWER.size if isinstance(channel, SendChannel) else HEAD.size)
        self._rest = memoryview(self._head)  # what has not come yet of the head, or of the bytes behind it
        self._is_head = True

    def write(self, frame: bytes, message: SendRequest | None) -> bool:
        """Queue a frame, and the bytes of a message that ends with it; send at once if nothing is queued. Returns
        whether something is left to be flushed."""
        parts = [memoryview(frame)]
        if message is not None and message.memory.nbytes:
            parts.append(message.memory)
        left = False
        if not self.queue and (message is None or message.memory.nbytes <= EAGER):
            with contextlib.suppress(OSError):  # the thread will meet the error, too
                shorten(parts, self.sock.sendmsg(parts, (), socket.MSG_NOSIGNAL))
                left = unsent(self.sock)
        if not parts:
            if message is not None:
                message.end()
            return left
        for part in parts[:-1]:
            self.queue.append((part, None))
        self.queue.append((parts[-1], message))
        return True

    @property
    def is_flushed(self) -> bool:
        return not self.queue and not unsent(self.sock)

    def flush(self, lock: threading.Lock) -> None:
        """Write the first buffers, without the lock: no other thread sends while the queue is not empty."""
        with lock:
            if not flush(self.sock):
                return
        while self.queue:
            part, message = self.queue[0]
            sent = self.sock.send(part, socket.MSG_NOSIGNAL)
            with lock:
                if sent < part.nbytes:
                    self.queue[0] = (part[sent:], message)
                    continue
                self.queue.popleft()
            if message is not None:
                message.end()

    def read(self, whole: Whole) -> None:
        """Read what is there. `whole(self, head)` is called for each head that has come; it may return memory for the
        bytes behind it, and is called with None when that is full. Raises `OSError` at the end, and `BlockingIOError`
        when no more has come."""
        left = _TURN
        while left > 0 or pending(self.sock):
            received = self.sock.recv_into(self._rest)
            if not received:
                raise ConnectionError("its connection was closed")
            left -= received
            self._rest = self._rest[received:]
            while not self._rest:
                memory = whole(self, self._head if self._is_head else None)
                self._is_head = memory is None
                self._rest = memoryview(self._head) if memory is None else memory

    def shut_down(self) -> None:
        """Say no more, when all has gone out."""
        if flush(self.sock):
            self.sock.shutdown(socket.SHUT_WR)
