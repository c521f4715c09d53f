"""Ranks of a `Launcher` as forks of a process that has imported torch, where a test is not about how they are started.

To import torch takes a rank 2 s of a core, its first optimizer 3 s more, and a test starts up to a dozen ranks. The
launcher gets what it would get from `subprocess`: a session leader with its own pipes, environment and signals, which
runs the script as `__main__`, then its threads and its exit handlers, in the network of whoever starts it. It is no
child of the launcher, and /proc does not tell its command line and environment: tests of these start real interpreters.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO

import tests.process.job  # noqa: F401
from tests.rigs import forked_companions
from tests.rigs.deadlines import DEADLINE
from tests.rigs.forked_interpreter import become, network
from tests.rigs.orphan_watch import end_with_pytest

_context = multiprocessing.get_context("forkserver")  # of tests.process.job, which says what it imports


def warm() -> None:
    """Wait until the fork server has imported what ranks need."""
    process = _context.Process(target=os.getpid)
    process.start()
    process.join()


class _Descriptor:
    """A file descriptor that travels to the new process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (DupFd(self.fd),)


def _arrived(there: Any) -> int:
    return int(there.detach())


def become_worker(*interpreter: Any) -> None:
    """In the new process, which is one of pytest."""
    end_with_pytest()
    become(*interpreter)


def become_rank(*interpreter: Any) -> None:
    """In the new process."""
    end_with_pytest()
    forked_companions.in_this_rank()
    become(*interpreter)


class Rank:
    """What those who start ranks need of a `Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        fds: Mapping[int, int],
        become: Callable[..., None] = become_rank,
    ) -> None:
        """`fds`: place there -> descriptor here."""
        given = {place: _Descriptor(fd) for place, fd in fds.items()}
        with network() as there:
            arguments = (
                list(command),
                dict(environment),
                os.getcwd(),
                given,
                None if there is None else _Descriptor(there),
            )
            self._process = _context.Process(target=become, args=arguments, daemon=True)
            self._process.start()
        self.stdout: BinaryIO | None = None
        self.stderr: BinaryIO | None = None
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _with_pipes(command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]) -> Rank:
    pipes = [os.pipe(), os.pipe()]
    rank = Rank(command, environment, {1: pipes[0][1], 2: pipes[1][1], **{fd: fd for fd in pass_fds}})
    rank.stdout, rank.stderr = (_reader(*pipe) for pipe in pipes)
    return rank


def _reader(reading: int, writing: int) -> BinaryIO:
    os.close(writing)
    return open(reading, "rb", buffering=0)


def popen(arguments: list[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **rest: Any) -> Rank:
    """In place of `subprocess.Popen` for `RankProcess`."""
    return _with_pipes(arguments[arguments.index("-u") + 1 :], env, pass_fds)


# `python *FTCOMM ARGUMENTS` is `ftcomm ARGUMENTS`, in a process that is itself a fork, whose ranks are forks
_MAIN = """
import subprocess
from ftcomm.cli import main
from ftcomm.launch import process
from tests.rigs import preforked_ranks
process.subprocess = preforked_ranks.subprocess_of_ranks(subprocess)
main()
"""
FTCOMM = ("-c", _MAIN)


def completed(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """In place of `subprocess.run` for `python COMMAND`: exit code, stdout, stderr."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = Rank(command, environment, {1: out.fileno(), 2: errors.fileno()})
        try:
            code = process.wait(DEADLINE)
        finally:
            process.kill()
        out.seek(0)
        errors.seek(0)
        return code, out.read(), errors.read()


def subprocess_of_ranks(real: Any) -> Any:
    """In place of the module `subprocess` that is `real`."""
    return types.SimpleNamespace(Popen=popen, PIPE=real.PIPE, DEVNULL=real.DEVNULL)


def with_log(arguments: list[str], *, env: Mapping[str, str], stdout: BinaryIO, stderr: BinaryIO) -> Rank:
    """In place of `subprocess.Popen` for `python ...` whose output goes to files."""
    return Rank(arguments[1:], env, {1: stdout.fileno(), 2: stderr.fileno()})
