"""`ftcomm bench stragglers`: whom `ftcomm stragglers` names while all are alike, and how soon one that is slower.

The ranks take steps of the same length, of which a twentieth is work for a CPU and the rest is slept, as a rank does
that waits for its GPU; an all-reduce ends each. What else runs on the machine makes them uneven by chance.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

import ftcomm
from ftcomm.bench.checks import check_replicas
from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import FOREVER, Observer, Records, observed
from ftcomm.diagnosis.slowdown import SlowdownOfGroup, SlowdownOfRank
from ftcomm.errors import SettingsError
from ftcomm.launch.admin.handlers import status
from ftcomm.launch.diagnose import slowdowns

SOON = 50  # steps within which the slow one is to be named
GIVEN_UP = 10 * SOON
STEPS_TIMEOUT = 120.0  # s for a few steps
BUSY = 0.05  # of a step in which a CPU works
SLOW = "slow"  # the file that makes the last replica slow


@dataclasses.dataclass(frozen=True)
class StragglersRequest:
    """Ask again and again who makes a job slow in which all are alike, then make one replica slower.

    Each name in the first part is a false one, and so is that of another replica in the second. The slow one has to be
    named within 50 steps. Exits with 1 otherwise.
    """

    replicas: int = option(4, help="Processes.")
    step_ms: float = option(200.0, "--step", help="Of a step, in milliseconds.")
    minutes: float = option(40.0, help="For how long all are alike.")
    every: float = option(30.0, help="Seconds between two looks meanwhile.")
    slower: float = option(1.3, help="How many times as long the last replica computes then.")
    judged: bool = True

    def smoke(self) -> StragglersRequest:
        """Two seconds, to see that it runs."""
        return dataclasses.replace(self, replicas=3, step_ms=20.0, minutes=2 / 60, every=1.0, judged=False)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_replicas(self.replicas)
        if self.replicas < 3:
            raise SettingsError(f"--replicas {self.replicas}: expected at least 3; of two each may be the slow one.")
        if min(self.step_ms, self.minutes, self.every) <= 0 or self.slower <= 1:
            raise SettingsError(
                f"--step {self.step_ms:g}, --minutes {self.minutes:g}, --every {self.every:g}, --slower "
                f"{self.slower:g}: expected more than 0, and a slower replica more than 1."
            )


class Look(msgspec.Struct, frozen=True):
    """The answer of one look. `named` has the replicas, `slowdowns` all of them in order."""

    seconds: float  # since the first step
    part: str  # "even" or "slow"
    step: int  # the last one
    slowdowns: tuple[float, ...]
    named: tuple[int, ...]


class Named(msgspec.Struct, frozen=True):
    """Says how many steps the slow replica had taken when the recordings were enough to name it; None: it was not
    named."""

    replica: int
    steps: int | None


async def measure(request: StragglersRequest, report: BenchReport) -> None:
    """Run the two parts. Raises `FtcommError` when the job fails; no process is left, however this ends."""
    task = StragglersTask(request.step_ms / 1e3, request.slower, request.replicas - 1)
    async with observed(rank, task, SlowSince, request.replicas) as job:
        await job.until("all replicas train", lambda: _step(job) > 1, STEPS_TIMEOUT)
        began, slow = time.monotonic(), request.replicas - 1
        while (passed := time.monotonic() - began) < 60 * request.minutes:
            report.progress("all are alike", passed / 60 / request.minutes)
            await job.comes(lambda: False, min(request.every, 60 * request.minutes - passed))
            report.add(_look(began, "even", job, await _asked(job)))
            report.save()
        Path(job.task.folder, SLOW).touch()
        await job.until("a replica is slower", lambda: bool(job.records), STEPS_TIMEOUT)
        since = job.records[-1].step
        named: int | None = None
        while named is None and (step := _step(job)) < since + GIVEN_UP:
            report.progress(f"replica {slow} is slower", (step - since) / GIVEN_UP)
            await job.comes(lambda: False, 10 * task.seconds)
            groups = await _asked(job)
            report.add(_look(began, "slow", job, groups))
            named = next((one.since - since for one in _ranks(groups) if one.rank[0] == slow and one.named), None)
        report.add(Named(slow, named))


async def _asked(job: Observer[SlowSince]) -> Sequence[SlowdownOfGroup]:
    return await asyncio.to_thread(slowdowns, status(job.job.launcher))


def _step(job: Observer[SlowSince]) -> int:
    return min((job.job.launcher.known_steps().get(replica, -1) for replica in range(job.replicas)), default=-1)


def _ranks(groups: Sequence[SlowdownOfGroup]) -> list[SlowdownOfRank]:
    return [one for group in groups for one in group.ranks]


def _look(began: float, part: str, job: Observer[SlowSince], groups: Sequence[SlowdownOfGroup]) -> Look:
    ranks = sorted(_ranks(groups), key=lambda one: one.rank)
    slowdowns = tuple(round(one.slowdown, 3) for one in ranks)
    named = tuple(one.rank[0] for one in ranks if one.named)
    return Look(round(time.monotonic() - began, 1), part, _step(job), slowdowns, named)


COLUMNS = (
    Column("time", "(s)", 7, lambda one: f"{one.seconds:.0f}"),
    Column("ranks", "", 6, lambda one: one.part),
    Column("step", "", 7, lambda one: str(one.step)),
    Column("slowest", "(x)", 8, lambda one: f"{max(one.slowdowns, default=1.0):.2f}"),
    Column("named", "", 8, lambda one: ",".join(map(str, one.named)) or "-"),
)


def false_names(looks: Sequence[Look], slow: int) -> int:
    """Returns how many names at all looks were false: any while all were alike, and others than the slow one's then."""
    return sum(look.part == "even" or replica != slow for look in looks for replica in look.named)


def _good(report: BenchReport) -> bool:
    false = false_names(report["looks"], report.request.replicas - 1)
    soon = all(one.steps is not None and one.steps <= SOON for one in report["named"])
    return not report.request.judged or (soon and not false)


def _footer(report: BenchReport) -> list[str]:
    request, looks = report.request, report["looks"]
    even = [look for look in looks if look.part == "even"]
    steps = even[-1].step if even else 0
    said = [
        f"# false names: {false_names(looks, request.replicas - 1)} at {len(looks)} looks, {len(even)} of them in "
        f"{request.minutes:g} minutes and {steps} steps in which all were alike"
    ]
    return said + [
        f"# replica {one.replica}, {request.slower:g} times as slow, was named after "
        f"{f'{one.steps} steps' if one.steps is not None else 'no step'}, allowed {SOON}"
        for one in report["named"]
    ]


EXPERIMENT = Experiment(
    "stragglers",
    StragglersRequest,
    measure,
    [Table("looks", Look, COLUMNS), Table("named", Named)],
    footer=_footer,
    good=_good,
)


# -- in a rank ---------------------------------------------------------------------------------------------------------


class StragglersTask(msgspec.Struct, frozen=True):
    seconds: float  # of a step
    slower: float
    slow: int  # the replica that is told to be
    folder: str = ""


class SlowSince(msgspec.Struct, frozen=True):
    replica: int
    step: int  # its first slow one


def rank(task: StragglersTask) -> None:
    group = ftcomm.init()
    gradient, work = np.ones(1 << 18, np.float32), np.ones(1 << 16, np.float32)
    sign, records, factor = Path(task.folder, SLOW), Records(task.folder, group.replica), 1.0
    for step in ftcomm.steps(FOREVER):
        if group.replica == task.slow and factor == 1.0 and sign.exists():
            factor = task.slower
            records.write(SlowSince(group.replica, step))
        began = time.monotonic()
        busy, until = began + BUSY * factor * task.seconds, began + factor * task.seconds
        while time.monotonic() < busy:
            np.sqrt(work, out=work)
        time.sleep(max(0.0, until - time.monotonic()))
        group.allreduce(gradient, "avg")
    ftcomm.shutdown()
