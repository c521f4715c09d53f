"""`ftcomm bench rejoin`: what the others notice of a replica that comes back, and how fast its state gets there.

The ranks train a stack of linear layers, data-parallel and by AdamW, until the job is drained. They write down what
each step took, and what of it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence

import click
import msgspec

import ftcomm
from ftcomm.bench.checks import check_memory, check_replicas
from ftcomm.bench.harness import SIZE, BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import FOREVER, Observer, Records, observed, together
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median
from ftcomm.errors import SettingsError
from ftcomm.torch.buckets import GradientBuckets
from ftcomm.training import StepLoop

REJOIN_TIMEOUT = 180.0  # s for a replica to come back and contribute
SETTLED = 8  # steps that all replicas have done together before the next kill
TARGET = 0.1  # of a step: what a rejoin may stall a healthy replica
WIDTH = 1024


@dataclasses.dataclass(frozen=True)
class RejoinRequest:
    """Kill a training replica, and see what the others notice of its return.

    `transfer` is what its state took to arrive, of weights and AdamW's moments, while all trained on; `stall` for how
    long the loop of a healthy replica stood still for the copy that it serves, the worst of them, and that beside one
    of its steps. The steps are those of the healthy replicas: with all, without the one, and while it catches up; it
    computes then as they do, so on few cores they share those with it; the longest of all these. Exits with 1 above a
    tenth of a step.
    """

    replicas: int = option(3, help="Processes; one is killed and comes back.")
    size: int = option(400_000_000, kind=SIZE, help="Of weights and moments, in bytes.", show="400 MB")
    batch: int = option(256, help="Samples of a step: how long it takes.")
    rejoins: int = option(3, help="One replica after the other.")
    mbps: float | None = option(None, kind=click.FLOAT, help="Throttle of the sources (FTCOMM_CATCHUP_MBPS).")
    judged: bool = True  # by TARGET

    def smoke(self) -> RejoinRequest:
        """One return of one of two replicas with 40 MB, to see that it runs."""
        return RejoinRequest(2, 40_000_000, 32, 1, self.mbps, judged=False)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_replicas(self.replicas)
        if self.rejoins < 1 or self.batch < 1:
            raise SettingsError(f"--rejoins {self.rejoins}, --batch {self.batch}: expected at least 1.")
        if self.size < 12 * WIDTH * WIDTH:
            raise SettingsError(f"--size {format_size(self.size)}: expected at least {12 * WIDTH * WIDTH} bytes.")
        what = f"{self.replicas} replicas with a state of {format_size(self.size)}"
        arrays = 3 * self.size  # state, gradients and buckets, a snapshot or kept ones
        check_memory(what, self.replicas, arrays, "--replicas or --size")


class Rejoin(msgspec.Struct, frozen=True):
    """One replica that was killed and came back. Times in seconds."""

    number: int
    replica: int
    nbytes: int  # of the state
    transfer: float  # from the first connection to the last block
    load: float  # into the model and the optimizer, at the joiner
    replayed: int  # steps that the joiner made up for
    stalls: dict[int, float]  # healthy replica -> for how long its loop stood still for the copy
    step: float  # median of the healthy replicas' steps with all there, just before the kill
    step_without: float | None  # while the replica was away
    step_meanwhile: float | None  # while it was catching up; it computes, too
    longest: float | None  # of the healthy replicas' steps from the kill until it contributed
    back: float  # from the kill until then

    @property
    def share(self) -> float:
        """The share of one step that the most stalled healthy replica stood still."""
        return max(self.stalls.values(), default=0.0) / self.step


async def measure(request: RejoinRequest, report: BenchReport) -> None:
    """Kill replicas in turn, each when all are back. Raises `FtcommError` when the job fails or a replica does not come
    back; no process is left, however this ends."""
    env = {} if request.mbps is None else {"FTCOMM_CATCHUP_MBPS": str(request.mbps)}
    task = RejoinTask(layers_for(request.size), request.batch)
    async with observed(rank, task, TimedStep, request.replicas, env=env) as job:
        for number in range(request.rejoins):
            said = f"rejoin {number + 1} of {request.rejoins}"
            report.progress(f"{said}: all train", number / request.rejoins)
            job.records.clear()
            await job.until(
                "all replicas train together", lambda: together(_full(job), job.replicas, SETTLED), REJOIN_TIMEOUT
            )
            victim = request.replicas - 1 - number % (request.replicas - 1)
            report.progress(f"{said}: replica {victim}", number / request.rejoins)
            report.add(await _kill(job, number, victim))


def _full(job: Observer[TimedStep]) -> list[TimedStep]:
    return [step for step in job.records if step.counted == job.replicas]


async def _kill(job: Observer[TimedStep], number: int, victim: int) -> Rejoin:
    before = lengths(job.records, lambda step: step.counted == job.replicas)
    job.records.clear()
    mark = len(job.events)
    killed = job.kill(victim)
    await job.until(f"replica {victim} contributes again", lambda: job.full_view(mark) is not None, REJOIN_TIMEOUT)
    await job.until("its state was told of", lambda: bool(job.said("state_fetched", mark)), REJOIN_TIMEOUT)
    full, (fetched, *_) = job.full_view(mark), job.said("state_fetched", mark)
    assert full is not None
    others = set(range(job.replicas)) - {victim}
    await job.until(
        "the others have ended the step after that",
        lambda: others <= {step.replica for step in job.records if step.start > full["mono"]},
        REJOIN_TIMEOUT,
    )
    healthy = [step for step in job.records if step.replica != victim]
    stalls = {event["replica"]: float(event["seconds"]) for event in job.said("state_snapshot", mark)}
    return Rejoin(
        number=number,
        replica=victim,
        nbytes=fetched["bytes"],
        transfer=fetched["seconds"],
        load=fetched["load_seconds"],
        replayed=fetched["replayed"],
        stalls=stalls,
        step=median(before),
        step_without=_middle(lengths(healthy, lambda step: step.members < job.replicas)),
        step_meanwhile=_middle(lengths(healthy, lambda step: step.counted < job.replicas == step.members)),
        longest=max(lengths(healthy, lambda step: step.end > killed), default=None),
        back=full["mono"] - killed,
    )


def lengths(steps: Sequence[TimedStep], wanted: Callable[[TimedStep], bool]) -> list[float]:
    """Measures from the begin of a step to that of the next, on the same process: what lies between them counts,
    too."""
    found = []
    last: dict[int, TimedStep] = {}
    for step in steps:
        before = last.get(step.pid)
        if before is not None and before.number == step.number - 1 and wanted(before):
            found.append(step.start - before.start)
        last[step.pid] = step
    return found


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _seconds(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


COLUMNS = (
    Column("rejoin", "", 7, lambda one: str(one.number + 1)),
    Column("replica", "", 8, lambda one: str(one.replica)),
    Column("state", "(MB)", 8, lambda one: f"{one.nbytes / 1e6:.1f}"),
    Column("transfer", "(s)", 8, lambda one: f"{one.transfer:.2f}"),
    Column("rate", "(MB/s)", 8, lambda one: f"{one.nbytes / 1e6 / one.transfer:.0f}"),
    Column("stall", "(ms)", 8, lambda one: f"{1e3 * max(one.stalls.values(), default=0.0):.2f}"),
    Column("stall", "(% step)", 8, lambda one: f"{100 * one.share:.2f}"),
    Column("step", "(s)", 8, lambda one: _seconds(one.step)),
    Column("without", "(s)", 8, lambda one: _seconds(one.step_without)),
    Column("joining", "(s)", 8, lambda one: _seconds(one.step_meanwhile)),
    Column("longest", "(s)", 8, lambda one: _seconds(one.longest)),
    Column("back", "(s)", 8, lambda one: _seconds(one.back, 2)),
)


def footer(rejoins: Sequence[Rejoin]) -> str:
    worst = max((rejoin.share for rejoin in rejoins), default=0.0)
    verdict = "OK" if worst <= TARGET else "FAILED"
    return (
        f"# most that a healthy replica was stalled: {100 * worst:.2f}% of a step, allowed {100 * TARGET:g}%: {verdict}"
    )


def _good(report: BenchReport) -> bool:
    return not report.request.judged or all(one.share <= TARGET for one in report["rejoins"])


EXPERIMENT = Experiment(
    "rejoin",
    RejoinRequest,
    measure,
    [Table("rejoins", Rejoin, COLUMNS)],
    footer=lambda report: [footer(report["rejoins"])],
    good=_good,
)


# -- in a rank ---------------------------------------------------------------------------------------------------------


class RejoinTask(msgspec.Struct, frozen=True):
    layers: int  # of WIDTH x WIDTH weights
    batch: int  # samples of a step
    folder: str = ""


class TimedStep(msgspec.Struct, frozen=True):
    """Times are of `time.monotonic()`, one clock for all processes of a host."""

    replica: int
    pid: int
    number: int
    counted: int  # replicas that contributed
    members: int  # of the view it ended in
    start: float  # when the loop gave it out
    end: float  # when the body was through


def layers_for(nbytes: int) -> int:
    """Returns how many layers make a state of about `nbytes`: weights and two moments of each, in fp32."""
    return max(1, round(nbytes / (12 * WIDTH * WIDTH)))


def rank(task: RejoinTask) -> None:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(task.layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(task.batch, WIDTH)
    group = ftcomm.init()
    buckets = GradientBuckets(model, group)
    loop = StepLoop({"model": model, "optimizer": optimizer}, group)
    records = Records(task.folder, group.replica)
    for number in loop.steps(FOREVER):
        start = time.monotonic()
        model(x).square().mean().backward()
        buckets.wait()
        optimizer.step()
        buckets.zero_grad()
        end = time.monotonic()
        step = TimedStep(group.replica, os.getpid(), number, len(group.contributing), len(group.members), start, end)
        records.write(step)
    ftcomm.shutdown()
