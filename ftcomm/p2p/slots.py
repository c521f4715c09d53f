"""Messages by copy engines: their bytes go through a few slots of the sender's memory, which the receiver reads.

    sender                                        receiver
      SLOTS(n, tag, dtype, size)          --->    as an RTS
                                          <---    CTS(n)    it is received; PLAIN(n): send the bytes here
      READY(n, slot, bytes)               --->    the next piece is in that slot, and is copied to its place
                                          <---    FREE(n)   and the slot may be filled again
      DONE(n)                             --->    all pieces were freed: the message is complete

A sender that ends the connection may fill its slots for others while the receiver still copies from them. It says DONE
only on a connection that stands, so what a receiver has copied counts once it reads that.

One thread makes the copies, in their order, so that neither the engine's thread nor a caller waits for them. What was
copied into a slot for a connection that is over is overwritten by later copies. A message is said to have ended, for
whatever reason, only when no copy touches its memory (`MessageRequest.hold`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ftcomm.process.joining import join

if TYPE_CHECKING:
    from ftcomm.p2p.protocol import SendRequest

AHEAD = 2  # slots of a receiver: one is filled while the other is read


class DeviceMemory(NamedTuple):
    """A contiguous array in memory that copy engines reach."""

    address: int
    nbytes: int
    dtype: str
    keep: Any  # the array, which must live as long as the message


class Slots(Protocol):
    """The slots of this rank and of others, and the copies between. Any thread."""

    nonce: str  # names this rank's memory
    count: int
    chunk: int  # bytes in a slot

    def place(self, x: Any) -> DeviceMemory | None:
        """Returns the place of `x`, after all work queued for it is done; None if copy engines do not reach it.
        Blocks."""

    def reaches(self, nonce: str) -> bool:
        """Whether this rank can read the slots of the rank with that nonce."""

    def put(self, slot: int, source: int, nbytes: int) -> None:
        """Fill an own slot. Blocks until that is done, as do the next two; all raise `FtcommError`."""

    def take(self, nonce: str, slot: int, to: int, nbytes: int) -> None:
        """Read a slot of the rank with that nonce."""

    def move(self, to: int, source: int, nbytes: int) -> None:
        """Copy between memory of a device and of the host."""


class Track:
    """The messages that a sender has for one receiver by slots, one after the other. With the lock of the engine.

    `pair` is the first of its slots, None while it has none.
    """

    def __init__(self) -> None:
        self.pair: int | None = None
        self.sends: deque[SendRequest] = deque()
        self._put = self._ready = self._freed = 0  # pieces of the first message

    def next(self, chunk: int) -> tuple[SendRequest, int, int, int] | None:
        """Returns the next piece to copy: its message, its slot, its offset and its bytes."""
        if not self.sends or self.pair is None:
            return None
        send, at = self.sends[0], self._put * chunk
        if at >= send.nbytes or self._put - self._freed >= AHEAD:
            return None
        slot = self.pair + self._put % AHEAD
        self._put += 1
        return send, slot, at, min(chunk, send.nbytes - at)

    def ready(self) -> None:
        """Note that the next piece is in its slot."""
        self._ready += 1

    def freed(self, number: int, chunk: int) -> SendRequest | None:
        """Note that the receiver has taken the next piece. Returns the message if that was its last piece. Raises
        `ValueError`."""
        if not self.sends or self.sends[0].number != number or self._freed >= self._ready:
            raise ValueError(f"it has taken a piece of message {number} that it was not given")
        self._freed += 1
        if self._freed * chunk < self.sends[0].nbytes:
            return None
        self._put = self._ready = self._freed = 0
        return self.sends.popleft()


class Copier:
    """The thread that makes copies, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Queue `work`, which must not raise. Does not block."""
        self._works.put(work)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftcomm-p2p-copies", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Finish what is queued, and take no more. Blocks for that, for as long as `join` does."""
        self._works.put(None)
        with self._lock:
            thread = self._thread
        if thread is not None:
            join(thread, "messages by copy engines")

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()
