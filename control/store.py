"""Durable views: an append-only file of one JSON line a view, locked by the one coordinator that may write it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import msgspec

from ftcomm.control.unpack import unpack
from ftcomm.control.views import View

_DECODER = msgspec.json.Decoder(View)


class StoreError(RuntimeError):
    """The file of views cannot be used; the message says why and what to do."""


class ViewStore:
    """Keeps the views of a job so that a restarted coordinator never reuses an epoch. With `path` None: memory only.

    Not thread-safe. `append` returns when the view is on the disk.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._fd: int | None = None
        self.views: list[View] = []  # the last two at most

    def open(self) -> None:
        """Lock the file and read it. Raises `StoreError` if another coordinator holds it or it cannot be read."""
        if self.path is None:
            return
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot open the file of views {self.path}: {error.strerror}; choose another --store"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise StoreError(
                f"{self.path} is in use by another coordinator; two of one job must not run. Stop the other one, or "
                "give this job a file of its own with --store"
            ) from None
        self._fd = fd
        self.views = self._read(fd)

    def _read(self, fd: int) -> list[View]:
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            lines = file.read().split(b"\n")
        whole, rest = lines[:-1], lines[-1]
        if rest:  # a power cut in the middle of a write: that view was never sent to anybody
            os.ftruncate(fd, sum(len(line) + 1 for line in whole))
        try:
            return [unpack(_DECODER, line) for line in whole[-2:]]
        except msgspec.DecodeError as error:
            self.close()
            raise StoreError(f"{self.path} holds no views of this version ({error}); choose another --store") from error

    def append(self, view: View) -> None:
        if self._fd is not None:
            line = msgspec.json.encode(view) + b"\n"
            end = os.lseek(self._fd, 0, os.SEEK_END)
            if os.write(self._fd, line) < len(line):
                os.ftruncate(self._fd, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._fd)
        self.views = [*self.views[-1:], view]

    def close(self) -> None:
        """Give the lock back; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
