"""The faults of `ftcomm bench recovery` for its peers: torchft, and plain gloo, which can only die.

A peer's words do not tell when it is inside an op, so it is hit at a random moment of ops that follow each other
without a pause. It is timed by what the survivors write down:

    torchft  stall until all survivors have committed a step of their own; lost are the steps they threw away before
    gloo     detected when the last survivor has its error; then all are started again, and rejoin when all have
             completed an op. The op itself never returns
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from ftcomm.bench.job import Tail
from ftcomm.bench.lighthouse import lighthouse
from ftcomm.bench.recovery import PATIENCE, SETTLED, Event, Request
from ftcomm.bench.recovery_peer_rank import Attempt, Task
from ftcomm.bench.stats import median
from ftcomm.errors import FtcommError


async def measure_peer(
    library: str, request: Request, on_event: Callable[[Event], None], progress: Callable[[str, float], None]
) -> None:
    """Hand over what happened after every fault. Raises `FtcommError`; no process is left, however this ends."""
    chance = random.Random(request.seed)
    for fault in (fault for fault in request.faults if fault != "cut"):
        with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder, contextlib.ExitStack() as stack:
            log = stack.enter_context((Path(folder) / "log").open("w"))
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            if library == "torchft":
                environment["TORCHFT_LIGHTHOUSE"] = stack.enter_context(lighthouse(log))
            peer = _Peer(library, request, folder, environment, log)
            stack.callback(peer.end)
            for number in range(request.kills):
                progress(f"{library}: {fault} {number + 1} of {request.kills}", number / request.kills)
                on_event(await peer.hit(number, fault, chance))


class _Peer:
    def __init__(self, library: str, request: Request, folder: str, environment: dict[str, str], log: IO[str]) -> None:
        self._library, self._replicas, self._count = library, request.replicas, request.size // 4
        self._folder, self._environment, self._log = folder, environment, log
        self._tail = Tail([Path(folder) / f"replica-{replica}.jsonl" for replica in range(self._replicas)], Attempt)
        self._attempts: list[Attempt] = []
        self._life = 0
        self._processes = {replica: self._start(replica) for replica in range(self._replicas)}

    async def hit(self, number: int, fault: str, chance: random.Random) -> Event:
        await self._until(lambda: self._whole(0.0, SETTLED), "all replicas ran together")
        usual = median([one.end - one.start for one in self._attempts[-8 * self._replicas :]])
        victim = number % self._replicas
        process = self._processes[victim]
        await asyncio.sleep(chance.uniform(0, usual))
        step = max(one.step for one in self._attempts)
        at = time.monotonic()
        process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        others = [replica for replica in range(self._replicas) if replica != victim]
        if self._library == "gloo":
            await self._until(
                lambda: {one.replica for one in self._after(at) if not one.committed} >= set(others), "survivors failed"
            )
        else:
            await self._until(lambda: set(self._alone(at)) >= set(others), "survivors went on")
        stalls = {
            replica: 1e3 * (one.end - at) for replica, one in sorted(self._alone(at).items()) if replica != victim
        }
        failed = [one for one in self._after(at) if not one.committed and one.replica != victim]
        process.kill()
        process.wait(30)
        if self._library == "gloo":  # what is left of it are processes that have ended
            self._life += 1
            self.end()
            self._processes = {replica: self._start(replica) for replica in range(self._replicas)}
        else:
            self._processes[victim] = self._start(victim)
        again = time.monotonic()
        await self._until(lambda: self._whole(again, 1), "the replica came back")
        back = min(
            max(one.end for one in self._after(again) if one.replica == replica and one.members == self._replicas)
            for replica in range(self._replicas)
        )
        self._attempts = self._after(again)
        went_on = bool(stalls)
        return Event(
            number=number,
            victim=victim,
            step=step + 1,
            detect_ms=max((1e3 * (one.end - at) for one in failed), default=None),
            stall_ms=max(stalls.values()) if went_on else None,
            survivor_ms=stalls,
            usual_ms=1e3 * usual,
            completed=went_on and not failed,
            equal=False,  # is not looked at
            wrong=0,
            rejoin_ms=1e3 * (back - at),
            library=self._library,
            fault=fault,
            steps_lost=max((sum(one.replica == replica for one in failed) for replica in others), default=0),
        )

    def _after(self, moment: float) -> list[Attempt]:
        return [one for one in self._attempts if one.end > moment]

    def _alone(self, at: float) -> dict[int, Attempt]:
        """The first step that each survivor has committed without the victim."""
        found: dict[int, Attempt] = {}
        for one in self._after(at):
            if one.committed and one.members < self._replicas:
                found.setdefault(one.replica, one)
        return found

    def _whole(self, moment: float, steps: int) -> bool:
        """All replicas have done so many steps with all, in processes that live."""
        pids = {process.pid for process in self._processes.values()}
        full = [
            one for one in self._after(moment) if one.members == self._replicas and one.committed and one.pid in pids
        ]
        return all(sum(one.replica == replica for one in full) >= steps for replica in range(self._replicas))

    async def _until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 2 * PATIENCE
        while not true():
            await asyncio.sleep(0.02)
            self._attempts += self._tail.read()
            ended = [process for process in self._processes.values() if process.poll() is not None]
            if any(process.returncode > 0 for process in ended) or time.monotonic() > deadline:
                last = "\n  ".join(Path(self._log.name).read_text().splitlines()[-20:])
                raise FtcommError(f"{self._library}: it did not come to pass that {what}; last lines:\n  {last}")

    def _start(self, replica: int) -> subprocess.Popen[bytes]:
        path = Path(self._folder) / f"task-{self._life}.json"
        path.write_bytes(msgspec.json.encode(Task(self._count, self._replicas, self._folder, self._life)))
        command = [sys.executable, "-m", "ftcomm.bench.recovery_peer_rank", str(path), self._library, str(replica)]
        return subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(30)
