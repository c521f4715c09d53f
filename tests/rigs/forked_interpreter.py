"""A fork of the server that has imported torch does what a new interpreter would do."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import multiprocessing
import multiprocessing.process
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from ftcomm.lab.netns.network import CLONE_NEWNET, call

_NETWORK = "/proc/thread-self/ns/net"
# by which a fork asks the server for another one
_KEPT = ((forkserver._forkserver, "_forkserver_alive_fd"), (resource_tracker._resource_tracker, "_fd"))  # type: ignore[attr-defined]
_HOME = os.readlink(_NETWORK)


@contextlib.contextmanager
def network() -> Iterator[int | None]:
    """Yields a descriptor of the network of this thread; None if the fork server was started in it."""
    if os.readlink(_NETWORK) == _HOME:
        yield None
        return
    fd = os.open(_NETWORK, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def become(
    command: list[str], environment: dict[str, str], folder: str, fds: Mapping[int, int], network: int | None
) -> None:
    """Do what an interpreter does with `python -u` and `SCRIPT ARGS...`, `-m MODULE ARGS...` or `-c TEXT`, and end.
    `fds`: place -> descriptor."""
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # torch's, of all ops that were registered before: 0.06 s to take them apart
    os.setsid()
    if network is not None:
        call("setns", network, CLONE_NEWNET)
        os.close(network)
    nothing, least = os.open(os.devnull, os.O_RDONLY), max(fds) + 1  # above all places, so that none hits another
    for holder, name in _KEPT:
        if (kept := getattr(holder, name)) is not None:
            setattr(holder, name, _above(kept, least))
    high = {place: _above(fd, least) for place, fd in {0: nothing, **fds}.items()}
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
        sys.argv, sys.modules["__main__"] = [command[0], *command[2:]], main
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
