"""The ranks of the world of torch in groups within this replica, for `dist.get_rank(group)` and what asks by it.

torch writes down once which ranks of the world are in a group. Those of this replica become others when a replica
before it is lost or comes back:

    replicas 0, 1 of two ranks    replica 1 is ranks 2, 3    its group {2: 0, 3: 1}
    replica 0 is lost             replica 1 is ranks 0, 1    its group {0: 0, 1: 1}

So it is written down again at that boundary. Ranks of the world that a script has kept from before, as the source of a
broadcast within such a group, still name the same members.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import distributed_c10d as c10d

_places: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()  # of the ranks, in the replica


class RanksNow(dict[int, int]):
    """Rank of the world -> rank in the group. Those from `before` are found, too, but not listed."""

    def __init__(self, now: Mapping[int, int], before: Mapping[int, int]) -> None:
        super().__init__(now)
        self.before = before

    def __contains__(self, rank: object) -> bool:
        return super().__contains__(rank) or rank in self.before

    def __missing__(self, rank: int) -> int:
        return self.before[rank]


def remember(made: Any, places: Sequence[int]) -> None:
    """Let `follow` keep the process group `made`, whose ranks have these places in this replica."""
    _places[made] = tuple(places)


def follow(group: Any) -> None:
    """Write down again which ranks of the world are in the groups within this replica, after a change of the roster."""
    first = group.roster.index(group.replica) * group.shards
    for made, places in list(_places.items()):
        known = c10d._world.pg_group_ranks.get(made)
        if known is None:  # it was destroyed
            continue
        now = {first + place: rank for rank, place in enumerate(places)}
        if known != now:
            before = {**known.before, **known} if isinstance(known, RanksNow) else dict(known)
            c10d._world.pg_group_ranks[made] = RanksNow(now, before)
