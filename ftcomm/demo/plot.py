"""The picture of a run: loss and throughput over time, with what happened to the killed replica marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftcomm.demo.story import Mark, Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REACH = 10  # values to either side over which a curve is smoothed
INK, FAINT, TRAIN, VALIDATION, RATE = "#22262b", "#c9ced6", "#2f6fb0", "#e07b24", "#3c8d5a"
MARKS = {"killed": "#c8323c", "resumed": "#c8323c", "rejoined": "#8a6bb5", "caught up": "#3c8d5a"}


def draw(story: Story, path: Path) -> None:
    """Write a PNG of 1500 x 990 pixels. Raises `ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#eef0f3",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        figure, (loss, rate) = plt.subplots(
            2, 1, sharex=True, figsize=(10, 6.6), dpi=150, gridspec_kw={"height_ratios": [2.1, 1], "hspace": 0.1}
        )
        _draw_loss(loss, story)
        _draw_rate(rate, story)
        _draw_marks(loss, rate, story)
        figure.subplots_adjust(left=0.08, right=0.975, top=0.79, bottom=0.085)
        figure.text(0.08, 0.945, "A training that loses a replica and goes on", fontsize=15, weight="bold")
        figure.text(0.08, 0.925, _subtitle(story), fontsize=10, color="#5c6570", va="top")
        figure.savefig(path)
        plt.close(figure)


def _draw_loss(axes: Axes, story: Story) -> None:
    losses = [(story.ended[step], value) for step, value in story.losses()]
    if losses:
        at, values = np.array(losses).T
        axes.plot(at, values, color=TRAIN, alpha=0.18, linewidth=0.8)
        axes.plot(at, smooth(values), color=TRAIN, linewidth=1.8, label="training, smoothed")
    points = [(story.ended[step], value) for step, value in sorted(story.validation.items()) if step in story.ended]
    if points:
        axes.plot(
            *np.array(points).T,
            "o",
            color=VALIDATION,
            markersize=4.5,
            clip_on=False,
            zorder=3,
            label="validation (files held out)",
        )
    axes.set_ylabel("loss, nats a byte")
    axes.legend(loc="upper right", frameon=True, facecolor="white", edgecolor="none", framealpha=1.0)


def _draw_rate(axes: Axes, story: Story) -> None:
    end = max((at for at, _ in story.tokens), default=1.0)
    grid, cell = np.arange(0.0, end, 0.05), 0.05
    counts, _ = np.histogram(
        [at for at, _ in story.tokens], bins=[*grid, grid[-1] + cell], weights=[n for _, n in story.tokens]
    )
    half = min(20, (len(grid) - 1) // 4)  # cells, so a triangle of up to 2 seconds
    kernel = 1 - np.abs(np.arange(-half, half + 1)) / (half + 1)
    thousands = np.convolve(counts, kernel / kernel.sum(), "same") / cell / 1000
    inside = slice(half, len(grid) - half)  # nearer to the ends a part of the triangle is empty
    axes.plot(grid[inside], thousands[inside], color=RATE, linewidth=1.4)
    axes.fill_between(grid[inside], thousands[inside], color=RATE, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("thousand tokens / s")
    axes.set_xlabel("seconds since the first step")
    axes.set_xlim(0, end)


def _draw_marks(loss: Axes, rate: Axes, story: Story) -> None:
    """Lines through both panels; the labels stand above the upper one, each on the lowest line that has room."""
    marks = [mark for mark in story.marks if mark.kind != "resumed"]
    end = loss.get_xlim()[1]
    for axes in (loss, rate):
        for mark in marks:
            axes.axvline(mark.at, color=MARKS[mark.kind], linewidth=1.2, linestyle=(0, (4, 2)))
        if len(marks) > 1:
            axes.axvspan(marks[0].at, marks[-1].at, color=MARKS["killed"], alpha=0.045, linewidth=0)
    taken: list[float] = []  # per line of labels: where it is free from
    for mark in marks:
        text = _label(mark, story)
        width = 0.0083 * end * len(text)
        left = min(mark.at, end - width)
        row = next((row for row, free in enumerate(taken) if free < left), len(taken))
        taken[row : row + 1] = [left + width]
        loss.annotate(
            text,
            (left, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 5 + 15 * row),
            textcoords="offset points",
            color=MARKS[mark.kind],
            fontsize=9.5,
            weight="bold",
        )


def _label(mark: Mark, story: Story) -> str:
    if mark.kind == "killed" and (resumed := story.resume_ms()) is not None:
        return f"{mark.text}, all-reduce resumed after {resumed:.0f} ms"
    return mark.text


def _subtitle(story: Story) -> str:
    text = f"{len(story.replicas)} replicas, {story.total} steps"
    if story.victim is not None:
        text += f"; replica {story.victim} was killed inside an all-reduce, which the others finished"
    if story.recorded is not None:
        found = story.recorded
        text += f"\nrecorded as: {found.cause.detail}, {found.gpu_seconds:.2f} GPU-s"
        text += f"; it was in {story.victim_in}" if story.victim_in else ""
    if story.equal():
        text += f"; final weights equal on all: {next(iter(story.hashes.values()))[:8]}"
    return text


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns means over `REACH` values to either side, fewer near the ends (as many on one side as on the other)."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    place = np.arange(len(values))
    reach_here = np.minimum(REACH, np.minimum(place, len(values) - 1 - place))
    means: np.ndarray = (sums[place + reach_here + 1] - sums[place - reach_here]) / (2 * reach_here + 1)
    return means
