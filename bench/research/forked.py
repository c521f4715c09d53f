"""A job whose processes are forked from one that has imported torch: fifty deaths cost fifty forks, where the launcher
would import torch anew for seconds each time, and on a machine with few cores take that time from those who train.

The coordinator is that of `ftcomm run`, in this event loop. As there, the ranks of a replica die together, and a
replica that was killed is started again; here at once and always. Anything else that ends a rank badly ends the job.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import multiprocessing
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ftcomm.control.server import CoordinatorServer
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.wire import Credentials
from ftcomm.errors import FtcommError
from ftcomm.launch.exec_stub import PR_SET_PDEATHSIG
from ftcomm.settings import Settings

# Long, so that on a busy machine, too, only those are lost that somebody kills.
TIMEOUTS = Timeouts.derive(op=240.0, heartbeat=30.0)
PATIENCE = 300.0  # s that a rank tries to join
NOTICE = 5.0  # s until the end of every rank that was killed is known, on the busiest machine
SHOWN = 30  # lines of each rank's output, in an error

Main = Callable[[Any, Settings], None]  # of a rank; gets the task


class ForkedJob:
    """`async with ForkedJob(...) as job` starts the ranks; none of them lives on when the block is left, nor when this
    process dies. `main(task, settings)` has to join by `ftcomm.init(settings)`; what it prints goes to files in
    `folder`. Both are pickled."""

    def __init__(self, main: Main, task: Any, folder: Path, replicas: int, ranks: int) -> None:
        self._main, self._task, self._folder = main, task, folder
        self._replicas, self._ranks = replicas, ranks
        self._context = multiprocessing.get_context("forkserver")
        # The first optimizer of a process imports torch._dynamo, which takes as long as torch itself.
        self._context.set_forkserver_preload(["torch._dynamo", main.__module__])
        self._processes: dict[tuple[int, int], Any] = {}
        self._over = asyncio.Event()
        self._failed = ""
        self._token = secrets.token_hex(16)
        self.restarts = 0

    async def __aenter__(self) -> ForkedJob:
        self._loop = asyncio.get_running_loop()
        self._server = CoordinatorServer(
            self._replicas, self._ranks, Credentials(self._token), store=self._folder / "views", timeouts=TIMEOUTS
        )
        await self._server.start()
        for replica in range(self._replicas):
            self._start(replica)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            self._loop.remove_reader(process.sentinel)
            process.kill()
        for process in self._processes.values():
            await asyncio.to_thread(process.join)
        await self._server.stop()

    def pids(self) -> dict[tuple[int, int], int]:
        """(replica, rank) -> pid of every rank that lives."""
        return {place: process.pid for place, process in self._processes.items() if process.exitcode is None}

    async def runs(self, seconds: float) -> bool:
        """Wait `seconds`, or until the job has ended; False if it has, well. Raises `FtcommError` if a rank failed."""
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except asyncio.TimeoutError:
            return True
        if self._failed:
            raise FtcommError(f"{self._failed}; what the ranks said last:\n{self.output()}")
        return False

    def output(self) -> str:
        """What the ranks have printed, the last lines of each."""
        found = []
        for path in sorted(self._folder.glob("output-*")):
            found += [f"[{path.name[7:]}] {line}" for line in path.read_text(errors="replace").splitlines()[-SHOWN:]]
        return "\n".join(found)

    def _start(self, replica: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0)) if self._ranks > 1 else None
        leader = "" if listener is None else f"127.0.0.1:{listener.getsockname()[1]}"
        mates: list[Any] = []
        for rank in range(self._ranks):
            settings = Settings(
                coordinator=self._server.endpoint,
                token=self._token,
                replica=replica,
                replicas=self._replicas,
                shard=rank,
                ranks_per_replica=self._ranks,
                leader=leader,
                init_timeout=PATIENCE,
                timeouts=TIMEOUTS,
            )
            output = self._folder / f"output-{replica}-{rank}"
            arguments = self._main, self._task, settings, str(output), listener if rank == 0 else None
            process = self._context.Process(target=_rank, args=arguments)
            process.start()
            mates.append(process)
            self._processes[replica, rank] = process
            self._loop.add_reader(process.sentinel, self._ended, replica, rank, mates)
        if listener is not None:
            listener.close()  # rank 0 has inherited it

    def _ended(self, replica: int, rank: int, mates: list[Any]) -> None:
        """`mates`: the processes of the replica in this life."""
        process = mates[rank]
        self._loop.remove_reader(process.sentinel)
        process.join()
        if process.exitcode == 0:
            if all(each.exitcode == 0 for each in self._processes.values()):
                self._over.set()
        elif any(mate.exitcode == -signal.SIGKILL for mate in mates):
            for mate in mates:
                mate.kill()
            gone = all(mate.exitcode is not None for mate in mates)
            if gone and self._processes[replica, rank] is process and not self._over.is_set():
                self.restarts += 1
                self._start(replica)
        else:
            # It may be that a mate was killed, and this one has failed for that: its end is then still to be heard of.
            self._loop.call_later(NOTICE, self._fail_unless_killed, replica, rank, mates)

    def _fail_unless_killed(self, replica: int, rank: int, mates: list[Any]) -> None:
        if all(mate.exitcode != -signal.SIGKILL for mate in mates):
            self._failed = f"rank {rank} of replica {replica} ended with exit code {mates[rank].exitcode}"
            self._over.set()


def _rank(main: Main, task: Any, settings: Settings, output: str, listener: socket.socket | None) -> None:
    os.setsid()  # a signal of the terminal is for the command, which ends its ranks
    # Its parent is the server that forked it, which ends when the command does.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    if listener is not None:
        settings = dataclasses.replace(settings, leader_fd=listener.detach())
    main(task, settings)
