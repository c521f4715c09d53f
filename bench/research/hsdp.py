"""`ftcomm bench hsdp`: a sharded training of which ranks are killed at random, beside the same undisturbed."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ftcomm.bench.harness import INTS, Report, option
from ftcomm.bench.header import available_memory
from ftcomm.bench.research import convergence, curves
from ftcomm.bench.research.convergence import UNDISTURBED, Comparison, Follower, Run, compare, summary
from ftcomm.bench.research.forked import ForkedJob
from ftcomm.bench.research.hsdp_rank import ALONE, Task, main
from ftcomm.errors import FtcommError, SettingsError

KILLED = "killed"
REPLICAS, RANKS = 2, 2
NEEDED = ALONE + 12  # steps from a kill until all contribute again, at least: else not all kills fit into a run
RANK_MEMORY = 500 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class Request:
    """Kill ranks of an FSDP2 training of two replicas of two shards, and compare it with the same undisturbed.

    A random rank gets SIGKILL at a random moment of a step, the other of its replica goes with it, both are started
    again and catch up; the next kill comes when all contribute. Those that are left do a step alone, and then wait
    until the new processes are about to join. Exits with 1 if the final weights or the optimizers of the replicas
    differ in a bit, if a step was lost, or if the means of the final losses differ by more than those of different
    seeds do.
    """

    width: int = option(64, help="Of a model in the shape of Llama.")
    layers: int = option(2)
    batch: int = option(4, help="Sequences of 64 bytes of a rank in a step.")
    steps: int = option(2000)
    kills: int = option(50, help="In a run.")
    seeds: Sequence[int] = option((1, 2, 3), kind=INTS, help="Of weights, data and kills.")
    jobs: int = option(1, help="Trainings at a time; steps are counted, not seconds.")
    validate_every: int = 50
    windows: int = 192  # of held-out text

    def smoke(self) -> Request:
        """A few steps with one kill, to see that it runs."""
        return Request(16, 1, 1, 40, 1, self.seeds[:1], self.jobs, validate_every=20, windows=8)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (UNDISTURBED, KILLED)

    def compare(self, runs: Sequence[Run]) -> tuple[list[Comparison], list[Comparison]]:
        """Those that the measurement stands or falls with, and others that are worth knowing."""
        return compare(runs, UNDISTURBED), []

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if self.width % 8 or self.width < 8 or min(self.layers, self.batch, self.jobs) < 1:
            raise SettingsError("--width has to be a multiple of 8, --layers, --batch and --jobs at least 1.")
        if self.kills < 1 or self.steps < NEEDED * (self.kills + 1):
            raise SettingsError(
                f"{self.kills} kills need at least {NEEDED * (self.kills + 1)} steps; raise --steps or lower --kills."
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise SettingsError("--seeds: expected different numbers.")
        need = self.jobs * REPLICAS * RANKS * RANK_MEMORY
        if need > available_memory():
            raise SettingsError(
                f"it needs about {need / 1e9:.1f} GB, {available_memory() / 1e9:.1f} GB are free; lower --jobs."
            )


class Kill(msgspec.Struct, frozen=True):
    after: int  # the step after which it comes, if all contribute then
    replica: int
    rank: int
    share: float  # of a usual step, from its begin


def plan(seed: int, steps: int, kills: int) -> list[Kill]:
    """One kill in each of as many equal parts of the run, and none in the last steps. Pure."""
    chance = random.Random(seed)
    part = (steps - NEEDED) / kills
    return [
        Kill(
            after=round((number + chance.uniform(0, 0.5)) * part),
            replica=chance.randrange(REPLICAS),
            rank=chance.randrange(RANKS),
            share=chance.random(),
        )
        for number in range(kills)
    ]


async def measure(request: Request, report: Report) -> None:
    await convergence.measure(request, train, report)


async def train(request: Request, seed: int, kind: str, progress: Callable[[float], None]) -> Run:
    kills = plan(seed, request.steps, request.kills) if kind == KILLED else []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        task = Task(
            folder=folder,
            seed=seed,
            steps=request.steps,
            width=request.width,
            layers=request.layers,
            batch=request.batch,
            validate_every=request.validate_every,
            windows=request.windows,
        )
        async with ForkedJob(main, task, Path(folder), REPLICAS, RANKS) as job:
            killer = Killer(job, task)
            for kill in kills:
                await killer.do(kill)
                progress(killer.at[-1] / request.steps)
            await killer.follower.end(request.steps, progress)
    return summary(
        killer.follower.records,
        REPLICAS,
        RANKS,
        request.steps,
        request.windows,
        kind=kind,
        seed=seed,
        kills=len(killer.at),
        deaths=job.restarts,
        killed_at=killer.at,
        seconds=round(time.monotonic() - began, 1),
    )


class Killer:
    """Kills a rank, and waits until its replica contributes again."""

    def __init__(self, job: ForkedJob, task: Task) -> None:
        self.follower = Follower(job, task.folder, REPLICAS, RANKS)
        self.at: list[int] = []  # steps in which the kills came
        self._job, self._hold = job, task.hold

    async def do(self, kill: Kill) -> None:
        follower = self.follower
        await follower.until(f"step {kill.after} was done by all", lambda: self._all_since(kill.after))
        assert follower.last is not None
        step, usual = follower.last.step, follower.usual
        self._hold.touch()
        if not await self._job.runs(kill.share * usual):
            raise FtcommError("the job ended before the kill; raise --steps")
        pid = self._job.pids()[kill.replica, kill.rank]
        os.kill(pid, signal.SIGKILL)
        self.at.append(step + 1)
        before = {follower.ready[kill.replica, rank].pid for rank in range(RANKS)}
        await follower.until(
            f"replica {kill.replica} had started again",
            lambda: all(follower.ready[kill.replica, rank].pid not in before for rank in range(RANKS)),
        )
        self._hold.unlink()
        await follower.until(f"replica {kill.replica} contributed again", lambda: self._back(step))

    def _all_since(self, step: int) -> bool:
        last = self.follower.last
        return last is not None and last.step >= step and self.follower.short < last.step

    def _back(self, step: int) -> bool:
        """Whether all have contributed to a step after some without the one."""
        last = self.follower.last
        return last is not None and step < self.follower.short < last.step


EXPERIMENT = convergence.experiment("hsdp", Request, measure, curves.draw)
