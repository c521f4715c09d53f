"""Switch points: up to which size an all-reduce goes which way; and in which order a ring goes through hosts. `ftcomm
bench tune` measures both for a machine or a network and keeps them in a file (`ftcomm.settings.tuning_file`), which
FTCOMM_TUNING names. Without a file the switch points of this module hold.

All members of a group must have the same, since each of them computes the plan alone: their digest is in the address of
a rank, and a difference is an error that names both files.
"""

from __future__ import annotations

import dataclasses
import hashlib

from ftcomm.control import limits

Points = tuple[tuple[int, int], ...]  # (members, bytes), ascending: the size for so many members, or fewer

EVER = 1 << 62  # bytes; at every size
MEMBERS = limits.MEMBERS  # members of the largest group


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The switch points: for each choice the largest size, in bytes, that goes the first way."""

    # docs/transports.md, "Measured choices", has the figures. One-shot up to here, then two-shot. On one host one-shot
    # reads members x bytes on every core with one hand-over; two-shot reads twice the bytes with two. With two members
    # one-shot is best at every size.
    one_host: Points = ((2, EVER), (MEMBERS, 64 << 10))
    # The same between hosts. A member sends (members - 1) x bytes and waits for one way, or 2 (members - 1) / members x
    # bytes and waits for two. Above eight members: the surplus of one-shot takes as long as the second way.
    hosts: Points = ((2, 512 << 10), (3, 128 << 10), (4, 128 << 10), (8, 64 << 10), (MEMBERS, 16 << 10))
    # Each with each up to here, then around the ring, where FTCOMM_ALGORITHM asks for one.
    ring: Points = ((MEMBERS, 64 << 10),)
    # Each with each up to here, then hierarchically, where members share hosts: that halves what crosses between two
    # hosts of two members, for two hand-overs more.
    two_levels: Points = ((MEMBERS, 256 << 10),)
    # The order of a ring through racks, and within a rack through hosts, by their addresses, see
    # `ftcomm.collective.ring_order`.
    ring_racks: tuple[str, ...] = ()
    ring_hosts: tuple[str, ...] = ()
    # Between hosts, through the tree up to here; 0: there is no tree in groups of so many.
    tree: Points = ((16, 0), (MEMBERS, 64 << 10))
    # The same on one host. There it costs more than it saves: to read a word is cheap, and to hand over is not.
    tree_on_one_host: Points = ((MEMBERS, 0),)
    tree_fan: int = 4  # the most children of a member of the tree
    # The most slices of a task between hosts, where large all-reduces go by two levels: 64 of 64 KB fill the task of a
    # group of many members (`ftcomm.transport.segment`). Groups of more members, each on its own host, go by rows.
    slices: int = 64
    source: str = dataclasses.field(default="built in", compare=False)

    @property
    def _points(self) -> tuple[object, ...]:
        ring, tree = (self.ring_racks, self.ring_hosts), (self.tree, self.tree_on_one_host, self.tree_fan)
        return self.one_host, self.hosts, self.ring, self.two_levels, *ring, *tree, self.slices

    @property
    def digest(self) -> str:
        """Returns 16 hex digits, equal exactly if the points are."""
        return hashlib.sha256(repr(self._points).encode()).hexdigest()[:16]

    def has_tree(self, most: int) -> bool:
        """Whether a group of at most so many members may have a tree."""
        return any(up_to(points, n) for points in (self.tree, self.tree_on_one_host) for n in range(2, most + 1))

    def around(self) -> Tuning:
        """Returns the same for FTCOMM_ALGORITHM=ring: there is no tree, since members know their neighbours alone."""
        none = ((MEMBERS, 0),)
        return dataclasses.replace(
            self, tree=none, tree_on_one_host=none, source=f"{self.source}, with FTCOMM_ALGORITHM=ring"
        )

    def __str__(self) -> str:
        """The form in which an address tells it."""
        return f"{self.digest} {self.source}"[:256]


BUILT_IN = Tuning()


def differ(here: str, there: str) -> bool:
    """Whether two addresses name different switch points; the same may come from files of different names."""
    return here.partition(" ")[0] != there.partition(" ")[0]


def up_to(points: Points, members: int) -> int:
    """Returns the size for a group of `members`: that of the next number which was measured, or of the largest."""
    return next((size for most, size in points if members <= most), points[-1][1])
