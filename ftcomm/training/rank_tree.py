"""The tree in which the ranks of a replica tell each other small things. Pure.

Written in base `b`, a rank has its parent where its last digit that is not 0 is 0. With 16 ranks, so b = 4:

    0 ---- 1  2  3        who ends in 0 has those that differ in the last digit,
    |----- 4 --- 5  6  7
    |----- 8 --- 9 10 11  and those that end in 0 themselves, up to where its own digits begin
    |---- 12 -- 13 14 15

So all ranks below one follow it without a gap, and shard 0 has all. The depth is the least with which no rank has more
than `DIGIT - 1` children for each level below it, and `b` the least for that depth: up to `DIGIT` ranks are a star.

    ranks      depth    b     children of shard 0
    32         1        32    31
    1,024      2        32    62
    8,192      3        21    58
    65,536     4        16    60
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

DIGIT = 32  # the largest base: a level more costs each exchange a wake-up more, some 100 us between hosts


class TreePlace(NamedTuple):
    """The place of a rank. Its children are in order, and each has the ranks up to the next one below it."""

    parent: int | None
    children: tuple[int, ...]


def place(rank: int, ranks: int) -> TreePlace:
    """Returns the place of `rank` among `ranks`."""
    base = _base(ranks)
    children: list[int] = []
    unit = 1  # of the digit
    while unit < ranks:
        digit = rank // unit % base
        if digit:
            return TreePlace(rank - digit * unit, tuple(children))
        children += range(rank + unit, min(rank + base * unit, ranks), unit)
        unit *= base
    return TreePlace(None, tuple(children))


def _base(ranks: int) -> int:
    depth = next(depth for depth in itertools.count(1) if DIGIT**depth >= ranks)
    return next(base for base in itertools.count(2) if base**depth >= ranks)
