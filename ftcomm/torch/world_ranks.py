"""The ranks of the world of torch in a group, for `dist.get_rank(group)` and what asks by it.

torch writes down once which ranks of the world are in a group. They become others when a replica is lost or comes back:

    replicas 0, 1, 2 of two ranks    the group of replica 1 is {2: 0, 3: 1}, that of replicas 1 and 2 {2: 0, ... 5: 3}
    replica 0 is lost                                          {0: 0, 1: 1}                           {0: 0, ... 3: 3}

So it is written down again at that boundary. Ranks of the world that a script has kept from before, as the source of a
broadcast, still name the same members of a group within a replica. In a group across replicas they do not: the same
number may be another member now.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed import distributed_c10d as c10d

MembersNow = Callable[[], Iterable[tuple[int, int]]]  # (replica, place in it) of each rank of a group, as of now

_members: weakref.WeakKeyDictionary[Any, MembersNow] = weakref.WeakKeyDictionary()  # by process group


class RanksNow(dict[int, int]):
    """Rank of the world -> rank in the group. Those from `before` are found, too, but not listed."""

    def __init__(self, now: Mapping[int, int], before: Mapping[int, int]) -> None:
        super().__init__(now)
        self.before = before

    def __contains__(self, rank: object) -> bool:
        return super().__contains__(rank) or rank in self.before

    def __missing__(self, rank: int) -> int:
        return self.before[rank]


def remember(made: Any, members: MembersNow) -> None:
    """Let `follow` keep the process group `made`, which has these members."""
    _members[made] = members


def follow(group: Any) -> None:
    """Write down again which ranks of the world are in each group, after a change of the roster of the job."""
    first = {replica: place * group.shards for place, replica in enumerate(group.roster)}
    for made, members_of in list(_members.items()):
        known = c10d._world.pg_group_ranks.get(made)
        if known is None:  # it was destroyed
            continue
        members = list(members_of())
        now = {first[replica] + place: rank for rank, (replica, place) in enumerate(members) if replica in first}
        if list(known.items()) == list(now.items()):
            continue
        before: dict[int, int] = {}
        if {replica for replica, _ in members} == {group.replica}:
            before = {**known.before, **known} if isinstance(known, RanksNow) else dict(known)
        c10d._world.pg_group_ranks[made] = RanksNow(now, before)
