"""torchft under the kills of `ftcomm bench train`: a lighthouse, and replicas that are started again when they die."""

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

from ftcomm.bench.lighthouse import lighthouse
from ftcomm.bench.train import KillRow, Request, measure_kills
from ftcomm.errors import FtcommError


async def kill_torchft(request: Request, progress: Callable[[str, float], None]) -> KillRow:
    """Raises `FtcommError` when a replica ends of itself; no process is left, however this ends."""
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(request.task(folder)))
        with (Path(folder) / "log").open("w") as log, lighthouse(log) as address:
            replicas = _Replicas(path, request.replicas, address, log)
            try:
                return await measure_kills("torchft", request, replicas, folder, progress)
            finally:
                replicas.end()


class _Replicas:
    """Processes, each in a life of its own; one that was killed is started again at once."""

    def __init__(self, task: Path, replicas: int, lighthouse: str, log: IO[str]) -> None:
        self._task, self._lighthouse, self._log = task, lighthouse, log
        self._processes = {replica: self._start(replica) for replica in range(replicas)}

    def pids(self) -> dict[int, int]:
        return {replica: process.pid for replica, process in self._processes.items() if process.poll() is None}

    async def runs(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        for replica, process in self._processes.items():
            code = process.poll()
            if code is not None and code >= 0:
                last = "\n  ".join(Path(self._log.name).read_text().splitlines()[-20:])
                raise FtcommError(f"torchft's replica {replica} exited with {code}; last lines:\n  {last}")
            if code is not None:
                self._processes[replica] = self._start(replica)
        return True

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(30)

    def _start(self, replica: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "REPLICA": str(replica),
            "TORCHFT_LIGHTHOUSE": self._lighthouse,
        }
        command = [sys.executable, "-m", "ftcomm.bench.train_torchft_rank", str(self._task)]
        return subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)
