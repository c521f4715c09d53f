"""The directory of a run (the coordinator's views), and its reaper, which removes it and the run's processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ftcomm.launch import reaper
from ftcomm.process.user_dir import LOCK, base_dir, locked, unused

VIEWS = "views"  # the coordinator's store


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """Yields another name of `path`, valid inside the block, that fits into the 107 bytes of a unix socket's
    address."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


class SocketDir:
    """A fresh directory for the socket of a process that starts none of its own. Not thread-safe."""

    def __init__(self) -> None:
        self.path, self._lock = _fresh()
        self.run = self.path.name

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class RunDir:
    """A fresh directory, and the reaper that cleans up after this process. Not thread-safe."""

    def __init__(self) -> None:
        self.path, self._lock = _fresh()
        self.run = self.path.name
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
            code = self._reaper.wait(reaper.EXIT_TIMEOUT + 5)
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


def _fresh() -> tuple[Path, int]:
    """Makes the directory of a run, which names the run; returns it, and the lock that says it is in use."""
    base = base_dir()
    path = base / secrets.token_hex(8)
    with locked(base):
        _remove_stale(base)
        path.mkdir(mode=0o700)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return path, lock


def _remove_stale(base: Path) -> None:
    """Remove directories without a lock, left by a power cut, or by a launcher and a reaper that were both killed."""
    for path in base.iterdir():
        if not path.is_dir() or path.is_symlink():
            continue
        if unused(path):
            reaper.kill_all(f"{path.name}:", set(), timeout=1.0)
            shutil.rmtree(path, ignore_errors=True)
