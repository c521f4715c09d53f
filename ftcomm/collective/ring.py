"""The ring: an all-reduce in which a member hears from one other alone, its left neighbour.

A chunk has a shard for each place in the ring. Shard s starts at place s and travels to the right; whoever it comes to
adds its own input, until the last one has the sum, which then travels once more around:

    place              0        1        2        3          4 members, what each has done with which shard
    POSTED             0        1        2        3          its own input of it
    level 1            3+0      0+1      1+2      2+3        reduced: left's, and mine
          2            2+3+0    ...
          3            shard 1  shard 2  shard 3  shard 0    whole
          4            shard 0  ...                          copied from the left, for the right
          5            shard 3
          6            shard 2                               copied; nobody needs it from here

    word         written by   value                            polled by            before
    level(l)     owner        tasks that have reached level l  its right neighbour  it reads the shard of that level

So every element is reduced by one chain of members, in the order of the ring, and all copy the same bytes; what crosses
between neighbours is 2 (n - 1) / n of the chunk, in 2 (n - 1) steps. All levels but POSTED lie in the REDUCED region,
each shard at its own place: a whole shard takes the place of its partial sum when it has come around, and so the right
neighbour, which the chain has passed, has read that.

A task goes through its levels in order, and tasks follow each other at each level, so that as many are under way as
there are slots. The caller's buffer stays INPUT until all levels are done and the chunk is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView, shards
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import POSTED, REDUCED, Memory

Array = np.ndarray[Any, Any]


class Step(NamedTuple):
    """What a member does to reach a level."""

    shard: int  # the place where it started
    carries: bool  # some input is in what comes from the left
    adds: bool  # my input is to be added
    last: bool  # then it is whole

    @property
    def nothing(self) -> bool:
        return not (self.carries or self.adds)


@lru_cache(maxsize=256)
def steps(ring: tuple[int, ...], contributing: frozenset[int], place: int) -> tuple[Step, ...]:
    """Those of the member at `place`: step i takes it to level i + 1."""
    n = len(ring)
    made = []
    for turn in range(1, n):
        shard = (place - turn) % n
        before = any(ring[(shard + hop) % n] in contributing for hop in range(turn))
        made.append(Step(shard, before, ring[place] in contributing, turn == n - 1))
    made += [Step((place + 1 - turn) % n, True, False, False) for turn in range(1, n)]
    return tuple(made)


def may_ring(dtype: str, op: str) -> bool:
    """Whether partial sums of a chain can be handed on as they are: those of halves would be rounded at every hop, and
    those of integers that are averaged may need more bits."""
    kind = HOST_DTYPES[dtype].kind
    return kind != "half" and not (kind == "int" and op == "avg")


class RingLane:
    """The shards of a chunk of one dtype and size in one slot, as ready-made views."""

    def __init__(self, ring: Ring, dtype: str, count: int, slot: int) -> None:
        carrier = HOST_DTYPES[dtype].carrier
        mine, left = ring.memories[ring.me], ring.memories[ring.left]
        self.bounds = shards(count, carrier.itemsize, ring.size)
        self.own, self.lefts, self.begun = [], [], []
        for start, stop in self.bounds:
            self.own.append(mine.carve(REDUCED, slot, start, stop - start, carrier))
            self.lefts.append(left.carve(REDUCED, slot, start, stop - start, carrier))
            self.begun.append(left.carve(POSTED, slot, start, stop - start, carrier))


class Ring:
    """The part of a stream that goes around. No method waits."""

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        self.memories, self._reducer = memories, reducer
        self.me, self.size = view.me, len(view.ring)
        self.place = view.ring.index(view.me)
        self.left, self.right = view.ring[self.place - 1], view.ring[(self.place + 1) % self.size]
        self.steps = steps(view.ring, view.contributing, self.place)
        self.levels = len(self.steps)
        self._divisor = len(view.contributors)
        self._contributes = view.me in view.contributing

    def step(self, op: Operation, here: Array, lane: RingLane, reached: int) -> None:
        """From level `reached` to the next; the left neighbour has reached that level with this task."""
        step = self.steps[reached]
        start, stop = lane.bounds[step.shard]
        if start == stop or step.nothing:
            return
        out = lane.own[step.shard]
        came = (lane.begun if reached == 0 else lane.lefts)[step.shard]
        if reached >= self.size - 1:
            if reached + 1 < self.levels:  # else nobody reads it here, and `finish` has it from the left
                out[...] = came
            return
        sources = [came] if step.carries else []
        if step.adds:
            sources.append(here[start:stop])
        reduction = self._reducer.get(op.dtype, op.op if step.last or op.op != "avg" else "sum", self._divisor)
        reduction([operand(op.dtype, source) for source in sources], operand(op.dtype, out))

    def finish(self, here: Array, lane: RingLane) -> None:
        """All levels are reached: the whole chunk, into the caller's buffer."""
        newest = self.steps[-1].shard
        for shard, (start, stop) in enumerate(lane.bounds):
            here[start:stop] = (lane.lefts if shard == newest else lane.own)[shard]

    def read_by_right(self, reached: int, lane: RingLane) -> tuple[int, int]:
        """The elements (start, stop) that the right neighbour needs of what this member has at level `reached`."""
        if reached == 0:
            shard, nothing = self.place, not self._contributes
        else:
            shard, nothing = self.steps[reached - 1].shard, self.steps[reached - 1].nothing
        return (0, 0) if nothing else lane.bounds[shard]
