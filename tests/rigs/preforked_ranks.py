"""Ranks of a `Launcher` as forks of a process that has imported torch, where a test is not about how they are started.

To import torch takes a rank 2 s of a core, its first optimizer 3 s more, and a test starts up to a dozen ranks. The
launcher gets what it would get from `subprocess`: a session leader with its own pipes, environment and signals, which
runs the script as `__main__`, then its threads and its exit handlers, in the network of whoever starts it. It is no
child of the launcher, and /proc does not tell its command line and environment: tests of these start real interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, BinaryIO

import tests.process.job  # noqa: F401
from ftcomm.lab.netns.network import CLONE_NEWNET, call
from tests.rigs.orphan_watch import end_with_pytest

_context = multiprocessing.get_context("forkserver")  # of tests.process.job, which says what it imports
_NETWORK = "/proc/thread-self/ns/net"
_HOME = os.readlink(_NETWORK)


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


class Rank:
    """What those who start ranks need of a `Popen`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int]) -> None:
        """`fds`: place there -> descriptor here."""
        given = {place: _Descriptor(fd) for place, fd in fds.items()}
        with _network() as network:
            arguments = list(command), dict(environment), os.getcwd(), given, network
            self._process = _context.Process(target=_become, args=arguments, daemon=True)
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


@contextlib.contextmanager
def _network() -> Iterator[_Descriptor | None]:
    """That of this thread, if it is not the one in which the fork server was started."""
    if os.readlink(_NETWORK) == _HOME:
        yield None
        return
    fd = os.open(_NETWORK, os.O_RDONLY)
    try:
        yield _Descriptor(fd)
    finally:
        os.close(fd)


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


def subprocess_of_ranks(real: Any) -> Any:
    """In place of the module `subprocess` that is `real`."""
    return types.SimpleNamespace(Popen=popen, PIPE=real.PIPE, DEVNULL=real.DEVNULL)


def with_log(arguments: list[str], *, env: Mapping[str, str], stdout: BinaryIO, stderr: BinaryIO) -> Rank:
    """In place of `subprocess.Popen` for `python ...` whose output goes to files."""
    return Rank(arguments[1:], env, {1: stdout.fileno(), 2: stderr.fileno()})


def _become(
    command: list[str], environment: dict[str, str], folder: str, fds: dict[int, int], network: int | None
) -> None:
    """In the new process: what an interpreter does with `python -u` and `SCRIPT ARGS...`, `-m MODULE ARGS...` or
    `-c TEXT`."""
    end_with_pytest()
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # torch's, of all ops that were registered before: 0.06 s to take them apart
    os.setsid()
    if network is not None:
        call("setns", network, CLONE_NEWNET)
        os.close(network)
    nothing = os.open(os.devnull, os.O_RDONLY)
    high = {place: _above(fd, max(fds) + 1) for place, fd in {0: nothing, **fds}.items()}  # so that none hits another
    for place, fd in high.items():
        os.dup2(fd, place, inheritable=True)
        os.close(fd)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    if "OMP_NUM_THREADS" in environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    code = 0
    try:
        _run(command)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(code)  # to take apart what was imported would cost a second: pages that are shared until then


def _above(fd: int, least: int) -> int:
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(fd)
    return high


def _run(command: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if command[0] == "-c":
        sys.argv, sys.modules["__main__"] = command[:1], main
        exec(command[1], main.__dict__)
        return
    if command[0] == "-m":
        module, *rest = command[1:]
        sys.path.insert(0, os.getcwd())
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        main.__spec__, main.__package__, script = spec, spec.parent, spec.origin
    else:
        script, *rest = command
        sys.path.insert(0, str(Path(script).absolute().parent))
    main.__file__, sys.argv = script, [script, *rest]
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)
