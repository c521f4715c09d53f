"""Durable views, which a coordinator must have written before it sends them, and who has finished.

ViewStore    an append-only file with a JSON line per view, locked by the one coordinator that writes it
EtcdStore    (`ftcomm.control.etcd_store`) in etcd, for coordinators on different hosts
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftcomm.control.decode import decode_with
from ftcomm.control.field_types import Name
from ftcomm.control.finishes import NO_FINISHES, Finishes
from ftcomm.control.fork import keep_from_children
from ftcomm.control.liveness import boot
from ftcomm.control.unstarted import Reports, Unstarted
from ftcomm.control.views import View

DECODER = msgspec.json.Decoder(View)
_LONGEST = 64  # characters of a name that was made here


class _Kept(msgspec.Struct, frozen=True):
    """The reports of ranks that cannot start. Their times are those of one kernel."""

    boot: Name
    reports: Reports


_KEPT = msgspec.json.Decoder(_Kept)
_FINISHES = msgspec.json.Decoder(Finishes)


class StoreError(RuntimeError):
    """The views of a job cannot be used; the message says why and what to do."""


class JobOver(StoreError):
    """Another coordinator has ended the job; there is nothing left to decide."""


class Store(abc.ABC):
    """A place for views. Belongs to one event loop. `acquire` comes first, and again after every `doubt`."""

    views: list[View]  # the last two at most
    reports: tuple[Unstarted, ...] = ()  # what `keep` was given last
    finishes: Finishes = NO_FINISHES  # what was written last; none in a store of a version that knew of none
    name: str  # for messages
    tell: Callable[[str], None] = staticmethod(lambda text: None)  # is told, in words, what a person should know

    @abc.abstractmethod
    def job(self) -> str:
        """Returns a name for the job, the same until `clear`, for a job that was given none. May block for a
        time. Raises `StoreError`."""

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
    def write_finishes(self, finishes: Finishes) -> asyncio.Future[None] | None:
        """Write who has finished, in place of what was written before. Returns and raises what `append` does."""

    def keep(self, reports: tuple[Unstarted, ...]) -> None:
        """Keep what ranks have said that cannot start, at least for as long as this process lives. Raises `OSError`."""
        self.reports = reports

    @abc.abstractmethod
    async def clear(self) -> None:
        """Remove the views, since the job is over and the next one of this name must not find them."""

    @abc.abstractmethod
    async def release(self) -> None:
        """Let other coordinators have the store; idempotent."""


class ViewStore(Store):
    """Keeps the views of a job so that a restarted coordinator never reuses an epoch. With `path` None: memory only.
    In `path`.finished is who has finished, if anybody has; in `path`.unstarted what ranks have said that cannot start,
    if any have; in `path`.job the name of the job, if it was asked for.

    Not thread-safe. `append` and `write_finishes` return when it is on the disk.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.name = path, str(path)
        self._fd: int | None = None
        self._end = 0  # bytes of the file up to the last complete view
        self._gone: list[View] = []  # complete once, and cut away
        keep_from_children(self, lambda store: () if store._fd is None else (store._fd,))  # a child would keep the lock
        self.views = []

    def job(self) -> str:
        made = secrets.token_hex(8)
        if self.path is None:
            return made
        there, new = self._job_file(self.path), self.path.with_name(f"{self.path.name}.job.{made}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(made)
                file.flush()
                os.fsync(file.fileno())
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(new, there)
            finally:
                new.unlink()
            with open(os.open(there, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                self._check(there, file.fileno())
                name = file.read(_LONGEST + 1).decode("ascii", "replace").strip()
        except OSError as error:
            raise StoreError(
                f"cannot keep the name of the job in {there}: {error.strerror}; choose another --store, or: "
                f"export FTCOMM_JOB={made}"
            ) from error
        if not 0 < len(name) <= _LONGEST or not name.isprintable():
            raise StoreError(f"{there} holds no name of a job; remove it, or choose another --store")
        return name

    async def acquire(self) -> None:
        self.open()

    async def clear(self) -> None:
        if self.path is not None:
            self._finish_file(self.path).unlink(missing_ok=True)  # first: without views it would be of another job
            self.path.unlink(missing_ok=True)
            self._report_file(self.path).unlink(missing_ok=True)
            self._job_file(self.path).unlink(missing_ok=True)

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
        try:
            self._check(self.path, fd)
        except StoreError:
            os.close(fd)
            raise
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
        if not self.views:
            self._finish_file(self.path).unlink(missing_ok=True)  # the views alone were removed
        self.finishes = self._read_finishes(self._finish_file(self.path))
        self.reports = self._read_reports(self._report_file(self.path))

    def _check(self, path: Path, fd: int) -> None:
        """Check that the file was not put there to deceive us, and that its name lasts. The owner of the folder could
        replace it anyway, and a file server may map us to that owner."""
        found = os.fstat(fd)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            trusted = (os.geteuid(), os.fstat(folder).st_uid)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in trusted:
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

    @staticmethod
    def _finish_file(path: Path) -> Path:
        return path.with_name(f"{path.name}.finished")

    @staticmethod
    def _report_file(path: Path) -> Path:
        return path.with_name(f"{path.name}.unstarted")

    @staticmethod
    def _job_file(path: Path) -> Path:
        return path.with_name(f"{path.name}.job")

    def _read_finishes(self, path: Path) -> Finishes:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                self._check(path, file.fileno())
                finishes: Finishes = decode_with(_FINISHES, file.read())
        except FileNotFoundError:
            return NO_FINISHES
        except (OSError, msgspec.DecodeError, StoreError) as error:
            self.close()
            raise StoreError(
                f"{path} does not say which replicas have finished ({error}); remove it if none has, else choose "
                "another --store"
            ) from error
        return finishes

    def write_finishes(self, finishes: Finishes) -> None:
        if self._fd is not None and self.path is not None:
            self._replace(self._finish_file(self.path), msgspec.json.encode(finishes))
        self.finishes = finishes

    def _read_reports(self, path: Path) -> tuple[Unstarted, ...]:
        """Returns what is kept there. No job needs it, so a file that is not good counts as none."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                found = os.fstat(file.fileno())
                ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                kept = decode_with(_KEPT, file.read() if ours else b"")
        except (OSError, msgspec.DecodeError):
            return ()
        return kept.reports if kept.boot == boot() else ()

    def keep(self, reports: tuple[Unstarted, ...]) -> None:
        super().keep(reports)
        if self.path is None:
            return
        if not reports:
            self._report_file(self.path).unlink(missing_ok=True)
            return
        self._replace(self._report_file(self.path), msgspec.json.encode(_Kept(boot(), reports)))

    @staticmethod
    def _replace(path: Path, data: bytes) -> None:
        """Make `data` the contents of a file, which are the old or the new ones at any moment, and lasting."""
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def append(self, view: View) -> None:
        if self._fd is not None:
            if os.fstat(self._fd).st_size < self._end:  # it was cut from outside: what is known is written anew
                self._end, self._gone = 0, self.views[-1:]
            while self._gone:
                self._write(self._fd, self._gone[0])
                del self._gone[0]
            self._write(self._fd, view)
        self.views = [*self.views[-1:], view]

    def _write(self, fd: int, view: View) -> None:
        line = msgspec.json.encode(view) + b"\n"
        os.ftruncate(fd, self._end)  # the rest of an attempt that failed
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(fd)
        self._end += len(line)

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
