"""The picture of `ftcomm bench fleet`: effective time by the size of the fleet, and by the length of a stall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftcomm.bench.fleet import PAPER, PAPER_GPUS, Row
from ftcomm.bench.fleet_facts import AWAY, FAILURES
from ftcomm.bench.plots import COLOURS, INK, MUTED, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def draw(rows: Sequence[Row], path: Path) -> None:
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


def _by_stall(axes: Axes, rows: Sequence[Row]) -> None:
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
