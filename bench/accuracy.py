"""`ftcomm bench accuracy`: what it does to a model that replicas are away for a part of the steps."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ftcomm.bench.absence import Absence, draw
from ftcomm.bench.accuracy_rank import Task, main
from ftcomm.bench.convergence import UNDISTURBED, Comparison, Follower, Run, compare, share_out, summary
from ftcomm.bench.forked import ForkedJob
from ftcomm.errors import SettingsError
from ftcomm.hsdp.rate import POLICIES

LEFT_OUT = "left out"  # nobody is killed, but the same samples are not used: what fewer samples alone do
KILLED = "none"  # the policy that may be compared with it


@dataclasses.dataclass(frozen=True)
class Request:
    replicas: int = 4
    width: int = 32  # the demo's model has 128
    layers: int = 2
    batch: int = 12
    steps: int = 2000
    down: float = 0.2  # share of the steps
    times: int = 3  # absences of each replica
    policies: Sequence[str] = tuple(POLICIES)
    seeds: Sequence[int] = (1, 2, 3)
    jobs: int = 1  # trainings at a time
    validate_every: int = 50
    windows: int = 192  # of held-out text

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


async def measure(request: Request, on_run: Callable[[Run], None], progress: Callable[[str, float], None]) -> None:
    """Raises `FtcommError` when a job fails or stands still; no process is left, however this ends."""
    plan = [(seed, kind) for seed in request.seeds for kind in request.kinds]
    trainings = [functools.partial(train, request, seed, kind) for seed, kind in plan]
    words = f"{len(plan)} trainings of {request.steps} steps"
    await share_out(trainings, request.jobs, on_run, functools.partial(progress, words))


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
