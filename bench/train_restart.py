"""Restart from a checkpoint under the kills of `ftcomm bench train`: one dies, all end, all are started again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from ftcomm.bench.train import KillRow, Request, measure_kills
from ftcomm.errors import FtcommError

GRACE = 5.0  # s for survivors to end by the error of their all-reduce, before they are killed


async def kill_restart(request: Request, progress: Callable[[str, float], None]) -> KillRow:
    """Raises `FtcommError` when a rank fails; no process is left, however this ends."""
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(request.task(folder)))
        with (Path(folder) / "log").open("w") as log:
            ranks = _Ranks(path, request.replicas, log)
            try:
                return await measure_kills("restart", request, ranks, folder, progress)
            finally:
                ranks.end()


class _Ranks:
    """One life of the whole job after the other."""

    def __init__(self, task: Path, replicas: int, log: IO[str]) -> None:
        self._task, self._replicas, self._log = task, replicas, log
        self._life = 0
        self._processes = self._start()

    def pids(self) -> dict[int, int]:
        return {replica: process.pid for replica, process in enumerate(self._processes) if process.poll() is None}

    async def runs(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        codes = [process.poll() for process in self._processes]
        if any(code is not None and code > 0 for code in codes):
            last = "\n  ".join(Path(self._log.name).read_text().splitlines()[-20:])
            raise FtcommError(f"a rank exited with one of {codes}; last lines:\n  {last}")
        if any(code is not None for code in codes):
            loop = asyncio.get_running_loop()
            deadline = loop.time() + GRACE
            while self.pids() and loop.time() < deadline:
                await asyncio.sleep(0.01)
            self.end()
            self._life += 1
            self._processes = self._start()
        return True

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(30)

    def _start(self) -> list[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "ftcomm.bench.train_restart_rank", str(self._task)]
        job = {"REPLICAS": str(self._replicas), "LIFE": str(self._life)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **job}
        return [
            subprocess.Popen(command, env={**environment, "REPLICA": str(replica)}, stdout=self._log, stderr=self._log)
            for replica in range(self._replicas)
        ]
