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

import contextlib
import ctypes
import itertools
import os
import platform
import select
import stat
import sys
from collections.abc import Callable

ORDERED = platform.machine() in ("x86_64", "AMD64") and sys.byteorder == "little"

SLEEP = 0.010  # seconds; the longest sleep before the caller looks around

IN_POLL = 1  # in the word `asleep`: it sleeps on more than words, and wants its bell rung
BELL = 1  # words behind `asleep`: where its bell is, two words

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
    """A descriptor that becomes readable when it is rung: the end of a pipe, so that other processes of this user can
    ring it, see `Ringer`. Stays open as long as somebody has it: a number that was closed may mean another file before
    the last thread rings it."""

    def __init__(self) -> None:
        self._fd, self._mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.place = self._mouth, os.fstat(self._mouth).st_ino  # by which others find it, in this process

    def __del__(self) -> None:
        os.close(self._fd)
        os.close(self._mouth)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was rung often enough
            os.write(self._mouth, b"!")

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 1 << 16)


class Ringer:
    """Rings the bell of process `pid`, whose `Bell.place` is (`fd`, `inode`). One that cannot be found, as the process
    has ended, or does not belong to this user, is not rung: who sleeps wakes up by itself after `SLEEP` seconds."""

    def __init__(self, pid: int, fd: int, inode: int) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            # For reading as well: else a bell whose owner has ended would raise SIGPIPE, which a script may not ignore.
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(opened)
            if stat.S_ISFIFO(found.st_mode) and found.st_ino == inode:  # else of somebody who has the same pid now
                self._fd = opened
            else:
                os.close(opened)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def ring(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._fd, b"!")


class Waiter:
    """How one engine waits. `until` and `doze` are for the one thread that drives the engine, `poke` for all others.

    `own` are the words of the engine's own segment, `asleep` the index in it of the word that tells the others on what
    this engine sleeps, and behind it, from the first doze on, where its bell is. `rounds` is how often it polls and
    yields before it sleeps.
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

    def doze(self, poll: select.poll, seconds: float, look: Callable[[], bool] | None = None) -> list[int] | None:
        """Sleep until one of the descriptors of `poll` is ready, a poke, or so long; which are ready.

        With `look`, words in shared memory count as well: whoever raises one from now on rings, if it looks at `asleep`
        as `until` wants it, and `look` says whether there is something to do by then: None.
        """
        if self._bell is None:
            self._bell = Bell()
            self._own[self._asleep + BELL], self._own[self._asleep + BELL + 1] = self._bell.place
        bell = self._bell.fileno()
        poll.register(bell, select.POLLIN)
        self._dozes = True
        try:
            if look is not None:
                self._own[self._asleep] = IN_POLL
                if look():
                    return None
            ready = [] if self.poked else [fd for fd, _ in poll.poll(seconds * 1e3)]
        finally:
            self._own[self._asleep] = 0
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
