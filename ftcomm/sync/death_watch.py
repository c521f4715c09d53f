"""One thread that sleeps until the kernel marks one of many robust mutexes (`robust_mutex`): its owner has died.

    word          written by               read by             woken by
    mutex         owner, at its start      its watchers, one   the kernel, when the owner dies: one watcher; that one
                  kernel, at its end       if it can be        wakes the others
    own (below)   whoever calls `watch`    this thread alone   the same caller

`futex_waitv` (Linux 5.16) sleeps on up to 128 words at once, read-only ones too, and compares each with what was seen
before, so that nothing is missed between a look and the sleep. A watcher that is stopped (SIGSTOP) or killed leaves the
queue of a word by that, so it does not swallow a wake-up that the others need.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import threading
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from ftcomm.sync.futex import wake
from ftcomm.sync.robust_mutex import owner_died
from ftcomm.sync.sched import request_short_slice

log = logging.getLogger("ftcomm")

WatchedT = TypeVar("WatchedT")

_FUTEX_WAITV = 449  # the same number on all architectures but alpha
_SIZE_U32, _PRIVATE = 2, 128
_MOST = 128 - 1  # words of one futex_waitv, without our own


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
    """Calls `on_died(key)`, in a thread of its own, once for each watched key whose owner has died.

    Where the kernel has no futex_waitv it never calls, and slower signs of a death have to do. Thread-safe.
    """

    def __init__(self, on_died: Callable[[WatchedT], None]) -> None:
        self._on_died = on_died
        self._lock = threading.Lock()  # guards the rest; never held across a wait
        self._own = ctypes.c_uint32(0)
        self._words: dict[WatchedT, MutexWord] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, mutexes: Mapping[WatchedT, MutexWord]) -> None:
        """Watch these and no others from now on. Does not block. Raises `RuntimeError` if no thread can be started."""
        with self._lock:
            if self._closed or self._words.keys() == mutexes.keys():
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ftcomm-watch", daemon=True)
                thread.start()  # first: if there is no thread to be had, a later call tries again
                self._thread = thread
            self._words = dict(mutexes)
        self._interrupt()

    def close(self) -> None:
        """End the thread, and let go of the memory. Does not block; idempotent."""
        with self._lock:
            self._closed = True
            self._words = {}
            self._on_died = _nobody  # the callback may refer to the owner of this watch
        self._interrupt()

    def _interrupt(self) -> None:
        with self._lock:
            self._own.value = (self._own.value + 1) & 0xFFFF_FFFF
        wake(ctypes.addressof(self._own), private=True)

    def _run(self) -> None:
        request_short_slice()
        told: set[WatchedT] = set()
        while True:
            with self._lock:
                own, mutexes = self._own.value, self._words
                if self._closed:
                    return
            told &= mutexes.keys()
            waiting: list[tuple[MutexWord, int]] = []
            for key, mutex in mutexes.items():
                word = mutex.words[mutex.at]
                if not owner_died(word):
                    waiting.append((mutex, word))
                elif key not in told:
                    told.add(key)
                    wake(mutex.address)  # the kernel has woken one, maybe us
                    self._on_died(key)
            if not self._sleep(own, waiting[:_MOST]):
                return

    def _sleep(self, own: int, waiting: list[tuple[MutexWord, int]]) -> bool:
        """Sleep until one of the words has changed; False if this kernel cannot. `waiting` keeps the memory mapped."""
        waiters = (_Waiter * (len(waiting) + 1))()
        waiters[0] = _Waiter(own, ctypes.addressof(self._own), _SIZE_U32 | _PRIVATE, 0)
        for place, (mutex, word) in enumerate(waiting, 1):
            waiters[place] = _Waiter(word & 0xFFFF_FFFF, mutex.address, _SIZE_U32, 0)
        if _waitv(_FUTEX_WAITV, waiters, len(waiters), 0, None, 0) >= 0:
            return True
        failed = ctypes.get_errno()
        if failed in (errno.EAGAIN, errno.EINTR):
            return True
        log.debug(
            "no futex_waitv (%s, %s): ends of processes are seen later", errno.errorcode[failed], platform.release()
        )
        return False


def _nobody(key: object) -> None:
    pass


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
