"""Messages by copy engines: their bytes go through a few slots of the sender's memory that the receiver reads.

    sender                                     receiver
      SLOTS(n, tag, dtype, size)        --->     as an RTS
                                        <---     CTS(n)       somebody receives it; PLAIN(n): send the bytes here
      READY(n, slot, bytes)             --->     the next piece lies in that slot: copied to where it belongs
                                        <---     FREE(n)      and the slot may be filled again
      DONE(n)                           --->     all pieces were freed: the message is whole

A sender that ends the connection may fill its slots with what is for others while the receiver still copies from them.
It says DONE on a connection that stands alone, so what a receiver has copied counts when it hears that.

Copies run in one thread, in their order, so that neither the thread of the post nor a caller waits for them, and what
was copied into a slot for a connection that is over is overwritten by what is copied there later. That a message has
ended, for whatever reason, is said when no copy touches its memory (`Message.hold`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from ftcomm.messages.protocol import Send

AHEAD = 2  # slots that a receiver has, so that one is filled while the other is read


class Place(NamedTuple):
    """Memory that copy engines reach, of a contiguous array."""

    address: int
    nbytes: int
    dtype: str
    keep: Any  # the array, which is to live as long as the message


class Slots(Protocol):
    """The slots of this rank and of others, and what copies. For any thread."""

    nonce: str  # by which others know this rank's memory
    count: int
    chunk: int  # bytes in a slot

    def place(self, x: Any) -> Place | None:
        """Where `x` lies, all that was queued for it being done; None if copy engines do not reach it. Blocks."""

    def reaches(self, nonce: str) -> bool:
        """Whether slots of that rank can be read here."""

    def put(self, slot: int, source: int, nbytes: int) -> None:
        """Fill a slot of ours. Blocks until that is done, as do the next two; all raise `FtcommError`."""

    def take(self, nonce: str, slot: int, to: int, nbytes: int) -> None:
        """Read a slot of that rank."""

    def move(self, to: int, source: int, nbytes: int) -> None:
        """Between memory of a device and of the host."""


class Track:
    """What a sender keeps of the messages that go to one receiver by slots, one after the other. With the post's lock.

    `pair` is the first of its slots, None while it has none.
    """

    def __init__(self) -> None:
        self.pair: int | None = None
        self.sends: deque[Send] = deque()
        self._put = self._ready = self._freed = 0  # pieces of the first of them

    def next(self, chunk: int) -> tuple[Send, int, int, int] | None:
        """The next piece to be copied: of which message, into which slot, from where on, and its bytes."""
        if not self.sends or self.pair is None:
            return None
        send, at = self.sends[0], self._put * chunk
        if at >= send.nbytes or self._put - self._freed >= AHEAD:
            return None
        slot = self.pair + self._put % AHEAD
        self._put += 1
        return send, slot, at, min(chunk, send.nbytes - at)

    def ready(self) -> None:
        """The oldest piece that was not is in its slot."""
        self._ready += 1

    def freed(self, number: int, chunk: int) -> Send | None:
        """The receiver has taken the next piece; returns the message if that was its last. Raises `ValueError`."""
        if not self.sends or self.sends[0].number != number or self._freed >= self._ready:
            raise ValueError(f"it has taken a piece of message {number} that it was not given")
        self._freed += 1
        if self._freed * chunk < self.sends[0].nbytes:
            return None
        self._put = self._ready = self._freed = 0
        return self.sends.popleft()


class Copier:
    """The thread in which copies are made, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Does not block. `work` does not raise."""
        self._works.put(work)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftcomm-post-copies", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """What was asked for so far is done, and nothing else will be. Blocks for that."""
        self._works.put(None)
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()
