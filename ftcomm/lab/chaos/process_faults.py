"""Doing a fault and taking it back: signals to processes, requests to the launcher."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO

from ftcomm.errors import FtcommError
from ftcomm.launch.admin.client import JobEnded

STOP_SHARE = 0.6  # of a period, of one that is slowed down
HOLDS = signal.SIGUSR2  # tells a script to hold its interpreter
FORKS = signal.Signals(signal.SIGRTMIN)  # tells it to fork
FORKING = 20.0  # s that it may take for that; it may be in an op, and the host be slow
LIVING = 2  # children that live then
AWAY = 2.0  # s that a coordinator is away while its store is replaced
PERIODS = 8  # a heartbeat timeout: none of its stops is long enough to be taken for silence


class Processes:
    """Some processes, held by pidfd, so that a signal never hits a later process of the same number."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds: list[int] = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._fds.append(os.pidfd_open(pid))

    def signal(self, number: signal.Signals) -> None:
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)

    def close(self) -> None:
        """Continue what was stopped. Idempotent."""
        self.signal(signal.SIGCONT)
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class ActiveFault:
    """A fault that is being done; `close` takes it back, in any case and at any time. Idempotent."""

    def at(self, now: float) -> float | None:
        """Do what is due; returns when to be called again."""
        return None

    def close(self) -> None:
        pass


class Stopped(ActiveFault):
    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = Processes(pids)
        self._processes.signal(signal.SIGSTOP)

    def close(self) -> None:
        self._processes.close()


class Slowed(ActiveFault):
    """Stopped and let go in turn, for times shorter than a heartbeat."""

    def __init__(self, pids: Iterable[int], heartbeat_timeout: float) -> None:
        self._processes = Processes(pids)
        self._period = heartbeat_timeout / PERIODS
        self._stopped = False

    def at(self, now: float) -> float | None:
        self._stopped = not self._stopped
        self._processes.signal(signal.SIGSTOP if self._stopped else signal.SIGCONT)
        return now + self._period * (STOP_SHARE if self._stopped else 1 - STOP_SHARE)

    def close(self) -> None:
        self._processes.close()


class Paused(ActiveFault):
    """Stopped, and let go in time by a thread: who has asked for it waits for an answer of what is stopped."""

    def __init__(self, pids: Iterable[int], seconds: float) -> None:
        self._processes = Processes(pids)
        self._processes.signal(signal.SIGSTOP)
        self._timer = threading.Timer(seconds, self._processes.signal, (signal.SIGCONT,))
        self._timer.start()

    def close(self) -> None:
        self._timer.cancel()
        self._timer.join()
        self._processes.close()


class RolledBack(ActiveFault):
    """The coordinator comes back with its store as that was some views ago; `close` gives it the right one again."""

    def __init__(
        self, store: Path, views: int, restart: Callable[[float], object], decided: Callable[[], object]
    ) -> None:
        """`restart(away)` makes the coordinator go now, and come back so many seconds later; it raises `FtcommError`
        while another restart is under way. `decided` is called if views were added to the older store."""
        self._store, self._restart, self._decided = store, restart, decided
        self._right = b""
        with self._while_away() as file:
            self._right = file.read()
            lines = self._right.splitlines(keepends=True)
            self._older = b"".join(lines[: max(min(1, len(lines) - 1), len(lines) - views)])  # some, if there are
            _write_over(file, self._older)

    def close(self) -> None:
        if not self._right:
            return
        with self._while_away() as file:
            found = file.read()
            _write_over(file, self._right)
        self._right = b""
        if found != self._older:
            self._decided()

    @contextlib.contextmanager
    def _while_away(self) -> Iterator[IO[bytes]]:
        """The store, locked as a coordinator locks it, long before the next one comes. Raises `FtcommError`."""
        give_up = time.monotonic() + 10 * AWAY
        with open(self._store, "r+b") as file:
            while not self._locks(file):
                if time.monotonic() > give_up:
                    raise FtcommError("the coordinator does not let go of its store")
                time.sleep(0.05)
            yield file

    def _locks(self, file: IO[bytes]) -> bool:
        begun = time.monotonic()
        try:
            self._restart(AWAY)
        except JobEnded:
            raise
        except FtcommError:
            return False
        while time.monotonic() - begun < AWAY / 2:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.002)
        return False


def _write_over(file: IO[bytes], data: bytes) -> None:
    file.seek(0)
    file.truncate()
    file.write(data)


def hold(pids: Iterable[int]) -> None:
    """Tell a script that knows this signal to hold its interpreter, see `ftcomm.lab.chaos.train`."""
    processes = Processes(pids)
    processes.signal(HOLDS)
    processes.close()


def fork(pids: Collection[int]) -> None:
    """Tell a script that knows this signal to fork, and wait until children of it live. Raises `FtcommError`."""
    before = {pid: _children(pid) for pid in pids}
    processes = Processes(pids)
    processes.signal(FORKS)
    processes.close()
    give_up = time.monotonic() + FORKING
    while not all(len(_children(pid) - before[pid]) >= LIVING or not _exists(pid) for pid in pids):
        if time.monotonic() > give_up:
            raise FtcommError(f"of the processes {[*pids]} not all have forked within {FORKING:.0f} s")
        time.sleep(0.01)


def _children(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return set()


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def kill(pids: Iterable[int]) -> None:
    processes = Processes(pids)
    processes.signal(signal.SIGKILL)
    processes.close()
