"""Compares what a training that was disturbed came to, beside the same undisturbed: for `ftcomm bench accuracy` and
`ftcomm bench hsdp`."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.harness import INTS, BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import Observer, observed
from ftcomm.bench.research.convergence_rank import (
    WAIT_TIMEOUT,
    Built,
    ConvergenceRecord,
    FinalState,
    Settled,
    Validated,
)
from ftcomm.errors import SettingsError
from ftcomm.training import StepDecision

UNDISTURBED = "undisturbed"
COMMON = ("steps", "width", "layers", "batch", "validate_every", "windows")  # of a request and its task


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """Says what is asked for of all trainings that are compared. `kinds` are the ways in which they are disturbed, if
    at all; each is done with each of the seeds."""

    width: int
    layers: int = option(2)
    batch: int
    steps: int = option(2000)
    seeds: Sequence[int] = option((1, 2, 3), kind=INTS, help="Of weights, data and kills.")
    jobs: int = option(1, help="Trainings at a time; steps are counted, not seconds.")
    validate_every: int = 50
    windows: int = 192  # of held-out text

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if self.width % 8 or self.width < 8 or min(self.layers, self.batch, self.steps, self.jobs) < 1:
            raise SettingsError("--width has to be a multiple of 8, --layers, --batch, --steps and --jobs at least 1.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise SettingsError("--seeds: expected different numbers.")


class Run(msgspec.Struct, frozen=True):
    """One training, from the first step to the last."""

    kind: str  # "undisturbed", or how it was disturbed
    seed: int
    steps: int
    kills: int
    deaths: int  # replicas that were started again; more than kills if some died by themselves
    absent: float  # share of the steps of all replicas that did not contribute
    lost: int  # steps that no replica has finished
    discarded: int  # attempts at steps that did not count
    disputed: int  # steps of which ranks were told different outcomes, or that a process left out
    equal: bool  # weights and optimizer, bit for bit, on the same rank of all replicas
    validation: list[tuple[int, float]]  # (step, nats a byte)
    killed_at: list[int]  # steps
    seconds: float

    @property
    def final(self) -> float:
        """Loss after the last step; NaN if not all of the held-out text was used."""
        return self.validation[-1][1] if self.validation and self.validation[-1][0] == self.steps else float("nan")

    @property
    def kept(self) -> bool:
        """Whether everything that is promised was kept, and the run says how it ended."""
        amiss = self.lost or self.discarded or self.disputed or math.isnan(self.final)
        return self.equal and self.kills == self.deaths and not amiss


class Comparison(msgspec.Struct, frozen=True):
    """The final losses of one kind of runs beside those of another, over the seeds. Nats a byte."""

    kind: str
    reference: str = msgspec.field(name="beside")  # the other kind
    seeds: int
    loss: float  # mean
    loss_reference: float = msgspec.field(name="loss_beside")
    difference: float  # of the means
    deviation: float  # standard deviation over the seeds (n - 1)
    deviation_reference: float = msgspec.field(name="deviation_beside")
    spread: float  # largest minus smallest over the seeds, the larger of the two kinds
    paired: list[float]  # differences of each seed, whose runs begin with equal weights

    @property
    def within(self) -> bool:
        """Whether the kinds differ by less than the seeds do."""
        return abs(self.difference) <= self.spread


def compare(runs: Sequence[Run], reference: str = UNDISTURBED) -> list[Comparison]:
    """Each kind with the one that is named, if both have at least two seeds in common. Pure."""
    finals: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        if not math.isnan(run.final):
            finals[run.kind][run.seed] = run.final
    other = finals.pop(reference, {})
    found = []
    for kind, of_seed in finals.items():
        seeds = sorted(other.keys() & of_seed.keys())
        if len(seeds) < 2:
            continue
        before, after = [other[seed] for seed in seeds], [of_seed[seed] for seed in seeds]
        found.append(
            Comparison(
                kind=kind,
                reference=reference,
                seeds=len(seeds),
                loss=statistics.fmean(after),
                loss_reference=statistics.fmean(before),
                difference=statistics.fmean(after) - statistics.fmean(before),
                deviation=statistics.stdev(after),
                deviation_reference=statistics.stdev(before),
                spread=max(max(losses) - min(losses) for losses in (before, after)),
                paired=[b - a for a, b in zip(before, after, strict=True)],
            )
        )
    return found


def summary(
    records: Sequence[ConvergenceRecord], replicas: int, ranks: int, steps: int, windows: int, **other: Any
) -> Run:
    """Returns what the ranks wrote down, as a `Run`. Pure."""
    settled = [record for record in records if isinstance(record, Settled)]
    outcomes: dict[int, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    lives: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for record in settled:
        outcomes[record.step].add((record.decision, record.counted))
        lives[record.replica, record.rank, record.pid].append(record.step)
    done = {
        step for step, told in outcomes.items() if any(decision == StepDecision.COMMIT.name for decision, _ in told)
    }
    gaps = sum(b - a != 1 for steps_of in lives.values() for a, b in itertools.pairwise(steps_of))
    counted = {step: max(len(who) for _, who in told) for step, told in outcomes.items()}
    ends = [record for record in records if isinstance(record, FinalState)]
    digests = [{end.digest for end in ends if end.rank == rank} for rank in range(ranks)]
    return Run(
        steps=steps,
        absent=1 - sum(counted.values()) / (steps * replicas),
        lost=len(set(range(steps)) - done),
        discarded=sum(decision != StepDecision.COMMIT.name for told in outcomes.values() for decision, _ in told),
        disputed=sum(len(told) > 1 for told in outcomes.values()) + gaps,
        equal=len(ends) == replicas * ranks and all(len(found) == 1 for found in digests),
        validation=curve(records, windows),
        **other,
    )


def curve(records: Sequence[ConvergenceRecord], windows: int) -> list[tuple[int, float]]:
    """Returns (step, loss) where the shares of all who were to take one are there: none was killed just then. Pure."""
    shares: dict[int, list[Validated]] = defaultdict(list)
    for record in records:
        if isinstance(record, Validated):
            shares[record.step].append(record)
    return [
        (step, sum(share.loss * share.windows for share in parts) / windows)
        for step, parts in sorted(shares.items())
        if sum(share.windows for share in parts) == windows
    ]


async def share_out(
    trainings: Sequence[Callable[[Callable[[float], None]], Awaitable[Run]]],
    jobs: int,
    on_run: Callable[[Run], None],
    progress: Callable[[float], None],
) -> None:
    """Do the trainings, so many at a time; each is given whom to tell its share that is done.

    When one fails the others are ended, and its error is raised.
    """
    shares = [0.0] * len(trainings)

    def at(number: int, share: float) -> None:
        shares[number] = share
        progress(sum(shares) / len(shares))

    left = iter(enumerate(trainings))

    async def work() -> None:
        for number, training in left:
            run = await training(functools.partial(at, number))
            at(number, 1.0)
            on_run(run)

    workers = [asyncio.create_task(work()) for _ in range(jobs)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def train(
    request: TrainingRequest,
    seed: int,
    kind: str,
    function: Callable[[Any], None],
    task: Callable[..., Any],
    replicas: int,
    ranks: int,
    kills: int,
    disturb: Callable[[Follower], Awaitable[Sequence[int]]],
    progress: Callable[[float], None],
) -> Run:
    """One training to its end, by ranks that call `function` with their task. `task` is given what all have in common;
    `disturb` returns the steps of its `kills`."""
    began = time.monotonic()
    made = task(seed=seed, **{name: getattr(request, name) for name in COMMON})
    # A replica that was not killed is not restarted; the times are long, so that only those are lost that are.
    options: dict[str, Any] = dict(max_restarts=kills, min_replicas=replicas, op_timeout=240.0, heartbeat_timeout=30.0)
    options |= {"env": {"FTCOMM_INIT_TIMEOUT": str(WAIT_TIMEOUT)}, "ranks_per_replica": ranks}
    async with observed(function, made, ConvergenceRecord, replicas, **options) as job:
        follower = Follower(job)
        killed_at = await disturb(follower)
        await follower.end(request.steps, progress)
    return summary(
        job.records,
        replicas,
        ranks,
        request.steps,
        request.windows,
        kind=kind,
        seed=seed,
        kills=len(killed_at),
        deaths=len(job.said("restarting")),
        killed_at=list(killed_at),
        seconds=round(time.monotonic() - began, 1),
    )


class Follower:
    """Reads what the ranks of a running training write down, and gives up if nothing happens for long."""

    def __init__(self, job: Observer[ConvergenceRecord]) -> None:
        self.job = job
        self.last: Settled | None = None  # of the newest step
        self.short = -1  # newest step that not all have contributed to
        self.built: dict[tuple[int, int], int] = {}  # (replica, rank) -> pid of the newest process there
        self._lengths: deque[float] = deque([0.0], maxlen=20)  # of the newest steps, seconds
        job.saw = self._saw

    @property
    def usual(self) -> float:
        """Seconds of a step."""
        return statistics.median(self._lengths)

    async def until(self, what: str, true: Callable[[], bool]) -> None:
        """Raises `FtcommError` if the job ends, or nothing happens for long, before that."""
        await self.job.until(what, true, WAIT_TIMEOUT, moved=lambda: (self.last, *self.built.values()))

    async def end(self, steps: int, progress: Callable[[float], None]) -> None:
        """Wait until the job has ended by itself, after so many steps."""

        def ended() -> bool:
            progress(self.last.step / steps if self.last else 0.0)
            return bool(self.job.job.ended)

        await self.until("the training had ended", ended)

    def _saw(self, record: ConvergenceRecord) -> None:
        if isinstance(record, Settled) and (self.last is None or record.step > self.last.step):
            if self.last is not None and self.last.step == record.step - 1:
                self._lengths.append(record.at - self.last.at)
            self.last = record
            if len(record.counted) < self.job.replicas:
                self.short = record.step
        elif isinstance(record, Built):
            self.built[record.replica, record.rank] = record.pid


async def measure(request: Any, train: Callable[..., Awaitable[Run]], report: BenchReport) -> None:
    """`train(request, seed, kind, progress)` for all of them. Raises `FtcommError` when a job fails or stands still; no
    process is left, however this ends."""
    plan = [(seed, kind) for seed in request.seeds for kind in request.kinds]
    trainings = [functools.partial(train, request, seed, kind) for seed, kind in plan]
    text = f"{len(plan)} trainings of {request.steps} steps"

    def on_run(run: Run) -> None:
        report.add(run)
        # Whichever came first: equal results look equal.
        report["runs"].sort(key=lambda one: (request.seeds.index(one.seed), request.kinds.index(one.kind)))
        report.save()

    await share_out(trainings, request.jobs, on_run, functools.partial(report.progress, text))


# -- for the terminal --------------------------------------------------------------------------------------------------


COLUMNS = (
    Column("kind", "", 11, lambda run: run.kind),
    Column("seed", "", 5, lambda run: str(run.seed)),
    Column("steps", "", 6, lambda run: str(run.steps)),
    Column("kills", "", 6, lambda run: str(run.kills)),
    Column("absent", "", 7, lambda run: f"{run.absent:.1%}"),
    Column("lost", "", 5, lambda run: str(run.lost)),
    Column("equal", "", 6, lambda run: "yes" if run.equal else "NO"),
    Column("loss", "", 8, lambda run: f"{run.final:.4f}"),
    Column("s", "", 6, lambda run: f"{run.seconds:.0f}"),
)


def comparison_line(one: Comparison) -> str:
    said = "within" if one.within else "OUTSIDE"
    return (
        f"# {one.kind}: {one.loss:.4f}, {one.reference}: {one.loss_reference:.4f}, {one.difference:+.4f}; "
        f"spread over {one.seeds} seeds {one.spread:.4f} "
        f"(deviations {one.deviation:.4f}, {one.deviation_reference:.4f}): {said}"
    )


def faults(runs: Sequence[Run]) -> list[str]:
    """Returns what was not kept, for people."""
    return [
        f"# {run.kind}, seed {run.seed}: {run.lost} steps lost, {run.discarded} discarded, {run.disputed} disputed, "
        f"{run.deaths} deaths of {run.kills} kills, final states {'equal' if run.equal else 'DIFFER'}"
        for run in runs
        if not run.kept
    ]


def experiment(
    name: str,
    request: type,
    measure: Callable[[Any, BenchReport], Any],
    draw: Callable[[Sequence[Run], Path], None],
) -> Experiment:
    def compared(report: BenchReport) -> tuple[list[Comparison], list[Comparison]]:
        found: tuple[list[Comparison], list[Comparison]] = report.request.compare(report["runs"])
        return found

    return Experiment(
        name,
        request,
        measure,
        [Table("runs", Run, COLUMNS)],
        summary=lambda report: {"comparisons": [one for some in compared(report) for one in some]},
        footer=lambda report: [*map(comparison_line, itertools.chain(*compared(report))), *faults(report["runs"])],
        good=lambda report: all(run.kept for run in report["runs"]) and all(c.within for c in compared(report)[0]),
        draw=lambda report, path: draw(report["runs"], path),
    )
