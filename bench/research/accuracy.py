"""`ftcomm bench accuracy`: what it does to a model that replicas are away for a part of the steps.

In the ranks, the demo's training under the step loop. A replica kills itself where its absences begin, at a random
moment of that step, and is started again at once. Shortly before they end the others wait for the new process, if it is
still building its model, and do the next steps slowly: so an absence lasts about as many steps as was drawn, however
fast the machine is. It joins, fetches the state and catches up while they train.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import click
import torch

import ftcomm
from ftcomm.bench.checks import check_replicas
from ftcomm.bench.harness import BenchReport, option
from ftcomm.bench.research import convergence, curves
from ftcomm.bench.research.absence_plan import SETTLE, Absence, draw
from ftcomm.bench.research.convergence import UNDISTURBED, Comparison, Run, TrainingRequest, compare
from ftcomm.bench.research.convergence_rank import RankRecords, TrainingTask, held_out_samples, wait_until
from ftcomm.demo.data import batch, library_text
from ftcomm.demo.model import Transformer
from ftcomm.demo.train import learning_rate
from ftcomm.errors import SettingsError
from ftcomm.launch.commands.option_types import Several
from ftcomm.settings import Settings
from ftcomm.torch.buckets import GradientBuckets
from ftcomm.training import StepLoop
from ftcomm.training.lr_scaling import POLICIES
from ftcomm.training.state import digest

LEFT_OUT = "left out"  # without kills, but without the same samples: the effect of fewer samples alone
KILLED = "none"  # the policy that may be compared with it
CONTEXT = 64  # bytes of a sequence
HEADS = 4
PEAK = 8e-3 * 128  # learning rate times width: the demo's, which is near the best there as this is here
LEAD = 5  # steps that joining and catching up take about, at one every PACE
PACE = 0.05  # s
SLOW = 0.5  # s before each step if it takes twice as many: on a busy machine there would else be none left for it
AWAY = 7200.0  # s that an absence lasts at most: hundreds of steps of the others, however busy the machine is


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyRequest(TrainingRequest):
    """Train with replicas away for a part of the steps and with all there, and compare what is learned.

    Each replica gets SIGKILL at random steps and is started again; it joins, catches up and contributes after as many
    steps as were drawn for it, the others waiting for its process if that takes longer. The loss is of text that was
    held out, after the last step. Fewer replicas train on fewer samples, which alone makes it higher: in the runs "left
    out" no replica is killed, and only the same samples are not used. Exits with 1 if the final weights of the replicas
    differ, if a step was lost, or if the means of the losses with and without kills, of equal samples and learning
    rates, differ by more than those of different seeds do.
    """

    replicas: int = option(4, help="Processes.")
    width: int = option(32, help="Of the demo's model, which has 128 there.")
    batch: int = option(12, help="Sequences of 64 bytes of a replica in a step.")
    down: float = option(0.2, help="Share of the steps that a replica is away.")
    times: int = option(3, help="Kills of each replica in a run.")
    policies: Sequence[str] = option(
        tuple(POLICIES),
        kind=Several(click.STRING, "POLICY,..."),
        help="Of the learning rate while replicas are away, see `lr` of the step loop.",
    )

    def smoke(self) -> AccuracyRequest:
        """Two replicas for a few steps, one kill each, to see that it runs."""
        few: dict[str, Any] = dict(replicas=2, width=16, layers=1, batch=1, steps=100, validate_every=25, windows=8)
        return dataclasses.replace(self, times=1, policies=("linear",), seeds=self.seeds[:1], **few)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (UNDISTURBED, LEFT_OUT, *self.policies)

    def compare(self, runs: Sequence[Run]) -> tuple[list[Comparison], list[Comparison]]:
        """Returns the comparisons that decide the measurement, and others that are worth knowing."""
        alike = [run for run in runs if run.kind in (KILLED, LEFT_OUT)]
        return compare(alike, LEFT_OUT), compare(runs, UNDISTURBED)

    def check(self) -> None:
        super().check()
        check_replicas(self.replicas)
        if not 0 < self.down < 0.5:
            raise SettingsError(f"--down {self.down}: expected a share between 0 and 0.5.")
        if unknown := set(self.policies) - set(POLICIES):
            raise SettingsError(f"--policies {', '.join(sorted(unknown))}: expected {', '.join(POLICIES)}.")
        for seed in self.seeds:
            self.absences(seed)

    def absences(self, seed: int) -> list[Absence]:
        return draw(seed, self.replicas, self.steps, self.down, self.times)


async def measure(request: AccuracyRequest, report: BenchReport) -> None:
    await convergence.measure(request, train, report)


async def train(request: AccuracyRequest, seed: int, kind: str, progress: Callable[[float], None]) -> Run:
    absences = [] if kind == UNDISTURBED else request.absences(seed)
    kills = [] if kind == LEFT_OUT else [one.begin for one in absences]
    task = functools.partial(
        AccuracyTask,
        policy="none" if kind in (UNDISTURBED, LEFT_OUT) else kind,
        absences=tuple(absences),
        kill=kind != LEFT_OUT,
    )

    async def killed(follower: object) -> list[int]:
        return kills  # the ranks do it themselves

    ranks, times = 1, request.times if kills else 0
    return await convergence.train(request, seed, kind, rank, task, request.replicas, ranks, times, killed, progress)


EXPERIMENT = convergence.experiment("accuracy", AccuracyRequest, measure, curves.draw)


# -- in a rank ---------------------------------------------------------------------------------------------------------


class AccuracyTask(TrainingTask, frozen=True, kw_only=True):
    policy: str  # of the learning rate while replicas are away
    absences: tuple[Absence, ...]
    kill: bool  # else who is absent is there, and only its samples are left out


class Absences:
    """Does what this process has to do about its own absences and those of the others."""

    def __init__(self, task: AccuracyTask, records: RankRecords) -> None:
        self._records = records
        self._all = task.absences
        killed = task.absences if task.kill else ()
        self._own = [one for one in killed if one.replica == records.replica]
        self._turns = {(one.replica, self._life(task, one)): one.end - LEAD for one in killed}
        self._chance = random.Random(f"{task.seed} {records.replica} {records.life}")
        self._began = time.monotonic()

    def wait_for_turn(self) -> None:
        """Say that everything is built, and join no earlier than at the end of the absence."""
        self._records.built()
        if life := self._records.life:
            self._mark("ready", self._records.replica, life).touch()
            turn = self._mark("turn", self._records.replica, life)
            wait_until("the others came to the end of this absence", turn.exists, AWAY)

    def at(self, step: int, counted: Collection[int]) -> None:
        """Note the begin of a step; the last one was of those that `counted`."""
        now = time.monotonic()
        usual, self._began = now - self._began, now
        for (replica, life), turn in self._turns.items():
            if turn == step:
                ready = self._mark("ready", replica, life)
                wait_until(f"replica {replica} was there again for step {step}", ready.exists)
                self._mark("turn", replica, life).touch()
            if turn <= step < turn + SETTLE:
                time.sleep(PACE)
            if step >= turn + 2 * LEAD and replica not in counted and not self._gone_again(replica, turn, step):
                time.sleep(SLOW)
        if any(one.begin == step for one in self._own):
            threading.Timer(self._chance.uniform(0, usual), os.kill, (os.getpid(), signal.SIGKILL)).start()

    def _gone_again(self, replica: int, turn: int, step: int) -> bool:
        """Whether the next absence of the replica has begun."""
        return any(one.replica == replica and turn + LEAD < one.begin <= step for one in self._all)

    def weight(self, step: int, replicas: int) -> float:
        """Weighs the loss, in a run without kills, so that the average over all is the average over those that are not
        absent."""
        absent = {one.replica for one in self._all if one.begin <= step < one.end}
        return 0.0 if self._records.replica in absent else replicas / (replicas - len(absent))

    def _mark(self, what: str, replica: int, life: int) -> Path:
        return self._records.folder / f"{what}-{replica}-{life}"

    @staticmethod
    def _life(task: AccuracyTask, absence: Absence) -> int:
        """The number of the process that ends it."""
        return sum(one.replica == absence.replica and one.begin <= absence.begin for one in task.absences)


def rank(task: AccuracyTask) -> None:
    settings = Settings.from_env()
    records = RankRecords(task.folder, settings.replica)
    absences = Absences(task, records)
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)  # the same first weights everywhere
    text, held_out = library_text()
    samples = held_out_samples(held_out, task.windows, CONTEXT)
    model = Transformer(task.width, task.layers, HEADS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model(batch(text, task.seed, 0, 0, task.batch, CONTEXT)).backward()

    absences.wait_for_turn()
    group = ftcomm.init(settings)
    buckets = GradientBuckets(model, group, bucket_bytes=512 << 10)
    state = {"model": model, "optimizer": optimizer}
    loop = StepLoop(state, group, lr=task.policy)
    for step in loop.steps(task.steps):
        outcome = loop.outcome
        records.settled(outcome)
        absences.at(step, outcome.counted if outcome else range(settings.replicas))
        if step % task.validate_every == 0:
            before = range(settings.replicas) if step == 0 else outcome.counted if outcome else ()
            records.validate(step, model, samples, list(before))
        for options in optimizer.param_groups:
            options["lr"] = learning_rate(step, task.steps, PEAK / task.width)
        loss = model(batch(text, task.seed, step, group.replica, task.batch, CONTEXT))
        if not task.kill:
            loss = loss * absences.weight(step, settings.replicas)
        loss.backward()
        buckets.wait()
        optimizer.step()
        buckets.zero_grad()
    assert loop.outcome is not None
    records.settled(loop.outcome)
    records.validate(task.steps, model, samples, list(loop.outcome.counted))
    records.ended(digest(state))
    ftcomm.shutdown()
