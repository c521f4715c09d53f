"""`ftcomm bench overhead`: what fault tolerance costs while nothing fails, by taking it out of the same engine.

    off         an op returns as soon as this rank has its result; nobody looks how long ops take, or for signs of life
    stability   an op returns when all are known to hold it, which is what a survivor's result rests on
    detection   and detection: heartbeats, deadlines, who waits for whom
    ftcomm      and the flight recorder: who called what, when and from where. The product
    verify      and FTCOMM_VERIFY=1: all compare their results

What is taken out is taken out here, by subclasses that only this has: the product has no such switch. What sleeps
until a process ends is there in all five. Of the recorder two empty calls an op are left below `ftcomm`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from ftcomm.bench import collective
from ftcomm.bench.collective import CollectiveRow, CollectiveTask, Contestant, measure_sizes
from ftcomm.bench.harness import INTS, SIZES, BenchReport, Column, Experiment, Table, option
from ftcomm.bench.recorder_share import RecorderShare, recorder_share
from ftcomm.bench.stats import median
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import Pipeline
from ftcomm.collective.watchdog import Watchdog
from ftcomm.errors import FtcommError
from ftcomm.groups.calls import Work
from ftcomm.groups.group import Group
from ftcomm.recorder.recorder import GroupRecorder, RecordedCall

LEVELS = ("off", "stability", "detection", "ftcomm", "verify")
BIG, MOST_PCT = 1 << 20, 3.0  # of `ftcomm` over `off`: per cent from this size on
SMALL, MOST_US = 1 << 10, 1.0  # and microseconds at this one
RECORDER_US, RECORDER_PCT = 0.3, 0.5  # of the recorder alone, at SMALL and from BIG on
# s without a sign of life, and that an op may take: so long that nothing of either comes while we measure
QUIET = (("heartbeat_timeout", 3600.0), ("op_timeout", 100_000.0))


@dataclasses.dataclass(frozen=True)
class OverheadRequest:
    """Time all-reduces with fault tolerance taken out of the engine, and put back piece by piece.

    Levels: off; stability, an op returns when all are known to hold it; detection, and who holds an op up is found;
    ftcomm, and all is recorded, which is the product; verify, and FTCOMM_VERIFY=1. They take turns within each round;
    the differences to `off` are of the same round, and their median is shown, as is that between ftcomm and detection.
    Beside it stands which share of a step of the demo the recorder takes, in time of the processor. What is taken out
    is taken out by the bench: ftcomm has no switch for it.
    """

    sizes: Sequence[int] = option((1 << 10, 64 << 10, 1 << 20, 16 << 20), kind=SIZES)
    ranks: Sequence[int] = option((2,), kind=INTS, help="Processes.")
    iterations: int | None = option(
        None, "-n", "--iters", kind=click.INT, help="Timed ops in a round.", show="100 to 10, by size"
    )
    rounds: int = option(9, help="So many times one level after the other.")

    def smoke(self) -> OverheadRequest:
        """A few ops at 1K, to see that it runs."""
        return dataclasses.replace(self, sizes=(1 << 10,), rounds=2, iterations=5)

    @property
    def measured(self) -> Levels:
        return Levels(self.sizes, self.ranks, rounds=self.rounds, iterations=self.iterations, transports=("shm",))

    def check(self) -> None:
        self.measured.check()


class Levels(collective.CollectiveRequest):
    def contestants(self) -> list[Contestant]:
        return [
            Contestant("off", "shm", "ftcomm-quiet", options=QUIET),
            Contestant("stability", "shm", "ftcomm-quiet", options=QUIET),
            Contestant("detection", "shm", "ftcomm"),
            Contestant("ftcomm", "shm", "ftcomm"),
            Contestant("verify", "shm", "ftcomm-verify", (("FTCOMM_VERIFY", "1"),)),
        ]


class Cost(msgspec.Struct, frozen=True):
    """The cost of one level at one size, over that of the level before: medians over the rounds' differences."""

    level: str
    ranks: int
    bytes: int
    rounds: int
    time_us_p50: float
    over_off_us: float | None  # None for off itself
    over_off_pct: float | None
    round_over_off_us: list[float]
    wrong: int
    recorder_us: float | None = None  # of the recorder alone: `ftcomm` over `detection`
    recorder_pct: float | None = None

    @property
    def good(self) -> bool:
        """Whether fault tolerance costs no more than it may; of other levels and sizes in between nothing is asked."""
        if self.level != "ftcomm" or self.over_off_us is None or self.over_off_pct is None:
            return True
        if self.bytes >= BIG:
            return self.over_off_pct <= MOST_PCT
        return self.bytes > SMALL or self.over_off_us <= MOST_US


def costs(rows: Sequence[CollectiveRow]) -> list[Cost]:
    """Returns the costs of one size and place. Raises `ValueError` where a level failed."""
    by = {row.library: row for row in rows}
    found = []
    recorder: list[float] = []
    for level in LEVELS:
        row, off = by[level], by["off"]
        if row.time_us_p50 is None:
            raise ValueError(f"{level}: {row.error}")
        alone = level == "ftcomm"
        if alone:
            recorder = [a - b for a, b in zip(row.round_us, by["detection"].round_us, strict=True)]
        more = [a - b for a, b in zip(row.round_us, off.round_us, strict=True)]
        shares = [100 * (a / b - 1) for a, b in zip(row.round_us, off.round_us, strict=True)]
        found.append(
            Cost(
                level=level,
                ranks=row.ranks,
                bytes=row.bytes,
                rounds=row.rounds,
                time_us_p50=row.time_us_p50,
                over_off_us=None if level == "off" else median(more),
                over_off_pct=None if level == "off" else median(shares),
                round_over_off_us=[] if level == "off" else more,
                wrong=row.wrong,
                recorder_us=median(recorder) if alone else None,
                recorder_pct=100 * median(recorder) / row.time_us_p50 if alone else None,
            )
        )
    return found


async def measure(request: OverheadRequest, report: BenchReport) -> None:
    def on_rows(rows: list[CollectiveRow]) -> None:
        if rows[0].in_place:
            try:
                found = costs(rows)
            except ValueError as error:
                raise FtcommError(str(error)) from None
            for cost in found:
                report.add(cost)

    await measure_sizes(request.measured, rank, on_rows, report.progress, report.line)
    if importlib.util.find_spec("torch") is not None:  # which the demo needs
        report.progress("the recorder in a step", 1.0)
        report.add(recorder_share(request.rounds, request.iterations or 5000))


def _over_rounds(cost: Cost) -> str:
    over = cost.round_over_off_us
    return f"{min(over):.2f} to {max(over):.2f}" if over else ""


COLUMNS = (
    Column("size", "(B)", 9, lambda cost: str(cost.bytes)),
    Column("ranks", "", 5, lambda cost: str(cost.ranks)),
    Column("level", "", 10, lambda cost: cost.level),
    Column("p50", "(us)", 10, lambda cost: f"{cost.time_us_p50:.2f}"),
    Column("over off", "(us)", 10, lambda cost: "" if cost.over_off_us is None else f"{cost.over_off_us:.2f}"),
    Column("over off", "(%)", 9, lambda cost: "" if cost.over_off_pct is None else f"{cost.over_off_pct:.1f}"),
    Column("over rounds", "(us)", 19, _over_rounds),
    Column("recorder", "(us)", 9, lambda cost: "" if cost.recorder_us is None else f"{cost.recorder_us:.2f}"),
    Column("#wrong", "", 7, lambda cost: str(cost.wrong)),
)


def footer(costs: Sequence[Cost]) -> str:
    missed = [cost for cost in costs if not cost.good]
    alone = [cost for cost in costs if cost.recorder_us is not None]
    large = [f"{cost.recorder_pct:.2f}% at {cost.bytes}" for cost in alone if cost.bytes >= BIG]
    small = [f"{cost.recorder_us:.2f} us at {cost.bytes}" for cost in alone if cost.bytes == SMALL]
    recorder = f"; the recorder alone ({RECORDER_US:g} us, {RECORDER_PCT:g}%): {', '.join(small + large)}"
    said = f"fault tolerance on against off: {MOST_PCT:g}% at most from 1M on, {MOST_US:g} us at 1K"
    found = "OK" if not missed else f"missed at {', '.join(str(cost.bytes) for cost in missed)} bytes"
    return f"# {said}: {found}{recorder if small + large else ''}"


SHARE_COLUMNS = (
    Column("op", "(us)", 9, lambda share: f"{share.op_us:.2f}"),
    Column("phase", "(us)", 9, lambda share: f"{share.phase_us:.2f}"),
    Column("ops", "/step", 6, lambda share: str(share.ops_per_step)),
    Column("step", "(ms)", 9, lambda share: f"{share.step_ms:.1f}"),
    Column("recorder", "(%)", 9, lambda share: f"{share.share_pct:.3f}"),
)


def said_of_a_step(share: RecorderShare) -> str:
    found = "OK" if share.good else "missed"
    return f"# the recorder takes {RECORDER_PCT:g}% of a step at most; of the demo's {share.share_pct:.3f}%: {found}"


EXPERIMENT = Experiment(
    "overhead",
    OverheadRequest,
    measure,
    [Table("costs", Cost, COLUMNS), Table("shares", RecorderShare, SHARE_COLUMNS, late=True)],
    csv="costs",
    footer=lambda report: [footer(report["costs"]), *map(said_of_a_step, report["shares"])],
    good=lambda report: not any(cost.wrong for cost in report["costs"]),
)


# -- in a rank ---------------------------------------------------------------------------------------------------------


class Hasty(Pipeline):
    """Returns an op without knowing that the others hold it: right while no member is lost, wrong at the first loss."""

    def is_stable(self, op: Operation) -> bool:
        return 0 <= op.end <= self.taken


class Blind(Watchdog):
    """Does not know how long anything takes."""

    def returns(self, op: Operation) -> None:
        pass

    def waits(self, *wait: object) -> None:
        pass


def rank(task: CollectiveTask, job: str) -> None:
    collective.run(task, job, before_op=take_out)


class Unrecorded(GroupRecorder):
    """Records nothing."""

    def posted(self, op: RecordedCall, algorithm: str) -> None:
        pass

    def arrived(self, op: RecordedCall) -> None:
        pass


class Nameless(Group):
    """Does not know from where it is called."""

    def _carry_out(self, op: Operation, result: Any, finish: Callable[[], Any] | None, async_op: bool) -> Any:
        op.stamp, op.lag = self._when()
        if async_op:
            return self._carry_out_async(op, result, finish)
        self._turn.run(self._exchange.run, op)
        if op.error is None and finish is None:
            return result
        return Work(op, self._exchange, result, finish).wait()


def _nothing(op: RecordedCall, now: float) -> None:
    """Records nothing."""


_recording: list[Any] = []  # what the recorder of this rank does for each op


def record(group: Group, on: bool) -> None:
    """Let this rank record its ops, or not."""
    exchange: Any = group.internals.exchange
    recorder = exchange.member.watch.recorder
    if not _recording:
        _recording[:] = recorder.called, recorder.returned
    recorder.called, recorder.returned = _recording if on else (_nothing, _nothing)
    recorder.__class__ = GroupRecorder if on else Unrecorded
    group.__class__ = Group if on else Nameless


def take_out(group: Group, level: str) -> None:
    """Let ops of this rank run at that level from here on; all ranks must call it between the same two ops."""
    record(group, level in ("ftcomm", "verify"))
    exchange: Any = group.internals.exchange
    exchange.core.stream.pipeline.__class__ = Hasty if level == "off" else Pipeline
    exchange.member.watch.__class__ = Blind if level in ("off", "stability") else Watchdog
