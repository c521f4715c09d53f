"""Loss against step, disturbed beside undisturbed, one column for each way of disturbing; the end again in large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcomm.bench.convergence import UNDISTURBED, Run, compare
from ftcomm.errors import SettingsError
from ftcomm.hsdp.rate import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CALM, DISTURBED, INK, FAINT = "#2f6fb0", "#d9601a", "#22262b", "#c9ced6"
STYLES = ("-", (0, (5, 2)), (0, (1, 1.4)))  # of seeds, in turn
LATE = 0.6  # the lower row begins here
STYLE: dict[str, Any] = {
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
    "svg.hashsalt": "ftcomm",  # equal data, equal file
}


def check_plots(paths: Sequence[Path]) -> None:
    """Raise `SettingsError`, with the mend, before hours are spent on what cannot be drawn."""
    if not paths:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingsError("--plot needs matplotlib; install it with: pip install 'ftcomm[plot]'") from None
    for path in paths:
        if path.suffix not in (".png", ".svg"):
            raise SettingsError(f"--plot {path}: expected a name that ends with .png or .svg.")
        if not path.absolute().parent.is_dir():
            raise SettingsError(f"--plot {path}: there is no such folder.")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write an image; its format follows the name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(run.kind for run in runs if run.kind != UNDISTURBED)) or [UNDISTURBED]
    words = {one.kind: one for one in compare(runs)}
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(
            2,
            len(kinds),
            figsize=(max(8.0, 4.6 * len(kinds)), 7.2),
            dpi=150,
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        for column, kind in enumerate(kinds):
            shown = [run for run in runs if run.kind in (UNDISTURBED, kind)]
            whole, late = rows[0][column], rows[1][column]
            for axes in (whole, late):
                _lines(axes, shown)
            _kills(whole, shown)
            title = _name(kind)
            if kind in words:
                one = words[kind]
                title += f"\n{one.difference:+.4f} in the end, spread over seeds {one.spread:.4f}"
            whole.set_title(title, fontsize=10)
            _close_up(late, shown)
            late.set_xlabel("step")
        rows[0][0].set_ylabel("held-out loss, nats a byte")
        rows[1][0].set_ylabel("the same, from where it is flat")
        for axes in rows[0]:
            axes.legend(loc="upper right")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


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
    """Strokes along the bottom, a row for each seed."""
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
