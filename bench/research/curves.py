"""Loss against step, disturbed beside undisturbed, one column for each way of disturbing; the end again in large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftcomm.bench.plots import COLOURS, OURS, figure
from ftcomm.bench.research.convergence import UNDISTURBED, Run, compare
from ftcomm.training.lr_scaling import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CALM, DISTURBED = COLOURS["gloo"], OURS
STYLES = ("-", (0, (5, 2)), (0, (1, 1.4)))  # of seeds, in turn
LATE = 0.6  # the lower row begins here


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write `path` in both formats."""
    kinds = list(dict.fromkeys(run.kind for run in runs if run.kind != UNDISTURBED)) or [UNDISTURBED]
    found = {one.kind: one for one in compare(runs)}
    title, subtitle = "What a training learns that was disturbed", "Held-out loss, nats a byte; strokes are kills."
    with figure(path, title, subtitle, (max(8.0, 4.6 * len(kinds)), 7.8)) as drawn:
        rows = drawn.subplots(2, len(kinds), sharey="row", squeeze=False)
        for column, kind in enumerate(kinds):
            shown = [run for run in runs if run.kind in (UNDISTURBED, kind)]
            whole, late = rows[0][column], rows[1][column]
            for axes in (whole, late):
                _lines(axes, shown)
            _kills(whole, shown)
            title = _name(kind)
            if kind in found:
                one = found[kind]
                title += f"\n{one.difference:+.4f} in the end, spread over seeds {one.spread:.4f}"
            whole.set_title(title, fontsize=10)
            _close_up(late, shown)
            late.set_xlabel("step")
        rows[0][0].set_ylabel("loss")
        rows[1][0].set_ylabel("the same, from where it is flat")
        for axes in rows[0]:
            axes.legend(loc="upper right")


def _lines(axes: Axes, runs: Sequence[Run]) -> None:
    seeds = list(dict.fromkeys(run.seed for run in runs))
    for run in runs:
        calm = run.kind == UNDISTURBED
        label = f"{_name(run.kind)}, seed {run.seed}"
        steps, losses = zip(*run.validation, strict=True) if run.validation else ((), ())
        style = STYLES[seeds.index(run.seed) % len(STYLES)]
        axes.plot(steps, losses, color=CALM if calm else DISTURBED, linestyle=style, linewidth=1.3, label=label)


def _name(kind: str) -> str:
    return f'killed, lr="{kind}"' if kind in POLICIES else kind


def _kills(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw strokes along the bottom, a row for each seed."""
    for row, run in enumerate(run for run in runs if run.killed_at):
        at = [0.015 + 0.03 * row] * len(run.killed_at)
        axes.plot(
            run.killed_at, at, "|", color=DISTURBED, markersize=5, transform=axes.get_xaxis_transform(), clip_on=False
        )


def _close_up(axes: Axes, runs: Sequence[Run]) -> None:
    steps = max((run.steps for run in runs), default=1)
    late = [loss for run in runs for step, loss in run.validation if step >= LATE * steps]
    axes.set_xlim(LATE * steps, steps)
    if late:
        margin = 0.05 * (max(late) - min(late)) + 1e-6
        low, high = axes.get_ylim() if axes.get_autoscaley_on() is False else (float("inf"), float("-inf"))
        axes.set_ylim(min(low, min(late) - margin), max(high, max(late) + margin))
