"""Companions of ranks as forks of the server that forks the ranks, where a test is not about how they are started.

A new interpreter has to import what a leader needs, and a test starts up to a dozen of them. `Companion` gets what it
would get from `subprocess`. The process is no fork of the rank: it has nothing of it but the descriptors that it is
given.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import types
from collections.abc import Mapping
from multiprocessing import forkserver, resource_tracker
from typing import Any

from ftcomm.control import companion
from tests.rigs.forked_interpreter import become, network

FORKED = sys.version_info < (3, 14)  # later servers ask who comes for a secret that only who started them has
MODULES = ["ftcomm.control.leader_process", "ftcomm.control.host_agent_process", "ftcomm.control.witness"]


def in_this_rank() -> None:
    """Let the companions that this process starts from now on be forks. It is a fork of the server itself."""
    if FORKED:
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
        companion.subprocess = types.SimpleNamespace(Popen=_Starter, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


class _Starter:
    """Starts a fork, and is to `Companion` what a `Popen` is."""

    def __init__(
        self, arguments: list[str], *, stdin: int, stdout: int, stderr: Any, env: Mapping[str, str], **rest: Any
    ) -> None:
        errors = 2 if stderr is None else stderr if isinstance(stderr, int) else stderr.fileno()
        with network() as there, open(os.devnull, "r+b") as null:
            given = {0: stdin, 1: null.fileno(), 2: null.fileno() if errors == subprocess.DEVNULL else errors}
            fds = [*given.values(), *([] if there is None else [there])]
            self._status, way = forkserver._forkserver.connect_to_new_process(fds)  # type: ignore[attr-defined]
        with os.fdopen(way, "wb") as pipe:
            pickle.dump({}, pipe)  # it prepares nothing
            pickle.dump(_Work(arguments[1:], dict(env), os.getcwd(), list(given), there is not None), pipe)
        self.pid: int = forkserver.read_signed(self._status)  # type: ignore[attr-defined]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = forkserver.read_signed(self._status)  # type: ignore[attr-defined]
            os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class _Work:
    """Stands in for a process of `multiprocessing` in the new fork."""

    def __init__(
        self, command: list[str], environment: dict[str, str], folder: str, places: list[int], has_network: bool
    ) -> None:
        self._arguments = command, environment, folder
        self._places, self._has_network = places, has_network

    def _bootstrap(self, parent: int) -> int:
        """In the new process. It is not bound to its rank, whose end it has to see."""
        os.close(parent)
        fds = forkserver.get_inherited_fds()  # type: ignore[attr-defined]
        network = fds.pop() if self._has_network else None
        become(*self._arguments, dict(zip(self._places, fds, strict=True)), network)
        return 0
