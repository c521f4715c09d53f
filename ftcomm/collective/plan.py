"""The plan of an all-reduce: who reduces what, as pure functions of the view and of the size of the op."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping

from ftcomm.kernels.epochs import EPOCHS
from ftcomm.tuning import BUILT_IN, EVER, MEMBERS, Tuning, up_to

_ALIGN = 64  # bytes; shards start on cache lines, so that no line is written by two members


@dataclasses.dataclass(frozen=True)
class GroupView:
    """The members of one shard group in one epoch.

    `one_host`: all run on the same machine. `alike`: all reduce by the same code on processors that can the same, see
    `ftcomm.kernels.host.arithmetic`. Members that differ may pass on, say, the other one of two NaNs, so between hosts
    that are not alike every element is reduced by one member alone.
    """

    epoch: int
    me: int
    members: tuple[int, ...]  # replica ids, ascending
    contributing: frozenset[int]
    one_host: bool = True
    ring: tuple[int, ...] = ()  # all members, in the order in which large all-reduces go around; (): they do not
    alike: bool = False
    tuning: Tuning = BUILT_IN
    hosts: tuple[tuple[int, ...], ...] = ()  # the members of each, if large all-reduces go by two levels; else ()

    def __post_init__(self) -> None:
        if self.hosts and (sorted(m for host in self.hosts for m in host) != list(self.members) or () in self.hosts):
            raise ValueError(f"the hosts {self.hosts} do not have the members {self.members}, each of them once")
        if len(self.ring) > MEMBERS:
            raise ValueError(f"a ring of {len(self.ring)} members; segments have words for {MEMBERS}")
        if self.ring and tuple(sorted(self.ring)) != self.members:
            raise ValueError(f"the ring {self.ring} does not consist of the members {self.members}")
        if list(self.members) != sorted(set(self.members)) or self.me not in self.members:
            raise ValueError(f"members {self.members} are not ascending, or {self.me} is not among them")
        if not 0 < self.epoch < EPOCHS:
            raise ValueError(f"epoch {self.epoch} is outside 1 .. {EPOCHS - 1}")

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members whose inputs count, in the order in which they are summed."""
        return tuple(member for member in self.members if member in self.contributing)

    @functools.cached_property
    def one_shot(self) -> int:
        """The largest op, in bytes, that each member reduces by itself; -1: none, whatever its size."""
        if not self.one_host and not self.alike:
            return -1
        return up_to(self.tuning.one_host if self.one_host else self.tuning.hosts, len(self.members))

    @functools.cached_property
    def direct(self) -> int:
        """The largest op, in bytes, that goes by none of the routes, around the ring or by two levels."""
        if self.ring:
            return up_to(self.tuning.ring, len(self.members))
        return max(up_to(self.tuning.two_levels, len(self.members)), self.one_shot) if self.hosts else EVER


def two_shot(nbytes: int, view: GroupView) -> bool:
    """True: each member reduces a shard and all copy the shards. False: each reduces all of it by itself."""
    return nbytes > view.one_shot


def by_route(nbytes: int, view: GroupView) -> bool:
    """True: the op goes around the ring, or by two levels, as the view has it."""
    return nbytes > view.direct


def shared_hosts(hosts: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """From the host of each member: the members of each host, ascending, in the order of their first ones. () if two
    levels are none, as all are on one host, or each on its own."""
    found: dict[str, list[int]] = {}
    for member, host in sorted(hosts.items()):
        found.setdefault(host, []).append(member)
    return tuple(map(tuple, found.values())) if 1 < len(found) < len(hosts) else ()


def shards(count: int, itemsize: int, parts: int) -> tuple[tuple[int, int], ...]:
    """`count` elements in `parts` adjacent ranges (start, stop), even but for cache lines; some may be empty."""
    unit = max(1, _ALIGN // itemsize)
    units = -(-count // unit)
    bounds = [min(count, units * part // parts * unit) for part in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))
