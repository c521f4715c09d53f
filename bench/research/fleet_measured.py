"""ftcomm's own pipeline for `ftcomm bench fleet`: from what `bench recovery`, `bench rejoin` and `bench control` have
measured.

What was measured was measured on one machine among few processes. What is different in a fleet is added as a constant
whose source says "assumed"; that each is far from mattering is shown by the pipeline that has all of them tenfold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.research.fleet_facts import AWAY, SILENT, STEP, Constant, FleetPipeline
from ftcomm.control.timeouts import Timeouts
from ftcomm.errors import SettingsError

RESULTS = Path(__file__).parents[1] / "results"
LOSSES = ("rank", "host", "replica")  # faults of `bench control` after which all that survive hear of a view


def newest(command: str, folder: Path = RESULTS) -> Path | None:
    """The newest result of `ftcomm bench COMMAND` that is kept beside the bench; their names begin with the date."""
    return max(folder.glob(f"*-{command}-cpu.json"), default=None)


def ftcomm_pipeline(gpus: int, replicas: int, recovery: Path, rejoin: Path, control: Path) -> FleetPipeline:
    """Returns the pipeline of a fleet whose recoveries and rejoins take as long as measured, and whose leaders take as
    long for each of their ranks as those of `control`. Raises `SettingsError` on files that are no such results."""
    each = _seconds_per_rank(control)
    events = _list(recovery, "events", "recovery")
    rejoins = _list(rejoin, "rejoins", "rejoin")
    try:
        stalls = tuple(sorted(event["stall_ms"] / 1e3 for event in events if _ours(event)))
        share = max(max(one["stalls"].values(), default=0.0) / one["step"] for one in rejoins)
    except (KeyError, TypeError) as error:
        raise SettingsError(f"an event in {recovery} or {rejoin} lacks {error}; measure them again.") from None
    if not stalls:
        raise SettingsError(f"{recovery} has no kills; measure them with: ftcomm bench recovery --json {recovery}")
    return FleetPipeline(
        "ftcomm",
        replicas,
        stall=(
            Constant(
                "all ranks hear of the view",
                each * gpus / replicas,
                "s",
                f"{1e6 * each:.0f} us of a leader for each of its ranks, the worst in {control.name}",
            ),
            Constant("the same between hosts", 0.001, "s", "assumed: a millisecond of network, all in all"),
        ),
        away=(
            AWAY,
            Constant("catch-up", STEP.value, "s", f"a step, the time that {STEP.source} gives a state to come"),
        ),
        rejoin=(Constant("snapshot for who comes back", share * STEP.value, "s", f"the worst in {rejoin.name}"),),
        stalls=stalls,
        silent_share=SILENT.value,
        silence=Timeouts.derive().heartbeat,
        step=STEP.value,
    )


def tenfold(pipeline: FleetPipeline) -> FleetPipeline:
    """All that makes others wait ten times as long, measured or assumed."""

    def more(parts: tuple[Constant, ...]) -> tuple[Constant, ...]:
        return tuple(msgspec.structs.replace(part, value=10 * part.value) for part in parts)

    return msgspec.structs.replace(
        pipeline,
        name=f"{pipeline.name}, x10",
        stall=more(pipeline.stall),
        rejoin=more(pipeline.rejoin),
        stalls=tuple(10 * seconds for seconds in pipeline.stalls),
        silence=10 * pipeline.silence,
    )


def _seconds_per_rank(control: Path) -> float:
    """Returns the seconds of a processor that the busiest leader took after the worst loss, for each of its ranks."""
    costs = _list(control, "costs", "control")
    try:
        ranks = msgspec.json.decode(control.read_bytes())["request"]["ranks"]
        worst = max(cost["cpu"] for cost in costs if cost["what"] in LOSSES and cost["part"] == "busiest leader")
        return float(worst / ranks)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SettingsError(
            f"{control} has no cost of a leader after a loss ({type(error).__name__}: {error}); measure it again with: "
            f"ftcomm bench control --json {control}"
        ) from None


def _ours(event: dict[str, Any]) -> bool:
    """Whether a result of `bench recovery`, which runs the peers too, says it of ftcomm after a kill."""
    return event.get("library", "ftcomm") == "ftcomm" and event.get("fault", "kill") == "kill"


def _list(path: Path, name: str, command: str) -> list[dict[str, Any]]:
    try:
        found = msgspec.json.decode(path.read_bytes())[name]
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{path} is no result of `ftcomm bench {command} --json FILE` ({type(error).__name__}: {error}); "
            f"name one by --{command}, or measure it."
        ) from None
    if not isinstance(found, list) or not found:
        raise SettingsError(f"{path} has no {name}; measure it again with: ftcomm bench {command} --json {path}")
    return found
