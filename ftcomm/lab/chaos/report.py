"""The report of `ftcomm chaos`: a table by kind, the leaks, and everything as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from ftcomm.errors import SettingsError
from ftcomm.lab.chaos.leaks import LIMITS, WARM_UP
from ftcomm.lab.chaos.plan import KINDS
from ftcomm.lab.chaos.record import FaultRecord
from ftcomm.lab.chaos.run import ChaosOutcome


@dataclasses.dataclass(frozen=True)
class FaultRow:
    """One kind of fault. Pairs are (p50, p99) in seconds; None where there is nothing to measure."""

    kind: str
    faults: int
    overlapped: int
    noticed: int
    removed: int
    over: int
    restarts: int
    detection: tuple[float, float] | None
    stall: tuple[float, float] | None
    gap: tuple[float, float] | None
    whole: tuple[float, float] | None  # until all contribute again


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: the least value that is not below `share` of all."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _pair(values: Sequence[float]) -> tuple[float, float] | None:
    return (percentile(values, 0.5), percentile(values, 0.99)) if values else None


def rows(records: Sequence[FaultRecord]) -> list[FaultRow]:
    found = []
    for kind in [*KINDS, "all"]:
        of = [record for record in records if kind in (record.fault.kind, "all")]
        if of:
            found.append(
                FaultRow(
                    kind,
                    faults=len(of),
                    overlapped=sum(x.overlapped for x in of),
                    noticed=sum(x.detected is not None for x in of),
                    removed=sum(bool(x.removed) for x in of),
                    over=sum(x.closed is not None for x in of),
                    restarts=sum(x.restarts for x in of),
                    detection=_pair([x.detection for x in of if x.detection is not None]),
                    stall=_pair([x.stall for x in of if x.stall is not None]),
                    gap=_pair([x.gap for x in of if x.gap]),
                    whole=_pair([x.closed - x.injected for x in of if x.closed is not None]),
                )
            )
    return found


def table(outcome: ChaosOutcome) -> Table:
    shown = Table(title=f"{len(outcome.ledger.records)} faults in {outcome.seconds:.0f} s, seed {outcome.options.seed}")
    shown.add_column("kind")
    for name in ("faults", "over", "overlapped", "noticed", "removed", "restarts"):
        shown.add_column(name, justify="right")
    for name in ("detection", "stall", "longest step", "until whole"):
        shown.add_column(f"{name}\np50 / p99, ms", justify="right")
    for row in rows(outcome.ledger.records):
        counts = (row.faults, row.over, row.overlapped, row.noticed, row.removed, row.restarts)
        times = (row.detection, row.stall, row.gap, row.whole)
        shown.add_row(row.kind, *map(str, counts), *map(_milliseconds, times))
    return shown


def leaks_table(outcome: ChaosOutcome) -> Table:
    shown = Table(title="growth a minute, with its standard error")
    shown.add_column("of the")
    for name in LIMITS:
        shown.add_column("memory, MB" if name == "memory" else name, justify="right")
    for who, slopes in outcome.leaks.slopes().items():
        shown.add_row(who, *(f"{x.growth:.2f} ± {x.error:.2f}" if x.samples > 1 else "-" for x in slopes.values()))
    return shown


def show(outcome: ChaosOutcome, console: Console) -> None:
    console.print(table(outcome))
    console.print(leaks_table(outcome))
    for line in outcome.ranks:
        console.print(line, highlight=False, markup=False)
    divergences, steps = len(outcome.ledger.divergences), max(outcome.ledger.steps.values(), default=0)
    console.print(f"divergence: {divergences or 'none'} reported; steps: {steps}")
    for failure in outcome.failures:
        console.print(f"FAILED: {failure}", style="bold red", markup=False)
    unsure = "; ".join(outcome.leaks.unsure())
    if unsure:
        text = f"leaks: too short to tell ({unsure}, from processes older than {WARM_UP:.0f} s, while the job is whole)"
        console.print(text, style="yellow", markup=False)
    if not outcome.failures:
        console.print(f"no hang, no divergence reported{'' if unsure else ', no leak'}", style="bold green")


def as_dict(outcome: ChaosOutcome) -> dict[str, Any]:
    return {
        "options": dataclasses.asdict(outcome.options),
        "job": msgspec.to_builtins(outcome.status),
        "seconds": outcome.seconds,
        "failures": outcome.failures,
        "kinds": [dataclasses.asdict(row) for row in rows(outcome.ledger.records)],
        "faults": [record.as_dict() for record in outcome.ledger.records],
        "innocent": outcome.ledger.innocent,
        "divergences": outcome.ledger.divergences,
        "steps": outcome.ledger.steps,
        "leaks": {
            who: {what: dataclasses.asdict(slope) for what, slope in slopes.items()}
            for who, slopes in outcome.leaks.slopes().items()
        },
        "leaks_unsure": outcome.leaks.unsure(),
        "samples": {
            str(pid): [dataclasses.astuple(sample) for sample in history]
            for pid, history in [*outcome.leaks.ranks.items(), ("launcher", outcome.leaks.launcher)]
        },
        "ranks": outcome.ranks,
        "events": outcome.events,
    }


def write(outcome: ChaosOutcome, path: Path) -> None:
    """Write the outcome as JSON. Raises `SettingsError`."""
    try:
        path.write_text(json.dumps(_finite(as_dict(outcome)), indent=1))
    except OSError as error:
        raise SettingsError(f"--report {path}: {error.strerror}; choose a file that you can write to.") from None


def _finite(value: Any) -> Any:
    """Returns None for an infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _milliseconds(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{1e3 * pair[0]:.0f} / {1e3 * pair[1]:.0f}"
