"""Words in shared memory, and how to wait on one: poll a little, yield the core, then sleep in the kernel.

A *word* is an aligned unsigned 64-bit integer with exactly one writer, which only ever increases it. The writer stores
it with one plain store after the data that it announces; a reader that sees the value sees the data. That holds on
x86-64, where stores become visible in program order and loads are done in program order (`ORDERED` is False elsewhere,
and shared memory is not used there).

A reader that goes to sleep says so in its own `asleep` word, and the writer makes the wake-up call (1 us) only then.
Between the writer's store of the word and its load of `asleep` the processor may swap the two, so a wake-up can in
principle be missed. The kernel compares the word once more before it puts the reader to sleep, which leaves a window of
some nanoseconds, and no sleep lasts longer than `SLEEP`, so that a miss costs time and nothing else.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import select
import sys

ORDERED = platform.machine() in ("x86_64", "AMD64") and sys.byteorder == "little"

SLEEP = 0.010  # seconds; the longest sleep before the caller looks around

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
_LIMIT = _Timespec(0, int(SLEEP * 1e9))

_POLLS = 32  # in a round, about 2 us; then the core is yielded, in case the writer waits for it


def wake(address: int, *, private: bool = False) -> None:
    """Wake everybody who sleeps on the word at `address`, `private` to this process. Does not block. Any thread."""
    _wake(_NUMBER, address, _FUTEX_WAKE | _PRIVATE * private, 0x7FFFFFFF, None, None, 0)


class Bell:
    """A descriptor that becomes readable when it is rung. Stays open as long as somebody has it: a number that was
    closed may mean another file before the last thread rings it."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def silence(self) -> None:
        os.eventfd_read(self._fd)


class Waiter:
    """How one engine waits. `until` and `doze` are for the one thread that drives the engine, `poke` for all others.

    `own` are the words of the engine's own segment, `asleep` the index in it of the word that tells the others on what
    this engine sleeps. `rounds` is how often it polls and yields before it sleeps.
    """

    def __init__(self, own: memoryview, asleep: int, rounds: int) -> None:
        self.poked = False
        self.rounds = rounds
        self._own = own
        self._asleep = asleep
        self._address = 0  # of the word it sleeps on
        self._bell: Bell | None = None
        self._dozes = False

    def until(self, words: memoryview, index: int, address: int, target: int, limit: int, token: int) -> bool:
        """Wait for `target <= words[index] < limit`; the word lies at `address`, `token` is what `asleep` is set to.

        False if that was not seen before a poke or one sleep of at most `SLEEP` seconds: look around and call again.
        """
        for _ in range(self.rounds):
            for _ in itertools.repeat(None, _POLLS):
                if target <= words[index] < limit:
                    return True
            if self.poked:
                return False
            os.sched_yield()
        self._address = address
        self._own[self._asleep] = token
        try:
            seen = words[index]
            if not target <= seen < limit and not self.poked:
                # Only the low half of a word fits a futex. It is the counter, and it changes with every store but
                # one: the first of a new epoch may leave it as it was, and then the sleep ends by its limit.
                _wait(_NUMBER, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(_LIMIT), None, 0)
        finally:
            self._own[self._asleep] = 0
            self._address = 0
        return target <= words[index] < limit

    def doze(self, poll: select.poll, seconds: float) -> list[int]:
        """Sleep until one of the descriptors of `poll` is ready, a poke, or so long; which are ready."""
        if self._bell is None:
            self._bell = Bell()
        bell = self._bell.fileno()
        poll.register(bell, select.POLLIN)
        self._dozes = True
        try:
            ready = [] if self.poked else [fd for fd, _ in poll.poll(seconds * 1e3)]
        finally:
            self._dozes = False
        if bell in ready:
            self._bell.silence()
            ready.remove(bell)
        return ready

    def poke(self) -> None:
        """Let `until` and `doze` return soon (at once if it spins or sleeps already, else within `SLEEP`)."""
        self.poked = True
        self.nudge()

    def nudge(self) -> None:
        """Wake the driving thread if it sleeps."""
        address = self._address
        if address:
            wake(address)
        elif self._dozes and self._bell is not None:
            self._bell.ring()


def cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))
