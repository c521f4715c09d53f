"""One thread of a process sleeps on the connections of all its groups, however many peers they have.

    who receives from a peer    what the thread waits for
    a driver                    the end of the connection: so a death is seen though no op is in flight
    this thread                 frames, too

The first connection starts the thread, and the end of the last one ends it. While drivers receive, it makes no system
call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from typing import Protocol

from ftcomm.sync.doorbell import Doorbell

log = logging.getLogger("ftcomm")

ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Reader(Protocol):
    """The reader of a connection."""

    def ready(self, events: int) -> None:
        """Receive what has come, or the end of the connection. In the thread, which serves others, too: it must not
        wait for anything."""
        ...


class EpollThread:
    """The thread, and the connections that it waits for. Thread-safe; no method blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the rest; never held during a wait
        self._readers: dict[int, Reader] = {}  # by descriptor
        self._epoll: select.epoll | None = None  # of the thread, if there is one
        self._bell: Doorbell | None = None  # rung when the last reader has left

    def enter(self, fd: int, reader: Reader, *, receives: bool) -> None:
        """Wait for the end of a connection until `leave`; and, if the thread `receives`, for frames. Raises
        `RuntimeError` or `OSError` if no thread or descriptor is left."""
        with self._lock:
            if self._epoll is not None:
                self._epoll.register(fd, _events(receives))
            else:
                bell, epoll = Doorbell(), select.epoll()
                epoll.register(bell, select.EPOLLIN)
                epoll.register(fd, _events(receives))
                threading.Thread(target=self._run, args=(epoll, bell), name="ftcomm-epoll", daemon=True).start()
                self._epoll, self._bell = epoll, bell
            self._readers[fd] = reader

    def change(self, fd: int, reader: Reader, *, receives: bool) -> None:
        """Wait for frames from now on, too, or no longer. Does nothing after `leave`."""
        with self._lock:
            if self._readers.get(fd) is reader and self._epoll is not None:
                with contextlib.suppress(OSError):  # the script has closed it
                    self._epoll.modify(fd, _events(receives))

    def leave(self, fd: int, reader: Reader) -> None:
        """Wait for this connection no more; idempotent. Must come before its descriptor is closed, whose number may
        mean another connection after that."""
        with self._lock:
            if self._readers.get(fd) is not reader or self._epoll is None or self._bell is None:
                return
            del self._readers[fd]
            with contextlib.suppress(OSError):  # the script has closed it
                self._epoll.unregister(fd)
            if not self._readers:
                self._bell.ring()

    def forked(self) -> None:
        """Start anew in a child, which has not the thread, and may have been forked while the lock was held."""
        self.__init__()  # type: ignore[misc]

    def _run(self, epoll: select.epoll, bell: Doorbell) -> None:
        """Run the thread. If that fails, since the script has closed its descriptors, the next connection gets another
        one."""
        try:
            while self._round(epoll, bell):
                pass
        finally:
            with self._lock:
                if self._epoll is epoll:
                    self._end()

    def _round(self, epoll: select.epoll, bell: Doorbell) -> bool:
        """Sleep once, and hand out what has come; False if nothing is left to wait for. Between rounds the thread
        refers to no reader that has left, so that the memory of a mirror goes with its last user."""
        events = epoll.poll()
        with self._lock:
            if not self._readers:
                self._end()
                return False
            ready = [(fd, self._readers[fd], what) for fd, what in events if fd in self._readers]
            if len(ready) < len(events):
                bell.clear()  # of a last one, after which another came
        for fd, reader, what in ready:
            try:
                reader.ready(what)
            except Exception:  # a defect, from which the others must not suffer
                log.exception("a connection for data is not waited for any more")
                self.leave(fd, reader)
        return True

    def _end(self) -> None:
        """Let the next connection start a thread. With the lock."""
        self._readers, self._epoll, self._bell = {}, None, None


def _events(receives: bool) -> int:
    return select.EPOLLRDHUP | (select.EPOLLIN if receives else 0)


EPOLL_THREAD = EpollThread()  # of this process
os.register_at_fork(after_in_child=EPOLL_THREAD.forked)
