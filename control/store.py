"""Durable views, which a coordinator must have written before it sends them.

ViewStore    an append-only file with a JSON line per view, locked by the one coordinator that writes it
EtcdStore    (`ftcomm.control.etcd_store`) in etcd, for coordinators on different hosts
"""

from __future__ import annotations

import abc
import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftcomm.control.admission import MESSAGE, Room
from ftcomm.control.decode import decode_with
from ftcomm.control.fork import apart
from ftcomm.control.views import View

DECODER = msgspec.json.Decoder(View)


class StoreError(RuntimeError):
    """The views of a job cannot be used; the message says why and what to do."""


class JobOver(StoreError):
    """Another coordinator has ended the job; there is nothing left to decide."""


class Store(abc.ABC):
    """A place for views. Belongs to one event loop. `acquire` comes first, and again after every `doubt`."""

    views: list[View]  # the last two at most
    room: Room = MESSAGE  # for each view
    name: str  # for messages
    tell: Callable[[str], None] = staticmethod(lambda text: None)  # is told, in words, what a person should know

    @abc.abstractmethod
    async def acquire(self) -> None:
        """Become the only coordinator of the job, and read its views. Raises `StoreError` if there is another."""

    @property
    def sure(self) -> bool:
        """Whether no other coordinator can decide for the job at this moment."""
        return True

    async def doubt(self) -> None:
        """Waits until `sure` has ended, which may be never."""
        await asyncio.Event().wait()

    @abc.abstractmethod
    def append(self, view: View) -> asyncio.Future[None] | None:
        """Write `view`. Returns None if it is written, else a future, which lasts for as long as the view is not.
        Raises `OSError`; the future raises `StoreError` if a new attempt would not help."""

    @abc.abstractmethod
    async def clear(self) -> None:
        """Remove the views, since the job is over and the next one of this name must not find them."""

    @abc.abstractmethod
    async def release(self) -> None:
        """Let other coordinators have the store; idempotent."""


class ViewStore(Store):
    """Keeps the views of a job so that a restarted coordinator never reuses an epoch. With `path` None: memory only.

    Not thread-safe. `append` returns when the view is on the disk.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.name = path, str(path)
        self._fd: int | None = None
        self._end = 0  # bytes of the file up to the last complete view
        apart(self, lambda store: () if store._fd is None else (store._fd,))  # a child would keep the lock
        self.views = []

    async def acquire(self) -> None:
        self.open()

    async def clear(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    async def release(self) -> None:
        self.close()

    def open(self) -> None:
        """Lock the file and read it. Raises `StoreError` if another coordinator has it or it cannot be read."""
        if self.path is None:
            return
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise StoreError(f"cannot open the file of views {self.path}: {why}; choose another --store") from error
        self._check(self.path, fd)
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

    def _check(self, path: Path, fd: int) -> None:
        """Check that the file was not put there to deceive us, and that its name lasts. The owner of the folder could
        replace it anyway, and a file server may map us to that owner."""
        found = os.fstat(fd)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            trusted = (os.geteuid(), os.fstat(folder).st_uid)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in trusted:
                os.close(fd)
                raise StoreError(
                    f"{path} is not a file of this user, but of user {found.st_uid}; remove it, or choose another "
                    "--store"
                )
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self, fd: int) -> list[View]:
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            lines = file.read().split(b"\n")
        whole, rest = lines[:-1], lines[-1]
        self._end = sum(len(line) + 1 for line in whole)
        if rest:  # power was cut during a write: that view was never sent
            os.ftruncate(fd, self._end)
        try:
            return [decode_with(DECODER, line) for line in whole[-2:]]
        except msgspec.DecodeError as error:
            self.close()
            raise StoreError(f"{self.path} holds no views of this version ({error}); choose another --store") from error

    def append(self, view: View) -> None:
        if self._fd is not None:
            line = msgspec.json.encode(view) + b"\n"
            os.ftruncate(self._fd, self._end)  # the rest of an attempt that failed
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._fd)
            self._end += len(line)
        self.views = [*self.views[-1:], view]

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
