"""Finds members of a group that have made different calls as the same op, or the same calls in another order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ftcomm.diagnosis.facts import OpFacts, Rank, RankFacts

RECENT = 10.0  # s

OpsByRank = Mapping[Rank, OpFacts]


class Unlike(NamedTuple):
    """The calls that members made as the same op, and that differ. `odd` are those whose call differs from that of
    most, all if there is no majority."""

    made: tuple[tuple[Rank, OpFacts], ...]
    odd: tuple[Rank, ...]
    swapped: bool  # the same calls in another order


def unlike(ranks: Iterable[RankFacts]) -> Unlike | None:
    """Returns the op that members called differently last, and that has not ended well; of several in a row the first.
    None if there is none, or if it has failed more than `RECENT` ago: the members have gone on."""
    calls: dict[tuple[str, int, int], dict[Rank, OpFacts]] = {}
    for rank in ranks:
        for op in rank.ops:
            calls.setdefault((op.group, op.column, op.number), {})[rank.rank] = op
    found = {key for key, made in calls.items() if _differ(made)}
    firsts = [key for key in found if (*key[:2], key[2] - 1) not in found]
    if not firsts:
        return None
    group, column, number = min(firsts, key=lambda key: (min(op.age for op in calls[key].values()), key))
    made = calls[group, column, number]
    kinds = sorted({op.what for op in made.values()})
    usual = max(kinds, key=lambda kind: sum(op.what == kind for op in made.values()))
    odd = [rank for rank, op in sorted(made.items()) if op.what != usual]
    near = [calls.get((group, column, number + by), {}) for by in (1, -1)]
    return Unlike(
        made=tuple(sorted(made.items())),
        odd=tuple(odd if len(odd) * 2 < len(made) else sorted(made)),
        swapped=any(_crossed(made, other) for other in near),
    )


def _differ(made: OpsByRank) -> bool:
    going = any(op.open for op in made.values())
    failed = any(op.failed and op.age < RECENT for op in made.values())
    return (going or failed) and len({op.what for op in made.values()}) > 1


def _crossed(made: OpsByRank, other: OpsByRank) -> bool:
    """Whether what one member has called as this op is what another member has called as the `other` op, and the
    reverse as far as both were called: who waits in its first call has not come to the second."""
    for a, first in made.items():
        for b, second in made.items():
            if first.what == second.what or b not in other:
                continue
            if other[b].what == first.what and (a not in other or other[a].what == second.what):
                return True
    return False
