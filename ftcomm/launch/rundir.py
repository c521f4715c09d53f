"""The directory of a run (the coordinator's views), and its reaper, which removes it and the run's processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ftcomm.errors import SettingsError
from ftcomm.launch import reaper

VIEWS = "views"  # the coordinator's store
LOCK = "lock"  # held by the launcher and its reaper for as long as either lives


def base_dir() -> Path:
    """Returns the directory of this user's runs; made if missing, mode 0700. Raises `SettingsError` if others have
    access."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = Path(runtime) if runtime and os.access(runtime, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    base = parent / f"ftcomm-{os.getuid()}"
    mend = "remove it, or set TMPDIR to a directory that you can write to"
    try:
        with contextlib.suppress(FileExistsError):
            base.mkdir(mode=0o700)
        info = base.lstat()
    except OSError as error:
        raise SettingsError(f"cannot use {base} for the files of a run: {error.strerror}; {mend}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        # In a shared /tmp another user could have made it first, to read or change what we put there.
        raise SettingsError(f"{base} is not a directory that only you can use; {mend}")
    return base


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """Yields another name of `path`, valid inside the block, that fits into the 107 bytes of a unix socket's
    address."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


class RunDir:
    """A fresh directory, and the reaper that cleans up after this process. Not thread-safe."""

    def __init__(self) -> None:
        base = base_dir()
        self.run = secrets.token_hex(8)
        self.path = base / self.run
        with _locked(base):
            _remove_stale(base)
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Not passed on: with the settings of a run in its environment, the reaper could be taken for a part of that
        # run when one launcher runs inside another.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FTCOMM_")}
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, self.mark(), str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._lock,),  # the lock is open in both, so it is free only when both are gone
            env=environment,
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )

    def mark(self, *parts: int) -> str:
        """Returns the value of `reaper.MARK` of the run, or with (replica, start, rank) of one rank, which begins with
        the run's."""
        return "".join(f"{part}:" for part in (self.run, *parts))

    def started(self, pid: int) -> None:
        self._tell(f"start {pid}\n")

    def ended(self, pid: int, mark: str) -> None:
        """Let the reaper kill what the dead rank `pid` left outside of its process group. Does not block."""
        self._tell(f"end {pid} {mark}\n")

    def remove(self) -> None:
        """Kill everything of the run and remove the directory; blocks until that is done (seconds at worst)."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        try:
            code = self._reaper.wait(reaper.PATIENCE + 5)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            code = self._reaper.wait()
        if code != 0:  # it was killed
            reaper.kill_all(self.mark(), set())
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _tell(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed; `remove` does its work then
            self._reaper.stdin.write(line.encode())


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Hold the lock under which directories are made and cleaned, so that a new one is locked before it can look
    stale."""
    fd = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(base: Path) -> None:
    """Remove directories without a lock, left by a power cut, or by a launcher and a reaper that were both killed."""
    for path in base.iterdir():
        if not path.is_dir() or path.is_symlink():
            continue
        try:
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            shutil.rmtree(path, ignore_errors=True)
            continue
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        else:
            reaper.kill_all(f"{path.name}:", set(), patience=1.0)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
