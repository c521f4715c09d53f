"""The plan of an all-reduce: who reduces what. All of it is pure functions of the view and of the size of the op."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from ftcomm.kernels.epochs import EPOCHS
from ftcomm.settings.tuning import BUILT_IN, EVER, MEMBERS, Tuning, up_to

ALIGN = 64  # bytes; slices start on cache lines, so that no line is written by two members


@dataclasses.dataclass(frozen=True)
class GroupView:
    """The members of one group in one epoch.

    `one_host`: all run on the same machine. `alike`: all reduce by the same code on equivalent processors, see
    `ftcomm.kernels.host.arithmetic`. Members that differ may take, say, the other one of two NaNs, so between hosts
    that are not alike only one member reduces each element.
    """

    epoch: int
    me: int
    members: tuple[int, ...]  # replica ids, ascending
    contributing: frozenset[int]
    one_host: bool = True
    ring: tuple[int, ...] = ()  # all members in the order of the ring of large all-reduces; (): no ring
    alike: bool = False
    tuning: Tuning = BUILT_IN
    # The members of each host, or of each of the `rows`, if large all-reduces are hierarchical; else ().
    hosts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.hosts and (sorted(m for host in self.hosts for m in host) != list(self.members) or () in self.hosts):
            raise ValueError(f"the hosts {self.hosts} do not have the members {self.members}, each of them once")
        if len(self.ring) > MEMBERS:
            raise ValueError(f"a ring of {len(self.ring)} members; a group has at most {MEMBERS}")
        if self.ring and tuple(sorted(self.ring)) != self.members:
            raise ValueError(f"the ring {self.ring} does not consist of the members {self.members}")
        if list(self.members) != sorted(set(self.members)) or self.me not in self.members:
            raise ValueError(f"members {self.members} are not ascending, or {self.me} is not among them")
        if not 0 < self.epoch < EPOCHS:
            raise ValueError(f"epoch {self.epoch} is outside 1 .. {EPOCHS - 1}")

    @functools.cached_property
    def contributors(self) -> tuple[int, ...]:
        """The members whose inputs count, in the order in which they are summed."""
        return tuple(member for member in self.members if member in self.contributing)

    @functools.cached_property
    def one_shot(self) -> int:
        """The largest op, in bytes, that is one-shot: each member reduces all of it. -1: none."""
        if not self.one_host and not self.alike:
            return -1
        return up_to(self.tuning.one_host if self.one_host else self.tuning.hosts, len(self.members))

    @functools.cached_property
    def tree(self) -> int:
        """The largest op, in bytes, that goes through the tree. 0: there is none. Not with a ring, in which not all
        members that share a tree need be connected."""
        points = self.tuning.tree_on_one_host if self.one_host else self.tuning.tree
        return 0 if self.ring else up_to(points, len(self.members))

    @functools.cached_property
    def direct(self) -> int:
        """The largest op, in bytes, that goes neither around the ring nor hierarchically."""
        if self.ring:
            return up_to(self.tuning.ring, len(self.members))
        return max(up_to(self.tuning.two_levels, len(self.members)), self.one_shot) if self.hosts else EVER


def two_shot(nbytes: int, view: GroupView) -> bool:
    """Whether an op is two-shot: each member reduces a slice and all copy the slices. Otherwise each reduces all of
    it."""
    return nbytes > view.one_shot


def by_route(nbytes: int, view: GroupView) -> bool:
    """Whether an op goes around the ring, or hierarchically, as the view has it."""
    return nbytes > view.direct


def shared_hosts(hosts: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """Groups the members by host: those of each host ascending, hosts in the order of their first members. Empty if
    that makes no hierarchy, since all are on one host, or each on its own."""
    found: dict[str, list[int]] = {}
    for member, host in sorted(hosts.items()):
        found.setdefault(host, []).append(member)
    return tuple(map(tuple, found.values())) if 1 < len(found) < len(hosts) else ()


def rows(order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cuts members into as many rows as each has members, more or less: neighbours in `order` make a row. Rows stand
    for hosts, as `shared_hosts` has them."""
    count = len(order) // math.isqrt(len(order))
    cut = [len(order) * row // count for row in range(count + 1)]
    return tuple(sorted(tuple(sorted(order[start:stop])) for start, stop in itertools.pairwise(cut)))


def flow_slices(
    count: int, itemsize: int, flows: int, hosts: int, owners: int, turn: int
) -> tuple[tuple[int, int], ...]:
    """Cuts `count` elements into adjacent ranges, one for each host in each flow, flow by flow. In a flow so many
    `owners` have as much as each other, and the other hosts have none. In the next flow, and in the next `turn`, the
    next hosts are owners."""
    cut = slices(count, itemsize, flows * owners)
    made: list[tuple[int, int]] = []
    for flow in range(flows):
        owning = {((flow + turn) * owners + owner) % hosts for owner in range(owners)}
        at = flow * owners
        for host in range(hosts):
            if host in owning:
                made.append(cut[at])
                at += 1
            else:
                begin = cut[at][0] if at < len(cut) else count
                made.append((begin, begin))
    return tuple(made)


def slices(count: int, itemsize: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cuts `count` elements into `parts` adjacent ranges (start, stop), even up to cache lines; some may be empty."""
    unit = max(1, ALIGN // itemsize)
    units = -(-count // unit)
    bounds = [min(count, units * part // parts * unit) for part in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))
