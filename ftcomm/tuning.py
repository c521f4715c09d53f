"""Switch points: up to which size an all-reduce goes which way; and in which order a ring goes through hosts. `ftcomm
bench tune` measures both for a machine or a network and keeps them in a file (`ftcomm.tuning_file`), which
FTCOMM_TUNING names; without one that holds which is written here.

All members of a group must have the same, since each of them computes the plan alone: their digest is in the address of
a rank, and a difference is an error that names both files.
"""

from __future__ import annotations

import dataclasses
import hashlib

from ftcomm.control import limits

Points = tuple[tuple[int, int], ...]  # (members, bytes), ascending: the size for so many members, or fewer

EVER = 1 << 62  # bytes; at every size
MEMBERS = limits.MEMBERS  # of the largest group


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes in bytes, the last that goes the first way."""

    # One-shot, then two-shot. On one host one-shot reads members x bytes on every core but hands over once; two-shot
    # reads twice the bytes and hands over twice. Four members on two cores: 64 KB 41 us one-shot and 60 us two-shot,
    # 128 KB 75 and 63. For two members one-shot is best at every size: as many bytes cross between the cores, with one
    # hand-over instead of two, and nothing is written but the result.
    one_host: Points = ((2, EVER), (MEMBERS, 64 << 10))
    # Likewise between hosts, where a member sends (members - 1) x bytes and waits for one way, or 2 (members - 1) /
    # members x bytes and waits for two. TCP between namespaces, two cores: two members 64 KB 379 us one-shot and 494 us
    # two-shot, 512 KB 901 and 1039; three 128 KB 1.9 ms and 2.3, 256 KB 2.2 and 1.7; four 128 KB 3.3 and 3.6, 256 KB
    # 5.1 and 4.8; eight 64 KB 10.0 and 11.1, 128 KB 12.6 and 13.0, 256 KB 18.4 and 15.7. There bytes cost processor
    # time alone, so where it hardly matters eight have the smaller one. More were not measured: where what one-shot
    # sends more, (members - 1) (members - 2) / members x bytes, takes as long as the second way.
    hosts: Points = ((2, 512 << 10), (3, 128 << 10), (4, 128 << 10), (8, 64 << 10), (MEMBERS, 16 << 10))
    # Each with each, then around the ring, where FTCOMM_ALGORITHM asks for one: the hops of a ring, 2 (members - 1),
    # cost more than the second flow of each member saves. Not measured as the others are: between namespaces each with
    # each was quicker at all sizes to 4 MB, four members 32 ms against 46, eight 90 against 133. A ring is for networks
    # on which many flows at once are slow.
    ring: Points = ((MEMBERS, 64 << 10),)
    # Each with each, then by two levels, where members share hosts: that halves what crosses between two hosts of two
    # members, for two hand-overs more. Over 1 Gbit/s, all on two cores: 256 KB 7.7 ms direct and 8.4 by two levels,
    # 512 KB 15.3 and 12.0, 1 MB 24 and 13. Over cables without a rate, where bytes cost processor time alone, they
    # are about equal from 64 KB on: 256 KB 2.9 ms and 2.5, 1 MB 6.9 and 6.1, 4 MB 22.9 and 22.7.
    two_levels: Points = ((MEMBERS, 256 << 10),)
    # In which order a ring goes through racks, and within a rack through hosts, by the addresses at which they listen:
    # see `ftcomm.collective.ring_order`.
    ring_racks: tuple[str, ...] = ()
    ring_hosts: tuple[str, ...] = ()
    source: str = dataclasses.field(default="built in", compare=False)

    @property
    def _points(self) -> tuple[object, ...]:
        return self.one_host, self.hosts, self.ring, self.two_levels, self.ring_racks, self.ring_hosts

    @property
    def digest(self) -> str:
        """16 hex digits, alike where the points are."""
        return hashlib.sha256(repr(self._points).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """What an address says of it."""
        return f"{self.digest} {self.source}"[:256]


BUILT_IN = Tuning()


def differ(here: str, there: str) -> bool:
    """Of what two addresses say; the same points may come from files of different names."""
    return here.partition(" ")[0] != there.partition(" ")[0]


def up_to(points: Points, members: int) -> int:
    """The size for a group of so many: that of the next number which was measured, or of the largest."""
    return next((size for most, size in points if members <= most), points[-1][1])
