"""The plan of an all-reduce: who reduces what, as pure functions of the view and of the size of the op."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

# Three members and more. One-shot reads members x bytes on every core but hands over once; two-shot reads twice the
# bytes and hands over twice. Four members on two cores: 64 KB 41 us one-shot and 60 us two-shot, 128 KB 75 and 63.
ONE_SHOT_BYTES = 64 << 10

# Below that the hops of a ring, 2 (n - 1), cost more than the second flow of each member saves.
RING_BYTES = 64 << 10

_ALIGN = 64  # bytes; shards start on cache lines, so that no line is written by two members


@dataclasses.dataclass(frozen=True)
class GroupView:
    """The members of one shard group in one epoch.

    `one_host`: all run on the same machine. Members on machines that differ in their processors may round, say, the
    sign of a zero differently, so between hosts every element is reduced by one member alone.
    """

    epoch: int
    me: int
    members: tuple[int, ...]  # replica ids, ascending
    contributing: frozenset[int]
    one_host: bool = True
    ring: tuple[int, ...] = ()  # all members, in the order in which large all-reduces go around; (): they do not

    def __post_init__(self) -> None:
        if self.ring and tuple(sorted(self.ring)) != self.members:
            raise ValueError(f"the ring {self.ring} does not consist of the members {self.members}")
        if list(self.members) != sorted(set(self.members)) or self.me not in self.members:
            raise ValueError(f"members {self.members} are not ascending, or {self.me} is not among them")
        if not 0 < self.epoch < 1 << 31:
            raise ValueError(f"epoch {self.epoch} is outside 1 .. 2**31 - 1")

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members whose inputs count, in the order in which they are summed."""
        return tuple(member for member in self.members if member in self.contributing)


def two_shot(nbytes: int, view: GroupView) -> bool:
    """True: each member reduces a shard and all copy the shards. False: each reduces all of it by itself.

    For two members on a host one-shot is best at every size: as many bytes cross between the cores, with one hand-over
    instead of two, and nothing is written but the result.
    """
    if not view.one_host:
        return True
    return len(view.members) > 2 and nbytes > ONE_SHOT_BYTES


def around(nbytes: int, view: GroupView) -> bool:
    """True: the op goes around the ring."""
    return bool(view.ring) and nbytes > RING_BYTES


def ring_order(hosts: Mapping[int, str]) -> tuple[int, ...]:
    """From the host of each member: those of one host side by side, so that one flow enters it and one leaves it. Who
    comes or goes has two neighbours; between all others the order stays as it is."""
    return tuple(sorted(hosts, key=lambda member: (hosts[member], member)))


def shards(count: int, itemsize: int, parts: int) -> tuple[tuple[int, int], ...]:
    """`count` elements in `parts` adjacent ranges (start, stop), even but for cache lines; some may be empty."""
    unit = max(1, _ALIGN // itemsize)
    units = -(-count // unit)
    bounds = [min(count, units * part // parts * unit) for part in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))
