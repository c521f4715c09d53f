"""The client of a running job in another process: it finds the job, asks it, and follows its events."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch.admin import protocol
from ftcomm.launch.rundir import short
from ftcomm.monitoring.job import Overview
from ftcomm.process.user_dir import base_dir

ANSWER_TIMEOUT = 20.0  # s to wait for an answer


class JobEnded(FtcommError):
    """The job is over, or its launcher was killed, so that no answer comes."""


def running() -> dict[str, Path]:
    """Returns run -> socket for all running jobs of this user. Raises `SettingsError`."""
    found = {}
    for path in sorted(base_dir().glob(f"*/{protocol.SOCKET}")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(ANSWER_TIMEOUT)
            with short(path) as address:
                probe.connect(address)  # refused if the launcher was killed
            found[path.parent.name] = path
    return found


def find(job: str | None) -> Path:
    """Returns the socket of the run whose name begins with `job`, or of the only one. Raises `SettingsError` that lists
    all."""
    jobs = running()
    if not jobs:
        raise SettingsError("no job of yours is running here; start one with: ftcomm run --replicas 4 SCRIPT")
    matching = [path for run, path in jobs.items() if job is None or run.startswith(job)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(jobs)
    if job is not None:
        which = "no running job is" if not matching else "several running jobs are"
        raise SettingsError(f"--job {job}: {which} named so; these run: {names}")
    raise SettingsError(f"{len(jobs)} jobs are running; say which with --job: {names}")


class AdminClient:
    """A connection to a job; a context manager. For one thread. Every wait ends after `ANSWER_TIMEOUT`."""

    def __init__(self, path: Path) -> None:
        """Connects. Raises `JobEnded`."""
        self._path, self._buffer = path, bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_TIMEOUT)
        try:
            with short(path) as address:
                self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise JobEnded(f"the job {path.parent.name} has ended ({error.strerror or error})") from None

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, request: protocol.AdminRequest) -> protocol.AnyAnswer:
        """Send a request and block for the answer. Raises `FtcommError` with the reason of a refusal, `JobEnded`."""
        try:
            self._socket.sendall(protocol.encode(request))
            while (line := self._take_line()) is None:
                self._read()
            answer = protocol.decode_answer(line)
        except TimeoutError:
            if not self._path.exists():  # it was accepted when the job ended, and maybe was not closed
                raise JobEnded("the job has ended") from None
            raise FtcommError(
                f"the job has not answered within {ANSWER_TIMEOUT:g} s; is its launcher stopped?"
            ) from None
        except OSError as error:
            raise JobEnded(f"the job has ended ({error.strerror or error})") from None
        except msgspec.DecodeError as error:
            raise FtcommError(f"the job's answer is none of this version of ftcomm: {error}") from None
        if isinstance(answer, protocol.Rejected):
            raise FtcommError(answer.reason)
        return answer

    def status(self) -> protocol.Status:
        """Returns the status of the job. Raises `FtcommError`, `JobEnded`."""
        answer = self.ask(protocol.GetStatus())
        assert isinstance(answer, protocol.Status)
        return answer

    def overview(self) -> Overview:
        """Returns the job as people look at it. Raises `FtcommError`, `JobEnded`."""
        answer = self.ask(protocol.GetOverview())
        assert isinstance(answer, protocol.OverviewAnswer)
        return answer.job

    def follow(self, until: float) -> Iterator[dict[str, Any]]:
        """Yield events as they come after `GetEvents`, until `time.monotonic()` is `until`. Raises `JobEnded`."""
        while True:
            while (line := self._take_line()) is not None:
                answer = protocol.decode_answer(line)
                if isinstance(answer, protocol.Happened):
                    yield answer.event
            left = until - time.monotonic()
            readable, _, _ = select.select([self._socket], [], [], max(0.0, left))
            if not readable:
                return
            try:
                self._read()
            except OSError as error:
                raise JobEnded(f"the job has ended ({error.strerror or error})") from None
            if left <= 0:  # more may come without end; the rest is for the next call
                return

    def _take_line(self) -> bytes | None:
        line, end, rest = self._buffer.partition(b"\n")
        if not end:
            if len(line) > protocol.MAX_ANSWER:
                raise JobEnded("the job sends a line without an end; is this another version of ftcomm?")
            return None
        self._buffer = rest
        return bytes(line)

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it has closed the connection")
        self._buffer += data
