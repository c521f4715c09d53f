"""`ftcomm bench hsdp`: a sharded training of which ranks are killed at random, beside the same undisturbed.

In the ranks, FSDP2 inside each replica, ftcomm between them, under the step loop; each sample of the text is trained
once. The command kills ranks from outside. As long as it keeps the file `hold`, those that are left stop after a step:
the new processes take as long to start as many such small steps, and the deaths are to lie in one training of a sane
length. They go on as soon as the new ones are about to join, slowly until those contribute.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ftcomm
from ftcomm.bench.checks import check_memory
from ftcomm.bench.harness import BenchReport, option
from ftcomm.bench.research import convergence, curves
from ftcomm.bench.research.convergence import UNDISTURBED, Comparison, Follower, Run, TrainingRequest, compare
from ftcomm.bench.research.convergence_rank import RankRecords, TrainingTask, held_out_samples, wait_until
from ftcomm.demo.data import library_text, windows
from ftcomm.demo.llama import Llama
from ftcomm.demo.train import learning_rate
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.settings import Settings
from ftcomm.torch import init_device_mesh
from ftcomm.training import Batches, Outcome, StepLoop
from ftcomm.training.state import digest

KILLED = "killed"
REPLICAS, RANKS = 2, 2
CONTEXT = 64  # bytes of a sequence
PEAK = 4e-3  # learning rate
ALONE = 1  # steps that the survivors do before they hold
PACE = 0.1  # s before each of their steps from then until all contribute
SOON, SLOW = 10, 0.5  # and so long after so many steps: on a busy machine it takes longer to join
MODEL_MEMORY = 100 << 20  # bytes of a rank, beside what each has
NEEDED = ALONE + 12  # steps from a kill until all contribute again, at least: else not all kills fit into a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class HsdpRequest(TrainingRequest):
    """Kill ranks of an FSDP2 training of two replicas of two shards, and compare it with the same undisturbed.

    A random rank gets SIGKILL at a random moment of a step, the other of its replica goes with it, both are started
    again and catch up; the next kill comes when all contribute. Those that are left do a step alone, and then wait
    until the new processes are about to join. Exits with 1 if the final weights or the optimizers of the replicas
    differ in a bit, if a step was lost, or if the means of the final losses differ by more than those of different
    seeds do.
    """

    width: int = option(64, help="Of a model in the shape of Llama.")
    batch: int = option(4, help="Sequences of 64 bytes of a rank in a step.")
    kills: int = option(50, help="In a run.")

    def smoke(self) -> HsdpRequest:
        """A few steps with one kill, to see that it runs."""
        few: dict[str, Any] = dict(width=16, layers=1, batch=1, steps=40, kills=1, validate_every=20, windows=8)
        return dataclasses.replace(self, seeds=self.seeds[:1], **few)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (UNDISTURBED, KILLED)

    def compare(self, runs: Sequence[Run]) -> tuple[list[Comparison], list[Comparison]]:
        """Returns the comparisons that decide the measurement, and others that are worth knowing."""
        return compare(runs, UNDISTURBED), []

    def check(self) -> None:
        super().check()
        if self.kills < 1 or self.steps < NEEDED * (self.kills + 1):
            raise SettingsError(
                f"{self.kills} kills need at least {NEEDED * (self.kills + 1)} steps; raise --steps or lower --kills."
            )
        check_memory(f"{self.jobs} trainings at a time", self.jobs * REPLICAS * RANKS, MODEL_MEMORY, "--jobs")


class RankKill(msgspec.Struct, frozen=True):
    after: int  # the step after which it comes, if all contribute then
    replica: int
    rank: int
    share: float  # of a usual step, from its begin


def plan(seed: int, steps: int, kills: int) -> list[RankKill]:
    """One kill in each of as many equal parts of the run, and none in the last steps. Pure."""
    chance = random.Random(seed)
    part = (steps - NEEDED) / kills
    return [
        RankKill(
            after=round((number + chance.uniform(0, 0.5)) * part),
            replica=chance.randrange(REPLICAS),
            rank=chance.randrange(RANKS),
            share=chance.random(),
        )
        for number in range(kills)
    ]


async def measure(request: HsdpRequest, report: BenchReport) -> None:
    await convergence.measure(request, train, report)


async def train(request: HsdpRequest, seed: int, kind: str, progress: Callable[[float], None]) -> Run:
    kills = plan(seed, request.steps, request.kills) if kind == KILLED else []

    async def kill_all(follower: Follower) -> list[int]:
        killer = Killer(follower)
        for kill in kills:
            await killer.do(kill)
            progress(killer.at[-1] / request.steps)
        return killer.at

    return await convergence.train(request, seed, kind, rank, HsdpTask, REPLICAS, RANKS, len(kills), kill_all, progress)


class Killer:
    """Kills a rank, and waits until its replica contributes again."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.at: list[int] = []  # steps in which the kills came
        self._hold: Path = follower.job.task.hold

    async def do(self, kill: RankKill) -> None:
        follower = self.follower
        await follower.until(f"step {kill.after} was done by all", lambda: self._all_since(kill.after))
        assert follower.last is not None
        step, usual = follower.last.step, follower.usual
        self._hold.touch()
        if not await follower.job.job.runs(kill.share * usual):
            raise FtcommError("the job ended before the kill; raise --steps")
        before = {follower.built[kill.replica, rank] for rank in range(RANKS)}
        follower.job.kill(kill.replica, kill.rank)
        self.at.append(step + 1)
        await follower.until(
            f"replica {kill.replica} had started again",
            lambda: all(follower.built[kill.replica, rank] not in before for rank in range(RANKS)),
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


EXPERIMENT = convergence.experiment("hsdp", HsdpRequest, measure, curves.draw)


# -- in a rank ---------------------------------------------------------------------------------------------------------


class HsdpTask(TrainingTask, frozen=True):
    @property
    def hold(self) -> Path:
        return Path(self.folder) / "hold"


class Hold:
    """Outcomes are the same on all ranks, so all stop before the same step."""

    def __init__(self, task: HsdpTask, replicas: int) -> None:
        self._file, self._replicas = task.hold, replicas
        self._alone = 0  # steps without all

    def after(self, outcome: Outcome | None) -> None:
        if outcome is None or len(outcome.counted) == self._replicas:
            self._alone = 0
            return
        self._alone += 1
        if self._alone == ALONE:
            wait_until("the replica that was killed had started again", lambda: not self._file.exists())
        elif self._alone > ALONE:
            time.sleep(PACE if self._alone < SOON else SLOW)


def rank(task: HsdpTask) -> None:
    settings = Settings.from_env()
    records = RankRecords(task.folder, settings.replica, settings.shard, settings.ranks_per_replica)
    hold = Hold(task, settings.replicas)
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)  # the same first weights everywhere
    text, held_out = library_text()
    samples = held_out_samples(held_out, task.windows, CONTEXT)
    model = Llama(task.width, task.layers)
    records.built()

    ftcomm.init(settings)
    mesh = init_device_mesh("cpu", mesh_dim_names=("replicate", "shard"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Batches((len(text) - 1) // CONTEXT, task.batch, seed=task.seed)
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    loop = StepLoop(state)
    for step in loop.steps(task.steps):
        outcome = loop.outcome
        records.settled(outcome)
        hold.after(outcome)
        if step % task.validate_every == 0:
            before = range(settings.replicas) if step == 0 else outcome.counted if outcome else ()
            records.validate(step, model, samples, list(before))
        for options in optimizer.param_groups:
            options["lr"] = learning_rate(step, task.steps, PEAK)
        optimizer.zero_grad()
        starts = np.array(batches.samples) * CONTEXT
        model(windows(text, starts, CONTEXT)).backward()
        optimizer.step()
    assert loop.outcome is not None
    records.settled(loop.outcome)
    records.validate(task.steps, model, samples, list(loop.outcome.counted))
    records.ended(digest(state))
    dist.destroy_process_group()
