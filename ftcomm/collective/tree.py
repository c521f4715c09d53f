"""The tree of a group of many members, in which each of them waits for a few others, whatever the size of the group.

The members are in the order of their numbers. A subtree is a run of neighbours; the first of them is its top, and the
others are cut into as many runs as even as can be, whose tops are its children. With a fan of 3:

    0 ---- 1 2 3 4     1 -- 2, 3, 4     words go up and down the lines
      ---- 5 6 7 8     5 -- 6, 7, 8
      ---- 9 10 11     9 -- 10, 11

Two rounds go through it for each op:

    word         written by               value                                     polled by   before
    POSTED       a member without         tasks posted                              its parent  it reads the input
                 children
    GATHERED     one with children        first tasks of ops that its subtree has   its parent  it reads the sum
                                          posted, and summed
    ANNOUNCED    the top, then those      first tasks that all have posted, and     its         they read the result
                 with children            whose result is here                      children

    TAKEN        a member without         tasks taken                               its parent
                 children
    TAKEN_UP     one with children        ends of ops that its subtree has taken    its parent
    TAKEN_DOWN   the top, then those      ends of ops that all have taken           its         they return the op
                 with children                                                      children

So in the first round all learn that all have called the op, in the second that all hold it FINAL. What a member has
found of the calls below it stands in its descriptor, see `DIFFERS`, so it travels with the words.

Nobody leaves an op before it has told its children what it has learned: a member that has no op in flight owes nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

# Bits of the detail of a call, which go up and down with the words: all members have to look at the words of all. Some
# member compares results, or calls are not alike in when and as what op they were made, which may still be the same
# call (`ftcomm.collective.operation.unlike`); or in what they call, and then there is no result.
ASKS = 1 << 30
DIFFERS = 1 << 31
FOUND = ASKS | DIFFERS


class TreeBranch(NamedTuple):
    """The place of a member in the tree."""

    parent: int  # -1: it is the top
    leaves: tuple[int, ...]  # its children that have no children
    tops: tuple[int, ...]  # its children that have children
    below: tuple[int, ...]  # all members of its subtree, itself the first

    @property
    def children(self) -> tuple[int, ...]:
        """The children, in the order of their numbers."""
        return tuple(sorted((*self.leaves, *self.tops)))


@functools.lru_cache(maxsize=64)
def tree(members: tuple[int, ...], fan: int) -> dict[int, TreeBranch]:
    """Returns the places of all members, which are ascending."""
    places: dict[int, TreeBranch] = {}
    left = [(-1, members)]
    while left:
        parent, run = left.pop()
        top, rest = run[0], run[1:]
        parts = min(fan, len(rest))
        runs = [rest[len(rest) * i // parts : len(rest) * (i + 1) // parts] for i in range(parts)]
        leaves, tops = ([part[0] for part in runs if (len(part) > 1) == many] for many in (False, True))
        places[top] = TreeBranch(parent, tuple(leaves), tuple(tops), run)
        left += [(top, part) for part in runs]
    return places
