"""Doing a fault and taking it back: signals to processes, requests to the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

STOP_SHARE = 0.6  # of a period, of one that is slowed down
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
        """Whatever was stopped goes on. Idempotent."""
        self.signal(signal.SIGCONT)
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class Wound:
    """A fault that is being done; `close` takes it back, in any case and at any time. Idempotent."""

    def at(self, now: float) -> float | None:
        """Do what is due; returns when to be called again."""
        return None

    def close(self) -> None:
        pass


class Stopped(Wound):
    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = Processes(pids)
        self._processes.signal(signal.SIGSTOP)

    def close(self) -> None:
        self._processes.close()


class Slowed(Wound):
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


def kill(pids: Iterable[int]) -> None:
    processes = Processes(pids)
    processes.signal(signal.SIGKILL)
    processes.close()
