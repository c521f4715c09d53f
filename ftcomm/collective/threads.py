"""The share of an exchange in its process: a clock, a lock, a thread that drives, and what a driving thread sleeps on.

`ftcomm.simulation.exchange` puts virtual time in its place.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection

from ftcomm.control.failed_dials import start
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import Peer, Poller
from ftcomm.transport.connect import poller_for

log = logging.getLogger("ftcomm")


class Worker:
    """A thread that is started by the first kick, and drives once for each."""

    def __init__(self, name: str) -> None:
        self._name, self._warned = name, False
        self.thread: threading.Thread | None = None
        self._kicks: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def kick(self, drive: Callable[[None], None]) -> RuntimeError | None:
        """Let the thread call `drive`, which is the same every time. Returns the error if no thread can be had now."""
        if self.thread is None:
            thread = threading.Thread(target=self._serve, args=(drive,), name=self._name, daemon=True)
            lacks = start(thread)
            if lacks:
                if not self._warned:
                    log.warning("%s: an op in the background runs where it was called: %s", self._name, lacks)
                self._warned = True
                return lacks
            self.thread = thread
        self._kicks.put(True)
        return None

    def end(self) -> None:
        """Let the thread end when it has done what it was kicked for. May be repeated."""
        self._kicks.put(False)

    def _serve(self, drive: Callable[[None], None]) -> None:
        while self._kicks.get():
            drive(None)


class Threads:
    """One exchange's share of a process."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.changed = threading.Condition(self.mutex)
        self.clock: Callable[[], float] = time.monotonic

    def waiter(self, words: memoryview, asleep: int) -> Waiter:
        """Makes what a driving thread sleeps on."""
        return Waiter(words, asleep, 0)

    def poller(self, peers: Collection[Peer], waiter: Waiter) -> Poller | None:
        """Returns what the driver receives with from these peers, if it receives."""
        return poller_for(peers, waiter)

    def worker(self, name: str) -> Worker:
        return Worker(name)
