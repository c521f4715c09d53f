"""Waiting on a word in shared memory: poll a little, yield the core, then sleep in the kernel (futex).

A *word* is an aligned unsigned 64-bit integer with exactly one writer, which only ever increases it. The writer stores
it with one plain store after the data that it announces; a reader that sees the value sees the data. That holds on
x86-64, where stores become visible in program order and loads are done in program order (`TOTAL_STORE_ORDER` is False
elsewhere, and shared memory is not used there).

A reader that goes to sleep says so in its own `asleep` word, and the writer makes the wake-up call (1 us) only then.
Between the writer's store of the word and its load of `asleep` the processor may swap the two, so a wake-up can in
principle be missed. The kernel compares the word once more before it puts the reader to sleep, which leaves a window of
some nanoseconds, and no sleep lasts longer than `MAX_SLEEP`, so that a miss costs time and nothing else.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import select
import sys
from collections.abc import Callable

from ftcomm.sync.doorbell import Doorbell

TOTAL_STORE_ORDER = platform.machine() in ("x86_64", "AMD64") and sys.byteorder == "little"

MAX_SLEEP = 0.010  # seconds; the caller looks around at least this often

IN_POLL = 1  # value of an `asleep` word: its owner sleeps in `poll`, and is woken by its doorbell
DOORBELL = 1  # offset from the `asleep` word of two words with the place of that doorbell

_FUTEX_WAIT = 0  # neither private: the word lies in memory shared between processes
_FUTEX_WAKE = 1
_PRIVATE = 128
_SYS_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NUMBER = _SYS_FUTEX.get(platform.machine(), 98)
_ARGUMENTS = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_wait = ctypes.CDLL(None).syscall  # drops the interpreter lock for as long as it sleeps
_wait.argtypes = _ARGUMENTS
_wake = ctypes.PyDLL(None).syscall  # keeps it: waking never blocks, and getting the lock back may take milliseconds
_wake.argtypes = _ARGUMENTS
_LIMIT = _Timespec(0, int(MAX_SLEEP * 1e9))

_POLLS = 32  # in a round, about 2 us; then the core is yielded, in case the writer waits for it


def wake(address: int, *, private: bool = False) -> None:
    """Wake everybody who sleeps on the word at `address`, `private` to this process. Does not block. Any thread."""
    _wake(_NUMBER, address, _FUTEX_WAKE | _PRIVATE * private, 0x7FFFFFFF, None, None, 0)


class Waiter:
    """Waits for one exchange. `until` and `poll_sleep` are for the thread that drives it, `interrupt` for all others.

    `own` are the words of this rank's segment; `own[asleep]` tells the others what this rank sleeps on. The two words
    behind it say where its doorbell is, from the first `poll_sleep` on. `rounds` is how often it polls and yields
    before it sleeps.
    """

    def __init__(self, own: memoryview, asleep: int, rounds: int) -> None:
        self.interrupted = False
        self.rounds = rounds
        self._own = own
        self._asleep = asleep
        self._address = 0  # of the word it sleeps on
        self._doorbell: Doorbell | None = None
        self._in_poll = False

    def until(self, words: memoryview, index: int, address: int, target: int, limit: int, token: int) -> bool:
        """Wait for `target <= words[index] < limit`; the word lies at `address`, `token` is what `asleep` is set to.

        Returns False if that was not seen before an interrupt or one sleep of at most `MAX_SLEEP` seconds: the caller
        looks around and calls again.
        """
        for _ in range(self.rounds):
            for _ in itertools.repeat(None, _POLLS):
                if target <= words[index] < limit:
                    return True
            if self.interrupted:
                return False
            os.sched_yield()
        self._address = address
        self._own[self._asleep] = token
        try:
            seen = words[index]
            if not target <= seen < limit and not self.interrupted:
                # Only the low half of a word fits a futex. It is the counter, and it changes with every store but
                # one: the first of a new epoch may leave it as it was, and then the sleep ends by its limit.
                _wait(_NUMBER, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(_LIMIT), None, 0)
        finally:
            self._own[self._asleep] = 0
            self._address = 0
        return target <= words[index] < limit

    def poll_sleep(self, poll: select.poll, seconds: float, look: Callable[[], bool] | None = None) -> list[int] | None:
        """Sleep until a descriptor of `poll` is ready, an interrupt, or so many seconds. Returns the ready descriptors.

        With `look`, words in shared memory count as well: a peer that raises one from now on rings the doorbell if it
        finds `IN_POLL` in `asleep`. Returns None if `look` finds something to do before the sleep.
        """
        if self._doorbell is None:
            self._doorbell = Doorbell()
            self._own[self._asleep + DOORBELL], self._own[self._asleep + DOORBELL + 1] = self._doorbell.place
        doorbell = self._doorbell.fileno()
        poll.register(doorbell, select.POLLIN)
        self._in_poll = True
        try:
            if look is not None:
                self._own[self._asleep] = IN_POLL
                if look():
                    return None
            ready = [] if self.interrupted else [fd for fd, _ in poll.poll(seconds * 1e3)]
        finally:
            self._own[self._asleep] = 0
            self._in_poll = False
        if doorbell in ready:
            self._doorbell.clear()
            ready.remove(doorbell)
        return ready

    def interrupt(self) -> None:
        """Let `until` and `poll_sleep` return soon (at once if it spins or sleeps already, else within `MAX_SLEEP`)."""
        self.interrupted = True
        self.wake()

    def wake(self) -> None:
        """Wake the driving thread if it sleeps."""
        address = self._address
        if address:
            wake(address)
        elif self._in_poll and self._doorbell is not None:
            self._doorbell.ring()
