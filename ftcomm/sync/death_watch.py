"""A thread that sleeps until the kernel marks one of many robust mutexes (`robust_mutex`): its owner has died.

All groups of a process share it, however many there are, as long as one sleep has room for their words; then there is
another one.

    word          written by               read by             woken by
    mutex         owner, at its start      its watchers, one   the kernel, when the owner dies: one watcher; that one
                  kernel, at its end       if it can be        wakes the others
    rung (below)  whoever calls `watch`    this thread alone   the same caller

`futex_waitv` (Linux 5.16) sleeps on up to 128 words at once, read-only ones too, and compares each with what was seen
before, so that nothing is missed between a look and the sleep. A watcher that is stopped (SIGSTOP) or killed leaves the
queue of a word by that, so it does not swallow a wake-up that the others need.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from ftcomm.sync.futex import wake
from ftcomm.sync.robust_mutex import owner_died
from ftcomm.sync.sched import request_short_slice

log = logging.getLogger("ftcomm")

WatchedT = TypeVar("WatchedT")

_FUTEX_WAITV = 449  # the same number on all architectures but alpha
_SIZE_U32, _PRIVATE = 2, 128
_MOST = 128 - 1  # words of one futex_waitv, without our own
_AGAIN = 1.0  # s until the next attempt, if one has failed


class MutexWord(NamedTuple):
    """`words[at]`, at `address`, is the first word of a robust mutex. Holding `words` keeps it mapped."""

    words: memoryview
    at: int
    address: int


class _Waiter(ctypes.Structure):
    """struct futex_waitv"""

    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class DeathWatch(Generic[WatchedT]):
    """Calls `on_died(key)`, in the thread, once for each watched key whose owner has died. It must not wait for
    anything: other groups hear of deaths after that.

    Where the kernel has no futex_waitv it never calls, and slower signs of a death have to do. Thread-safe.
    """

    def __init__(self, on_died: Callable[[WatchedT], None]) -> None:
        self._on_died = on_died
        # The lock of all watches guards the rest.
        self.words: dict[WatchedT, MutexWord] = {}
        self._told: set[WatchedT] = set()
        self._thread: WatchThread | None = None
        self._closed = False

    def watch(self, mutexes: Mapping[WatchedT, MutexWord]) -> None:
        """Watch these and no others from now on. Does not block. Raises `RuntimeError` if no thread can be started."""
        with _all_watches:
            if self._closed or self.words.keys() == mutexes.keys():
                return
            before = self._thread
            others = 0 if before is None else before.words - len(self.words)
            if mutexes and (before is None or (others and others + len(mutexes) > _MOST)):
                thread = WatchThread.with_room(
                    len(mutexes)
                )  # first: if there is none to be had, a later call tries again
                thread.watches.append(self)
                if before is not None:
                    before.watches.remove(self)
                    before.ring()
                self._thread = thread
            self._told &= mutexes.keys()
            self.words = dict(mutexes)
            if self._thread is not None:
                self._thread.ring()

    def close(self) -> None:
        """Watch nothing any more, and let go of the memory. Does not block; idempotent."""
        with _all_watches:
            self.end()
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.watches.remove(self)
                thread.ring()

    def end(self) -> None:
        """Call nobody any more. With the lock."""
        self._closed = True
        self.words = {}
        self._on_died = _nobody  # the callback may refer to the owner of this watch

    def tell(self, key: WatchedT) -> None:
        """Call for a dead one, unless that was done. In the thread."""
        with _all_watches:
            if key not in self.words or key in self._told:
                return
            self._told.add(key)
            on_died, address = self._on_died, self.words[key].address
        wake(address)  # the kernel has woken one, maybe us
        try:
            on_died(key)
        except Exception:  # a defect, from which the other groups must not suffer
            log.exception("the death of a process was not noted by all of its groups")


class WatchThread:
    """The thread of some watches, which ends with the last of them. With the lock, but for what runs in it."""

    running: ClassVar[list[WatchThread]] = []  # all of this process

    def __init__(self) -> None:
        self.watches: list[DeathWatch[Any]] = []
        self._rung = ctypes.c_uint32(0)
        threading.Thread(target=self._run, name="ftcomm-watch", daemon=True).start()
        WatchThread.running.append(self)

    @classmethod
    def with_room(cls, words: int) -> WatchThread:
        """Returns one that has room for so many words, or has no others. Raises `RuntimeError` if none can be
        started."""
        return next((thread for thread in cls.running if thread.words + words <= _MOST), None) or cls()

    @property
    def words(self) -> int:
        return sum(len(watch.words) for watch in self.watches)

    def ring(self) -> None:
        """Let the thread look at its watches anew."""
        self._rung.value = (self._rung.value + 1) & 0xFFFF_FFFF
        wake(ctypes.addressof(self._rung), private=True)

    def _run(self) -> None:
        request_short_slice()
        try:
            while self._round():
                pass
        finally:  # a new group would be given a thread that does not run
            with _all_watches:
                if self in WatchThread.running:
                    WatchThread.running.remove(self)

    def _round(self) -> bool:
        """Look at all words, and sleep once; False if there is nothing left to watch. Between two rounds the thread
        refers to no memory, which so goes with its last user."""
        with _all_watches:
            rung = self._rung.value
            watched = [(watch, key, mutex) for watch in self.watches for key, mutex in watch.words.items()]
            if not self.watches:
                WatchThread.running.remove(self)
                return False
        waiting: list[tuple[MutexWord, int]] = []
        for watch, key, mutex in watched:
            word = mutex.words[mutex.at]
            if owner_died(word):
                watch.tell(key)
            else:
                waiting.append((mutex, word))
        if self._sleep(rung, waiting[:_MOST]):
            return True
        with _all_watches:
            WatchThread.running.remove(self)
            for watch in self.watches:
                watch.end()
        return False

    def _sleep(self, rung: int, waiting: list[tuple[MutexWord, int]]) -> bool:
        """Sleep until one of the words has changed; False if this kernel cannot. `waiting` keeps the memory mapped."""
        waiters = (_Waiter * (len(waiting) + 1))()
        waiters[0] = _Waiter(rung, ctypes.addressof(self._rung), _SIZE_U32 | _PRIVATE, 0)
        for place, (mutex, word) in enumerate(waiting, 1):
            waiters[place] = _Waiter(word & 0xFFFF_FFFF, mutex.address, _SIZE_U32, 0)
        if _waitv(_FUTEX_WAITV, waiters, len(waiters), 0, None, 0) >= 0:
            return True
        failed = ctypes.get_errno()
        if failed in (errno.ENOSYS, errno.EPERM):  # an older kernel, a filter of system calls
            name = errno.errorcode[failed]
            log.debug("no futex_waitv (%s, %s): ends of processes are seen later", name, platform.release())
            return False
        if failed not in (errno.EAGAIN, errno.EINTR):  # want of memory, say; all groups of this process need it
            log.warning("futex_waitv: %s; it is tried again", os.strerror(failed))
            time.sleep(_AGAIN)
        return True


_all_watches = threading.Lock()  # never held across a wait


def _nobody(key: object) -> None:
    pass


def _in_child() -> None:
    """Begin anew: a child has none of the threads, and may have been forked while the lock was held."""
    global _all_watches
    _all_watches = threading.Lock()
    WatchThread.running = []


os.register_at_fork(after_in_child=_in_child)

_waitv = ctypes.CDLL(None, use_errno=True).syscall  # drops the interpreter lock for as long as it sleeps
_waitv.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_int,
)
_waitv.restype = ctypes.c_long
