"""What a training that was disturbed came to, beside the same undisturbed: for `ftcomm bench accuracy` and
`ftcomm bench hsdp`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import os
import signal
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.harness import Column, Experiment, Report, Table
from ftcomm.bench.job import Tail
from ftcomm.bench.research.convergence_rank import (
    LOOK,
    PATIENCE,
    Ended,
    Ready,
    Record,
    Settled,
    Validated,
    diary_path,
    stack_path,
)
from ftcomm.bench.research.forked import ForkedJob
from ftcomm.errors import FtcommError
from ftcomm.training import Verdict

UNDISTURBED = "undisturbed"


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
    beside: str  # the other kind
    seeds: int
    loss: float  # mean
    loss_beside: float
    difference: float  # of the means
    deviation: float  # standard deviation over the seeds (n - 1)
    deviation_beside: float
    spread: float  # largest minus smallest over the seeds, the larger of the two kinds
    paired: list[float]  # differences of each seed, whose runs begin with equal weights

    @property
    def within(self) -> bool:
        """Whether the kinds differ by less than the seeds do."""
        return abs(self.difference) <= self.spread


def compare(runs: Sequence[Run], beside: str = UNDISTURBED) -> list[Comparison]:
    """Each kind with the one that is named, if both have at least two seeds in common. Pure."""
    finals: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        if not math.isnan(run.final):
            finals[run.kind][run.seed] = run.final
    other = finals.pop(beside, {})
    found = []
    for kind, of_seed in finals.items():
        seeds = sorted(other.keys() & of_seed.keys())
        if len(seeds) < 2:
            continue
        before, after = [other[seed] for seed in seeds], [of_seed[seed] for seed in seeds]
        found.append(
            Comparison(
                kind=kind,
                beside=beside,
                seeds=len(seeds),
                loss=statistics.fmean(after),
                loss_beside=statistics.fmean(before),
                difference=statistics.fmean(after) - statistics.fmean(before),
                deviation=statistics.stdev(after),
                deviation_beside=statistics.stdev(before),
                spread=max(max(losses) - min(losses) for losses in (before, after)),
                paired=[b - a for a, b in zip(before, after, strict=True)],
            )
        )
    return found


def summary(records: Sequence[Record], replicas: int, ranks: int, steps: int, windows: int, **other: Any) -> Run:
    """What the ranks wrote down, as a `Run`. Pure."""
    settled = [record for record in records if isinstance(record, Settled)]
    outcomes: dict[int, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    lives: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for record in settled:
        outcomes[record.step].add((record.verdict, record.counted))
        lives[record.replica, record.rank, record.pid].append(record.step)
    done = {step for step, told in outcomes.items() if any(verdict == Verdict.COMMIT.name for verdict, _ in told)}
    gaps = sum(b - a != 1 for steps_of in lives.values() for a, b in itertools.pairwise(steps_of))
    counted = {step: max(len(who) for _, who in told) for step, told in outcomes.items()}
    ends = [record for record in records if isinstance(record, Ended)]
    digests = [{end.digest for end in ends if end.rank == rank} for rank in range(ranks)]
    return Run(
        steps=steps,
        absent=1 - sum(counted.values()) / (steps * replicas),
        lost=len(set(range(steps)) - done),
        discarded=sum(verdict != Verdict.COMMIT.name for told in outcomes.values() for verdict, _ in told),
        disputed=sum(len(told) > 1 for told in outcomes.values()) + gaps,
        equal=len(ends) == replicas * ranks and all(len(found) == 1 for found in digests),
        validation=curve(records, windows),
        **other,
    )


def curve(records: Sequence[Record], windows: int) -> list[tuple[int, float]]:
    """(step, loss) where the shares of all who were to take one are there: none of them was killed just then. Pure."""
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


class Follower:
    """Reads what the ranks of a running job write down, and gives up when nothing happens any more."""

    def __init__(self, job: ForkedJob, folder: str, replicas: int, ranks: int) -> None:
        self._job, self._folder = job, folder
        self._places = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
        self._tail: Tail[Any] = Tail([diary_path(folder, *place) for place in self._places], Record)  # type: ignore
        self.records: list[Record] = []
        self.last: Settled | None = None  # of the newest step
        self.short = -1  # newest step that not all have contributed to
        self.ready: dict[tuple[int, int], Ready] = {}  # of the newest process in each place
        self._replicas = replicas
        self._lengths: deque[float] = deque([0.0], maxlen=20)  # of the newest steps, seconds
        self._moved = time.monotonic()

    @property
    def usual(self) -> float:
        """Seconds of a step."""
        return statistics.median(self._lengths)

    async def until(self, what: str, true: Callable[[], bool], pause: float = LOOK) -> None:
        """Raises `FtcommError` if the job ends, or nothing happens for long, before that."""
        while not true():
            if not await self._job.runs(pause):
                raise FtcommError(f"the job ended before {what}")
            await self._read()

    async def end(self, steps: int, progress: Callable[[float], None]) -> None:
        """Until the job has ended by itself, after so many steps."""
        while await self._job.runs(0.25):
            await self._read()
            progress(self.last.step / steps if self.last else 0.0)
        await self._read()

    async def _read(self) -> None:
        new = self._tail.read()
        self.records += new
        for record in new:
            if isinstance(record, Settled) and (self.last is None or record.step > self.last.step):
                if self.last is not None and self.last.step == record.step - 1:
                    self._lengths.append(record.at - self.last.at)
                self.last = record
                if len(record.counted) < self._replicas:
                    self.short = record.step
                self._moved = time.monotonic()
            elif isinstance(record, Ready):
                self.ready[record.replica, record.rank] = record
                self._moved = time.monotonic()
        if time.monotonic() - self._moved > PATIENCE:
            raise FtcommError(f"nothing happened for {PATIENCE:g} s; last: {self.last}\n{await self._stacks()}")

    async def _stacks(self) -> str:
        """Where each rank stands, and what they said last."""
        for pid in self._job.pids().values():
            os.kill(pid, signal.SIGUSR1)
        await asyncio.sleep(1.0)  # they write it in a signal handler; there is nothing to wait for
        paths = [stack_path(self._folder, *place) for place in self._places]
        stacks = [f"{path.name}:\n{path.read_text()}" for path in paths if path.exists()]
        return "\n".join([*stacks, self._job.output()])


async def measure(request: Any, train: Callable[..., Awaitable[Run]], report: Report) -> None:
    """`train(request, seed, kind, progress)` for all of them. Raises `FtcommError` when a job fails or stands still; no
    process is left, however this ends."""
    plan = [(seed, kind) for seed in request.seeds for kind in request.kinds]
    trainings = [functools.partial(train, request, seed, kind) for seed, kind in plan]
    words = f"{len(plan)} trainings of {request.steps} steps"

    def on_run(run: Run) -> None:
        report.add(run)
        # Whichever came first: equal results look equal.
        report["runs"].sort(key=lambda one: (request.seeds.index(one.seed), request.kinds.index(one.kind)))
        report.save()

    await share_out(trainings, request.jobs, on_run, functools.partial(report.progress, words))


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
        f"# {one.kind}: {one.loss:.4f}, {one.beside}: {one.loss_beside:.4f}, {one.difference:+.4f}; "
        f"spread over {one.seeds} seeds {one.spread:.4f} "
        f"(deviations {one.deviation:.4f}, {one.deviation_beside:.4f}): {said}"
    )


def faults(runs: Sequence[Run]) -> list[str]:
    """What was not kept, for people."""
    return [
        f"# {run.kind}, seed {run.seed}: {run.lost} steps lost, {run.discarded} discarded, {run.disputed} disputed, "
        f"{run.deaths} deaths of {run.kills} kills, final states {'equal' if run.equal else 'DIFFER'}"
        for run in runs
        if not run.kept
    ]


def experiment(
    name: str,
    request: type,
    measure: Callable[[Any, Report], Any],
    draw: Callable[[Sequence[Run], Path], None],
) -> Experiment:
    def compared(report: Report) -> tuple[list[Comparison], list[Comparison]]:
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
