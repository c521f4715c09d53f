"""`ftcomm bench fleet`: the share of time that a fleet trains, by how it recovers; and first, whether we can reckon.

Before anything else, the paper's two figures are reckoned with its constants and by the same events as all else. The
paper has a failure every 18 minutes exactly, in a replica that is whole; failures that come at random, some of them
while others are recovered from, make other figures of the same constants, which are said beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ftcomm.bench.fleet_events import Fleet, at_random, evenly
from ftcomm.bench.fleet_facts import (
    DAY,
    FAILURES,
    HOUR,
    Pipeline,
    check_replicas,
    ft_hsdp,
    ft_hsdp_at_best,
    restart,
)
from ftcomm.bench.fleet_measured import ftcomm_pipeline, tenfold
from ftcomm.errors import SettingsError

PAPER_GPUS, PAPER_REPLICAS = 98_304, 12
PAPER = {"restart": 0.44, "ft-hsdp": 0.80}  # effective training time
POINT = 0.01
RESAMPLES = 2000  # of the seeds, for an interval


@dataclasses.dataclass(frozen=True)
class Request:
    recovery: Path
    rejoin: Path
    gpus: Sequence[int] = (1000, 4000, 16_384, 32_768, 65_536, 98_304, 131_072)
    replicas: int = 12
    failures: str = "paper"
    days: float = 14.0
    seeds: int = 20
    checkpoint_minutes: float = 0.0

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be reckoned."""
        for gpus in self.gpus:
            check_replicas(gpus, self.replicas)
        if self.failures not in FAILURES:
            raise SettingsError(f"--failures {self.failures}: expected one of {', '.join(FAILURES)}.")
        if not 0 < self.days <= 365:
            raise SettingsError(f"--days {self.days:g}: expected more than 0, and 365 at most.")
        if not 2 <= self.seeds <= 1000:
            raise SettingsError(f"--seeds {self.seeds}: expected 2 to 1000; an interval needs several.")
        if self.checkpoint_minutes < 0:
            raise SettingsError(f"--checkpoint {self.checkpoint_minutes:g}: expected minutes, or 0 for no work lost.")

    def pipelines(self, gpus: int) -> list[Pipeline]:
        ours = ftcomm_pipeline(gpus, self.replicas, self.recovery, self.rejoin)
        return [
            restart(gpus, 60 * self.checkpoint_minutes),
            ft_hsdp(self.replicas),
            ft_hsdp_at_best(self.replicas),
            ours,
            tenfold(ours),
        ]


class Check(msgspec.Struct, frozen=True):
    """A figure of the paper."""

    pipeline: str
    paper: float
    found: float  # with a failure every 18 minutes exactly, as the paper reckons
    at_random: float  # the same constants, every 18 minutes on average

    @property
    def good(self) -> bool:
        return abs(self.found - self.paper) <= POINT


class Row(msgspec.Struct, frozen=True):
    """One pipeline at one size. Shares of 1; `low` to `high` holds the mean with 95 %, by bootstrap over seeds."""

    pipeline: str
    failures: str
    gpus: int
    replicas: int
    interval_s: float  # between two failures, on average
    stall_s: float  # of all, for a failure, on average
    away_s: float  # of the replica
    effective: float
    low: float
    high: float
    seeds: int
    days: float
    count: float  # failures in a history, on average


def check_paper(seeds: int = 20) -> list[Check]:
    """The figures of the paper, from its constants."""
    interval = FAILURES["paper"].interval(PAPER_GPUS)
    found = []
    for pipeline in (restart(PAPER_GPUS), ft_hsdp(PAPER_REPLICAS)):
        whole = Fleet(pipeline, evenly(interval, PAPER_REPLICAS)).run(interval * PAPER_REPLICAS * 10)
        shares = [Fleet(pipeline, at_random(interval, seed)).run(7 * DAY) for seed in range(seeds)]
        found.append(Check(pipeline.name, PAPER[pipeline.name], whole, float(np.mean(shares))))
    return found


def reckon(request: Request, on_row: Callable[[Row], None], progress: Callable[[str, float], None]) -> None:
    """All pipelines at all sizes, each through the same failures; the seeds are 0, 1, 2 ..."""
    done = 0
    for gpus in request.gpus:
        interval = FAILURES[request.failures].interval(gpus)
        for pipeline in request.pipelines(gpus):
            shares, counts = [], []
            for seed in range(request.seeds):
                fleet = Fleet(pipeline, at_random(interval, seed))
                shares.append(fleet.run(request.days * DAY))
                counts.append(fleet.count)
            done += 1
            progress(f"{gpus} GPUs: {pipeline.name}", done / (5 * len(request.gpus)))
            low, high = interval_of_mean(shares)
            on_row(
                Row(
                    pipeline=pipeline.name,
                    failures=request.failures,
                    gpus=gpus,
                    replicas=pipeline.replicas,
                    interval_s=interval,
                    stall_s=pipeline.mean_stall(),
                    away_s=pipeline.seconds("away"),
                    effective=float(np.mean(shares)),
                    low=low,
                    high=high,
                    seeds=request.seeds,
                    days=request.days,
                    count=float(np.mean(counts)),
                )
            )


def interval_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap: the middle 95 % of the means of as many values, drawn from these with repetition."""
    drawn = np.random.default_rng(0).choice(np.array(values), (RESAMPLES, len(values)))
    low, high = np.percentile(drawn.mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


# -- for the terminal --------------------------------------------------------------------------------------------------


def check_lines(checks: Sequence[Check]) -> list[str]:
    lines = ["# the paper's figures from the paper's constants, by the same events as what follows:"]
    for check in checks:
        verdict = "OK" if check.good else "FAILED"
        lines.append(
            f"#   {check.pipeline:<10} paper {check.paper:.0%}, here {check.found:.1%} {verdict}; "
            f"with failures at random {check.at_random:.1%}"
        )
    return lines


def constant_lines(pipelines: Sequence[Pipeline]) -> list[str]:
    """Every constant, once for each pipeline that has it."""
    lines = []
    for pipeline in pipelines:
        lines.append(
            f"# {pipeline.name}: {pipeline.replicas} lost one by one" if pipeline.replicas > 1 else "# restart"
        )
        for kind in ("stall", "away", "rejoin"):
            for part in getattr(pipeline, kind):
                lines.append(f"#   {kind:>6} {part.value:>8.3f} {part.unit}  {part.name} ({part.source})")
        if pipeline.stalls:
            low, high = min(pipeline.stalls), max(pipeline.stalls)
            lines.append(f"#    stall {low:>8.3f} to {high:.3f} s, drawn of {len(pipeline.stalls)} measured kills")
            lines.append(f"#   silent {pipeline.silent_share:>8.1%} of failures: {pipeline.silence:g} s until heard of")
    return lines


def heading() -> list[str]:
    names = f"#{'GPUs':>8} {'pipeline':>16} {'a failure every':>16} {'stall':>9} {'away':>9}"
    return [f"{names} {'effective time, with 95 %':>27}"]


def line(row: Row) -> str:
    every = f"{row.interval_s / 60:.1f} min" if row.interval_s < HOUR else f"{row.interval_s / HOUR:.1f} h"
    figure = f"{row.effective:.2%} ({row.low:.2%} to {row.high:.2%})"
    return f" {row.gpus:>8} {row.pipeline:>16} {every:>16} {row.stall_s:>7.2f} s {row.away_s:>7.0f} s {figure:>27}"
