"""Describes events of the coordinator in plain English, for the launcher's own lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ftcomm.control.rank_name import rank_name


def describe(event: Mapping[str, Any]) -> str | None:
    """Returns one line, or None for an event that is only for the event log. Leaves unknown fields and kinds out."""
    kind = event["kind"]
    if kind == "view":
        return _view(event)
    if kind == "store":
        return str(event.get("text"))
    if kind == "suspect":
        by = event.get("by")
        return f"replica {event.get('replica')} is suspected{'' if by is None else f' by {by}'}: {event.get('reason')}"
    if kind == "removed":
        return f"replica {event.get('replica')} was removed, and its process may live: it ends when it hears of that"
    if kind == "refused":
        return f"somebody was refused: {event.get('reason')}"
    if kind == "stalled":
        who = rank_name(event.get("replica"), event.get("shard"))
        return f"{who} waits in op {event.get('op')} for replica {event.get('waiting')}"
    if kind in ("cut_off", "ended", "outdated"):
        return str(event.get("reason"))
    if kind == "not_removed":
        return f"replica {event.get('replica')} is not given up: {event.get('reason')}"
    if kind == "postponed":
        waits = "another one may hold the state of the training, and is waited for"
        return f"replica {event.get('replica')} is lost ({event.get('reason')}), and with it maybe the job: {waits}"
    if kind == "caught_up":
        return f"replica {event.get('replica')} has caught up at step {event.get('step')}"
    if kind == "training_pauses":
        few = f"{event.get('contributing')} of at least {event.get('least')} replicas contribute"
        return f"training pauses before step {event.get('step')}: {few}"
    if kind == "training_goes_on":
        return f"training goes on with step {event.get('step')} after {event.get('seconds')} s"
    if kind == "step_failed":
        who = rank_name(event.get("replica"), event.get("shard"))
        return f"{who} failed in step {event.get('step')}: {event.get('error')}"
    if kind == "step_discarded":
        done = "has no update" if event.get("decision") == "skip" else "is repeated"
        return f"step {event.get('step')} {done}, by vote"
    return None


def _view(event: Mapping[str, Any]) -> str:
    members = event.get("members", ())
    contributing = [member["replica"] for member in members if member["contributing"]]
    catching_up = [member["replica"] for member in members if not member["contributing"]]
    text = f"view {event.get('epoch')}"
    if event.get("step") is not None:
        text += f" from step {event['step']}"
    text += f": {replicas(contributing) if contributing else 'nobody'}"
    if catching_up:
        text += f", and catching up {replicas(catching_up)}"
    return text + (f" ({event['why']})" if event.get("why") else "")


def counted(number: int, what: str) -> str:
    """Returns `1 step`, or `3 steps`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def replicas(numbers: Iterable[int]) -> str:
    """Returns `replica 2`, or `replicas 0, 2, 3`."""
    listed = sorted(numbers)
    return f"replica{'' if len(listed) == 1 else 's'} {', '.join(map(str, listed))}"
