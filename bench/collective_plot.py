"""The picture of a collective: time and bus bandwidth by size, a row of axes for each number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftcomm.bench.collective import Row
from ftcomm.bench.plots import COLOURS, INK, MUTED, figure
from ftcomm.bench.sizes import format_size
from ftcomm.bench.table import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ("-", "--", ":", "-.")


def draw(rows: Sequence[Row], header: Mapping[str, str | int | float], path: Path) -> None:
    """Write `path` in both formats. In place where the collective has that, else out of place."""
    shown = [row for row in rows if row.time_us_p50 is not None and row.in_place == rows[-1].in_place]
    everybody = sorted({row.ranks for row in shown})
    place = "in place" if shown[0].in_place else "out of place"
    subtitle = (
        f"{shown[0].dtype}, {place}, {header['cpu']} with {header['cores']} cores, torch {header['torch']}, "
        f"{str(header['date'])[:10]}. Median of {max(row.rounds for row in shown)} rounds, bars from least to most."
    )
    names = list(dict.fromkeys(label(row) for row in shown))
    with figure(path, f"{shown[0].op} beside its peers", subtitle, (11, 1.0 + 3.6 * len(everybody))) as drawn:
        grid = drawn.subplots(len(everybody), 2, squeeze=False)
        for (left, right), ranks in zip(grid, everybody, strict=True):
            own = 0
            for name in names:
                mine = sorted(
                    (row for row in shown if row.ranks == ranks and label(row) == name), key=lambda r: r.bytes
                )
                if not mine:
                    continue
                style = STYLES[own % len(STYLES)] if mine[0].library == "ftcomm" else "-"
                own += mine[0].library == "ftcomm"
                _line(left, mine, name, style, lambda us, row: us)
                _line(right, mine, name, style, lambda us, row: row.busbw_gbps * row.time_us_p50 / us)
            _axes(left, f"{ranks} ranks: time of an op", "us", shown)
            _axes(right, f"{ranks} ranks: bus bandwidth", "GB/s", shown)
            left.legend(loc="upper left")


def _line(axes: Axes, rows: Sequence[Row], name: str, style: str, value) -> None:  # type: ignore[no-untyped-def]
    x = [row.bytes for row in rows]
    y = [value(row.time_us_p50, row) for row in rows]
    ends = [sorted((value(min(row.round_us), row), value(max(row.round_us), row))) for row in rows]
    bars = [[middle - low for middle, (low, _) in zip(y, ends, strict=True)]]
    bars += [[high - middle for middle, (_, high) in zip(y, ends, strict=True)]]
    colour = COLOURS.get(rows[0].library, INK)
    axes.errorbar(
        x, y, yerr=bars, fmt=style, marker="o", markersize=4, color=colour, label=name, elinewidth=1, alpha=0.9
    )


def _axes(axes: Axes, title: str, unit: str, rows: Sequence[Row]) -> None:
    sizes = sorted({row.bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], fontsize=8.5)
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel("size of the array", color=MUTED)
