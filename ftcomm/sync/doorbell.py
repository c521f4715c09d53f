"""Doorbells: pipes that wake a thread which sleeps in `poll`, from other threads and processes of this user."""

from __future__ import annotations

import contextlib
import os
import stat


class Doorbell:
    """A descriptor that is readable once it was rung.

    Stays open as long as somebody holds it: once closed, its number may mean another file before the last thread rings.
    """

    def __init__(self) -> None:
        self._fd, self._mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.place = self._mouth, os.fstat(self._mouth).st_ino  # by which other processes find it in this one

    def __del__(self) -> None:
        os.close(self._fd)
        os.close(self._mouth)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was rung often enough
            os.write(self._mouth, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 1 << 16)


class RemoteDoorbell:
    """The doorbell of process `pid`, whose `Doorbell.place` is (`fd`, `inode`).

    `ring` does nothing if it cannot be opened, because that process has ended or belongs to another user. Sleeps on a
    doorbell are short, so a missed ring costs time and nothing else.
    """

    def __init__(self, pid: int, fd: int, inode: int) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            # Opened for reading too: writing to a pipe without a reader raises SIGPIPE, which a script may not ignore.
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(opened)
            if stat.S_ISFIFO(found.st_mode) and found.st_ino == inode:  # otherwise the pid has been used again
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
