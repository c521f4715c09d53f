"""Puts ranks, times and lines into words."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ftcomm.control.rank_name import rank_name
from ftcomm.diagnosis.facts import Rank

NAMED = 8  # ranks that are named


def ranks_named(ranks: Sequence[Rank]) -> str:
    """Returns `replica 2`, `replica 2 shard 1`, or several of them. The shard is left out where all are 0."""
    alone = all(shard == 0 for _, shard in ranks)
    named = [f"replica {replica}" if alone else rank_name(replica, shard) for replica, shard in ranks[:NAMED]]
    if len(ranks) > NAMED:
        named.append(f"{len(ranks) - NAMED} more")
    if len(named) < 2:
        return "".join(named)
    return f"{', '.join(named[:-1])} and {named[-1]}"


def called_at(*callers: str) -> str:
    """Returns `, called at LINE`, or nothing if no line is known."""
    named = [caller for caller in callers if caller]
    return f", called at {' and at '.join(named)}" if named else ""


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def clock(at: float) -> str:
    """Returns the time of the day at `at` seconds since 1970."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
