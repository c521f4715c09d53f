"""The faults of a run as a picture: a row for each replica, faults as bars from injection to the end, steps below."""

from __future__ import annotations

from pathlib import Path

from ftcomm.errors import SettingsError
from ftcomm.lab.chaos.plan import KINDS
from ftcomm.lab.chaos.run import ChaosOutcome

COLOURS = dict(
    zip(
        KINDS,
        ("#c8323c", "#8a6bb5", "#e0a030", "#2f6f9f", "#6fa8d0", "#5a4a3a", "#d06fa0", "#1f9e9e", "#8c1f28",
         "#3c8d5a", "#7fb069", "#205040", "#b07050", "#808080"),
        strict=True,
    )
)  # fmt: skip


def draw(outcome: ChaosOutcome, path: Path) -> None:
    """Write an image; its format follows the name. Raises `SettingsError`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingsError("--plot needs matplotlib; install it with: pip install 'ftcomm[plot]'") from None
    replicas = len(outcome.status.replicas)
    figure = Figure(figsize=(12, 1.2 + 0.5 * (replicas + 1)), layout="constrained")
    axes = figure.add_subplot()
    records = outcome.ledger.records
    start = records[0].injected if records else 0.0
    end = start + outcome.seconds
    for record in records:
        over = (end if record.closed is None else record.closed) - start
        begin = record.injected - start
        for row in record.fault.replicas or (replicas,):
            axes.barh(row, max(over - begin, 0.2), left=begin, height=0.6, color=COLOURS[record.fault.kind], alpha=0.7)
            if record.removed_at is not None:
                axes.plot([record.removed_at - start], [row], "|", color="black", markersize=14)
    for kind in dict.fromkeys(record.fault.kind for record in records):
        axes.barh(0, 0, color=COLOURS[kind], alpha=0.7, label=kind)
    axes.set_yticks([*range(replicas + 1)], [*(f"replica {number}" for number in range(replicas)), "coordinator"])
    axes.set_xlabel("seconds; a bar ends when all that were hit contribute again, a stroke is the view without them")
    axes.set_title(f"{len(records)} faults, seed {outcome.options.seed}")
    axes.invert_yaxis()
    if records:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--plot {path}: {error}; choose a file as in chaos.png.") from None
