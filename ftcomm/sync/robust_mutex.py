"""Robust mutexes: the earliest sign that a process of this host has died.

A killed process first gives its memory back, which takes tens of milliseconds for a training's, and only then closes
its sockets and wakes who watches its pidfd. But before all that, as the very first thing, the kernel walks the list of
the robust futexes that each of its threads holds and marks every one of them. So a rank locks a robust mutex in its own
segment for as long as it lives, and its peers sleep on its word, read-only (`ftcomm.sync.death_watch`).

The kernel wakes a sleeper only if the word says that there is one. Sleepers cannot write it, so the owner says so for
them as soon as it holds the mutex; only its holder ever unlocks it, and only the owner writes the word. It wakes one
sleeper for each word, and that one may not get a core, or the interpreter lock, for a while: so there is a mutex for
every peer.

The mark is also left when the holding thread ends: hold the mutex from a thread that lives as long as the rank takes
part, and release it there if the rank leaves well before its process ends.
"""

from __future__ import annotations

import ctypes
import threading

DIED = 0x4000_0000  # the kernel's mark, FUTEX_OWNER_DIED
_WAITERS = 0x8000_0000  # FUTEX_WAITERS: the kernel has to wake one of those who sleep on the word
_OWNER = 0x3FFF_FFFF  # the thread id of the holder
_PSHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST


def hold(*addresses: int) -> bool:
    """Lock a new robust mutex at each address (64 zeroed bytes of shared memory, aligned to 8) in the calling thread.

    Returns False if the C library lays its mutexes out differently from what `owner_died` expects: then no death is
    ever seen this way. Does not block.
    """
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)
    try:
        failed = (
            libc.pthread_mutexattr_init(attributes)
            or libc.pthread_mutexattr_setpshared(attributes, _PSHARED)
            or libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        )
        for address in addresses:
            mutex = ctypes.c_void_p(address)
            failed = failed or libc.pthread_mutex_init(mutex, attributes) or libc.pthread_mutex_lock(mutex)
            word = ctypes.c_uint32.from_address(address)
            if failed or word.value != threading.get_native_id():
                return False
            word.value |= _WAITERS
    except AttributeError:  # a C library without robust mutexes
        return False
    return True


def release(*addresses: int) -> None:
    """Unlock those that the calling thread holds, so that its end does not count as a death. Does not block."""
    libc = ctypes.CDLL(None)
    for address in addresses:
        if ctypes.c_uint32.from_address(address).value & _OWNER == threading.get_native_id():
            libc.pthread_mutex_unlock(ctypes.c_void_p(address))


def owner_died(word: int) -> bool:
    """Whether the thread that held the mutex whose first 64 bits are `word` ended without unlocking it."""
    return bool(word & DIED)
