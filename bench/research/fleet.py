"""Computes the share of time that a fleet trains, by how it recovers, and first whether the paper's numbers come out.

Before anything else, the paper's two figures are computed with its constants and by the same events as all else. The
paper has a failure every 18 minutes exactly, in a replica that is whole; failures that come at random, some of them
while others are recovered from, make other figures of the same constants, which are said beside them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np

from ftcomm.bench.harness import INTS, BenchReport, Column, Experiment, Table, option, require
from ftcomm.bench.plots import COLOURS, INK, MUTED, figure
from ftcomm.bench.research.fleet_facts import (
    AWAY,
    DAY,
    FAILURES,
    HOUR,
    FleetPipeline,
    check_replicas,
    ft_hsdp,
    ft_hsdp_at_best,
    restart,
)
from ftcomm.bench.research.fleet_measured import ftcomm_pipeline, newest, tenfold
from ftcomm.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
PAPER_GPUS, PAPER_REPLICAS = 98_304, 12
PAPER = {"restart": 0.44, "ft-hsdp": 0.80}  # effective training time
POINT = 0.01
RESAMPLES = 2000  # of the seeds, for an interval


@dataclasses.dataclass(frozen=True)
class FleetRequest:
    """Compute the share of time that up to 100,000 GPUs and more train, by discrete events.

    First the two figures of the paper (FT-HSDP, arXiv 2602.00277) from its constants; exits with 1 if one is off by
    more than a point. Then, with failures at random: a restart of everything, the paper's FT-HSDP, the same without
    the defects that it names, ftcomm with what `bench recovery`, `bench rejoin` and `bench control` have measured, and
    ftcomm with all of its stalls tenfold. Every constant is printed with its source.
    """

    recovery: Path | None = option(  # noqa: RUF009 - a field
        None, kind=EXISTING, help="JSON of `bench recovery`.", show="the newest in the bench's results"
    )
    rejoin: Path | None = option(  # noqa: RUF009
        None, kind=EXISTING, help="JSON of `bench rejoin`.", show="the newest in the bench's results"
    )
    control: Path | None = option(  # noqa: RUF009
        None, kind=EXISTING, help="JSON of `bench control`.", show="the newest in the bench's results"
    )
    gpus: Sequence[int] = option(
        (1000, 4000, 16_384, 32_768, 65_536, 98_304, 131_072), kind=INTS, help="Sizes of the fleet."
    )
    replicas: int = option(12, help="Into which it is divided.")
    failures: str = option("paper", kind=click.Choice(list(FAILURES)), help="How often a GPU fails.")
    days: float = option(14.0, help="Of each history.")
    seeds: int = option(20, help="Histories of each fleet.")
    checkpoint_minutes: float = option(
        0.0, "--checkpoint", kind=click.FLOAT, help="Minutes between those of a restart.", show="loses none"
    )

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be computed."""
        require("simpy", "dev")
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

    def pipelines(self, gpus: int) -> list[FleetPipeline]:
        given = {"recovery": self.recovery, "rejoin": self.rejoin, "control": self.control}
        ours = ftcomm_pipeline(gpus, self.replicas, *(path or _newest(name) for name, path in given.items()))
        return [
            restart(gpus, 60 * self.checkpoint_minutes),
            ft_hsdp(self.replicas),
            ft_hsdp_at_best(self.replicas),
            ours,
            tenfold(ours),
        ]


def _newest(name: str) -> Path:
    path = newest(name)
    if path is None:
        raise SettingsError(f"there is no result of `ftcomm bench {name}`; measure it, then --{name} FILE.")
    return path


class PaperFigure(msgspec.Struct, frozen=True):
    """A figure of the paper."""

    pipeline: str
    paper: float
    found: float  # with a failure every 18 minutes exactly, as the paper computes
    at_random: float  # the same constants, every 18 minutes on average

    @property
    def good(self) -> bool:
        return abs(self.found - self.paper) <= POINT


class FleetRow(msgspec.Struct, frozen=True):
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


def check_paper(seeds: int = 20) -> list[PaperFigure]:
    """The figures of the paper, from its constants."""
    from ftcomm.bench.research.fleet_events import Fleet, at_random, evenly

    interval = FAILURES["paper"].interval(PAPER_GPUS)
    found = []
    for pipeline in (restart(PAPER_GPUS), ft_hsdp(PAPER_REPLICAS)):
        whole = Fleet(pipeline, evenly(interval, PAPER_REPLICAS)).run(interval * PAPER_REPLICAS * 10)
        shares = [Fleet(pipeline, at_random(interval, seed)).run(7 * DAY) for seed in range(seeds)]
        found.append(PaperFigure(pipeline.name, PAPER[pipeline.name], whole, float(np.mean(shares))))
    return found


def simulate_fleet(
    request: FleetRequest, on_row: Callable[[FleetRow], None], progress: Callable[[str, float], None]
) -> None:
    """All pipelines at all sizes, each through the same failures; the seeds are 0, 1, 2 ..."""
    from ftcomm.bench.research.fleet_events import Fleet, at_random

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
                FleetRow(
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


def check_lines(checks: Sequence[PaperFigure]) -> list[str]:
    lines = ["# the paper's figures from the paper's constants, by the same events as what follows:"]
    for check in checks:
        verdict = "OK" if check.good else "FAILED"
        lines.append(
            f"#   {check.pipeline:<10} paper {check.paper:.0%}, here {check.found:.1%} {verdict}; "
            f"with failures at random {check.at_random:.1%}"
        )
    return lines


def constant_lines(pipelines: Sequence[FleetPipeline]) -> list[str]:
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


def _interval(row: FleetRow) -> str:
    return f"{row.interval_s / 60:.1f} min" if row.interval_s < HOUR else f"{row.interval_s / HOUR:.1f} h"


COLUMNS = (
    Column("GPUs", "", 7, lambda row: str(row.gpus)),
    Column("pipeline", "", 16, lambda row: row.pipeline),
    Column("a failure every", "", 16, _interval),
    Column("stall", "", 9, lambda row: f"{row.stall_s:.2f} s"),
    Column("away", "", 9, lambda row: f"{row.away_s:.0f} s"),
    Column("effective time, with 95 %", "", 27, lambda row: f"{row.effective:.2%} ({row.low:.2%} to {row.high:.2%})"),
)


def measure(request: FleetRequest, report: BenchReport) -> None:
    pipelines = report.more["pipelines"] = request.pipelines(max(request.gpus))
    checks = report.more["checks"] = check_paper()
    report.line(*check_lines(checks))
    if not all(check.good for check in checks):
        raise click.exceptions.Exit(1)
    report.line(f"# constants, at {max(request.gpus)} GPUs:", *constant_lines(pipelines))
    simulate_fleet(request, report.add, report.progress)


# -- the picture: effective time by the size of the fleet, and by the length of a stall --------------------------------


LOOK = {
    "restart": (COLOURS["restart"], "-", "everything restarts"),
    "ft-hsdp": (COLOURS["gloo"], "-", "FT-HSDP"),
    "ft-hsdp, mended": (COLOURS["gloo"], "--", "FT-HSDP, mended"),
    "ftcomm": (COLOURS["ftcomm"], "-", "ftcomm"),
    "ftcomm, x10": (COLOURS["ftcomm"], "--", "ftcomm, all stalls x10"),
}


def expected(stall: float, away: float, interval: float, replicas: int) -> float:
    """Share of useful time with failures at random: no failure for `stall` seconds, nor of a replica for `away`."""
    return math.exp(-stall / interval) * math.exp(-max(away - stall, 0.0) / interval / replicas)


def draw(rows: Sequence[FleetRow], path: Path) -> None:
    """Write `path` in both formats."""
    source = FAILURES[rows[0].failures].source
    subtitle = (
        f"Failures as in {source}, at random. {rows[0].days:g} days, {rows[0].seeds} histories, 95 % bands. "
        "A replica is back after ten minutes."
    )
    with figure(path, "The share of time that a fleet trains", subtitle, (12, 5.4)) as drawn:
        left, right = drawn.subplots(1, 2, width_ratios=(1.35, 1))
        sizes = sorted({row.gpus for row in rows})
        for name, (colour, style, label) in LOOK.items():
            mine = sorted((row for row in rows if row.pipeline == name), key=lambda row: row.gpus)
            x, y = [row.gpus for row in mine], [100 * row.effective for row in mine]
            left.plot(x, y, style, color=colour, marker="o", markersize=3.5, label=label)
            left.fill_between(x, [100 * r.low for r in mine], [100 * r.high for r in mine], color=colour, alpha=0.18)
        if rows[0].failures == "paper":
            for name, share in PAPER.items():
                left.plot(PAPER_GPUS, 100 * share, "D", color=LOOK[name][0], markerfacecolor="white", markersize=7)
            left.plot(
                [], [], "D", color=MUTED, markerfacecolor="white", label="the paper, a failure every 18 min exactly"
            )
        left.set_xscale("log")
        left.set_xticks(sizes, [_thousands(gpus) for gpus in sizes])
        left.minorticks_off()
        left.set_xlabel("GPUs")
        left.set_ylabel("effective training time (%)")
        left.set_title("By the size of the fleet")
        left.legend(loc="lower left")
        _by_stall(right, [row for row in rows if row.gpus == min(sizes, key=lambda gpus: abs(gpus - PAPER_GPUS))])


def _by_stall(axes: Axes, rows: Sequence[FleetRow]) -> None:
    interval, replicas = rows[0].interval_s, max(row.replicas for row in rows)
    stalls = [10 ** (exponent / 20) for exponent in range(-40, 57)]
    for away, style in ((AWAY.value, "-"), (AWAY.value / 10, ":")):
        curve = [100 * expected(stall, away, interval, replicas) for stall in stalls]
        axes.plot(stalls, curve, style, color=MUTED, label=f"a replica is away for {away / 60:g} min")
    for row in rows:
        if row.replicas > 1:
            colour, _, label = LOOK[row.pipeline]
            axes.plot(row.stall_s, 100 * row.effective, "o", color=colour, markersize=6)
            axes.annotate(
                f"{label}, {row.stall_s:.2g} s" if row.stall_s < 10 else f"{label}, {row.stall_s:.0f} s",
                (row.stall_s, 100 * row.effective),
                xytext=(-2, 16) if row.pipeline == "ftcomm" else (-8, -4),
                textcoords="offset points",
                ha="right",
                va="top",
                color=colour,
                fontsize=9,
            )
    axes.set_xscale("log")
    axes.set_xlabel("seconds for which a failure stops everybody")
    axes.set_title(f"By the stall, at {rows[0].gpus:,} GPUs in {replicas} replicas", color=INK)
    axes.legend(loc="lower left")


def _thousands(gpus: int) -> str:
    return f"{gpus // 1024}K" if gpus % 1024 == 0 else f"{gpus / 1000:g}K"


def _draw(report: BenchReport, path: Path) -> None:
    if report["rows"]:
        draw(report["rows"], path)


EXPERIMENT = Experiment(
    "fleet", FleetRequest, measure, [Table("rows", FleetRow, COLUMNS, late=True)], csv="rows", draw=_draw
)
