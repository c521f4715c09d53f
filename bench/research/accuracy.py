"""`ftcomm bench accuracy`: what it does to a model that replicas are away for a part of the steps."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ftcomm.bench.harness import INTS, Report, Several, option
from ftcomm.bench.research import convergence, curves
from ftcomm.bench.research.absence_plan import Absence, draw
from ftcomm.bench.research.accuracy_rank import Task, main
from ftcomm.bench.research.convergence import UNDISTURBED, Comparison, Follower, Run, compare, summary
from ftcomm.bench.research.forked import ForkedJob
from ftcomm.errors import SettingsError
from ftcomm.training.lr_scaling import POLICIES

LEFT_OUT = "left out"  # nobody is killed, but the same samples are not used: what fewer samples alone do
KILLED = "none"  # the policy that may be compared with it


@dataclasses.dataclass(frozen=True)
class Request:
    """Train with replicas away for a part of the steps and with all there, and compare what is learned.

    Each replica gets SIGKILL at random steps and is started again; it joins, catches up and contributes after as many
    steps as were drawn for it, the others waiting for its process if that takes longer. The loss is of text that was
    held out, after the last step. Fewer replicas train on fewer samples, which alone makes it higher: in the runs "left
    out" nobody is killed, and only the same samples are not used. Exits with 1 if the final weights of the replicas
    differ, if a step was lost, or if the means of the losses with and without kills, of equal samples and learning
    rates, differ by more than those of different seeds do.
    """

    replicas: int = option(4, help="Processes.")
    width: int = option(32, help="Of the demo's model, which has 128 there.")
    layers: int = option(2)
    batch: int = option(12, help="Sequences of 64 bytes of a replica in a step.")
    steps: int = option(2000)
    down: float = option(0.2, help="Share of the steps that a replica is away.")
    times: int = option(3, help="Kills of each replica in a run.")
    policies: Sequence[str] = option(
        tuple(POLICIES),
        kind=Several(click.STRING, "POLICY,..."),
        help="Of the learning rate while replicas are away, see `lr` of the step loop.",
    )
    seeds: Sequence[int] = option((1, 2, 3), kind=INTS, help="Of weights, data and kills.")
    jobs: int = option(1, help="Trainings at a time; steps are counted, not seconds.")
    validate_every: int = 50
    windows: int = 192  # of held-out text

    def smoke(self) -> Request:
        """Two replicas for a few steps, one kill each, to see that it runs."""
        few = Request(2, 16, 1, 1, 100, self.down, 1, ("linear",), self.seeds[:1], self.jobs)
        return dataclasses.replace(few, validate_every=25, windows=8)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (UNDISTURBED, LEFT_OUT, *self.policies)

    def compare(self, runs: Sequence[Run]) -> tuple[list[Comparison], list[Comparison]]:
        """Those that the measurement stands or falls with, and others that are worth knowing."""
        alike = [run for run in runs if run.kind in (KILLED, LEFT_OUT)]
        return compare(alike, LEFT_OUT), compare(runs, UNDISTURBED)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if not 2 <= self.replicas <= 16:
            raise SettingsError(f"--replicas {self.replicas}: expected 2 to 16.")
        if self.width % 8 or self.width < 8 or min(self.layers, self.batch, self.steps, self.jobs) < 1:
            raise SettingsError("--width has to be a multiple of 8, --layers, --batch, --steps and --jobs at least 1.")
        if not 0 < self.down < 0.5:
            raise SettingsError(f"--down {self.down}: expected a share between 0 and 0.5.")
        if unknown := set(self.policies) - set(POLICIES):
            raise SettingsError(f"--policies {', '.join(sorted(unknown))}: expected {', '.join(POLICIES)}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise SettingsError("--seeds: expected different numbers.")
        for seed in self.seeds:
            self.absences(seed)

    def absences(self, seed: int) -> list[Absence]:
        return draw(seed, self.replicas, self.steps, self.down, self.times)


async def measure(request: Request, report: Report) -> None:
    await convergence.measure(request, train, report)


async def train(request: Request, seed: int, kind: str, progress: Callable[[float], None]) -> Run:
    absences = [] if kind == UNDISTURBED else request.absences(seed)
    kills = [] if kind == LEFT_OUT else [one.begin for one in absences]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        task = Task(
            folder=folder,
            seed=seed,
            steps=request.steps,
            width=request.width,
            layers=request.layers,
            batch=request.batch,
            policy="none" if kind in (UNDISTURBED, LEFT_OUT) else kind,
            absences=tuple(absences),
            kill=kind != LEFT_OUT,
            validate_every=request.validate_every,
            windows=request.windows,
        )
        async with ForkedJob(main, task, Path(folder), request.replicas, 1) as job:
            follower = Follower(job, folder, request.replicas, 1)
            await follower.end(request.steps, progress)
    return summary(
        follower.records,
        request.replicas,
        1,
        request.steps,
        request.windows,
        kind=kind,
        seed=seed,
        kills=len(kills),
        deaths=job.restarts,
        killed_at=kills,
        seconds=round(time.monotonic() - began, 1),
    )


EXPERIMENT = convergence.experiment("accuracy", Request, measure, curves.draw)
