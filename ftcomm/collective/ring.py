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

Partial sums may be wider than the elements (`ftcomm.collective.wire`); then each shard has so much room in REDUCED, and
only the first part of it is used when it is whole.

A task goes through its levels in order, and tasks follow each other at each level, so that as many are under way as
there are slots. The caller's buffer stays INPUT until all levels are done and the chunk is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView, shards
from ftcomm.collective.route import Array, Hop, Route
from ftcomm.collective.wire import partial_dtype
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import POSTED, REDUCED, Memory


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


class RingLane:
    """The shards of a chunk of one dtype, wire and size in one slot, as ready-made views: what the left neighbour has
    `begun` with, partial sums, and whole ones."""

    def __init__(self, ring: Ring, dtype: str, wire: str, count: int, slot: int) -> None:
        carrier = HOST_DTYPES[dtype].carrier
        mine, left = ring.memories[ring.me], ring.memories[ring.left]
        self.bounds = shards(count, carrier.itemsize, ring.size)
        self.itemsize = carrier.itemsize
        self.partial = partial_dtype(dtype, wire)
        partial = HOST_DTYPES[self.partial].carrier
        self.room = partial.itemsize  # of each element in REDUCED: a whole shard begins where its partial sum did
        scale = self.room // self.itemsize
        self.begun = [left.carve(POSTED, slot, a, b - a, carrier) for a, b in self.bounds]
        self.own_sums, self.left_sums = (
            [memory.carve(REDUCED, slot, a, b - a, partial) for a, b in self.bounds] for memory in (mine, left)
        )
        self.own, self.lefts = (
            [memory.carve(REDUCED, slot, scale * a, b - a, carrier) for a, b in self.bounds] for memory in (mine, left)
        )


class Ring(Route):
    """The route that goes around: its hops are the steps, each of which waits for the left neighbour alone."""

    chained = True

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        self.memories, self._reducer = memories, reducer
        self.me, self.size = view.me, len(view.ring)
        self.place = view.ring.index(view.me)
        self.left, self.right = view.ring[self.place - 1], view.ring[(self.place + 1) % self.size]
        self.steps = steps(view.ring, view.contributing, self.place)
        last = len(self.steps) - 1
        self.hops = tuple(Hop(i, (self.left,), i + 1 if i < last else 0) for i in range(last + 1))
        self.served = frozenset((self.right,))
        self.readers = {i: frozenset((self.right,)) for i in range(1, last + 1)}
        self._divisor = len(view.contributors)
        self._contributes = view.me in view.contributing

    def lane(self, dtype: str, wire: str, count: int, slot: int) -> RingLane:
        return RingLane(self, dtype, wire, count, slot)

    def hop(self, op: Operation, here: Array, lane: RingLane, number: int) -> None:
        step = self.steps[number]
        start, stop = lane.bounds[step.shard]
        if start == stop or step.nothing:
            return
        shard = step.shard
        if number >= self.size - 1:
            if self.hops[number].makes:  # else nobody reads it here, and `finish` has it from the left
                lane.own[shard][...] = lane.lefts[shard]
            return
        sources = []
        if step.carries:
            came = operand(op.dtype, lane.begun[shard]) if number == 0 else self._sum(op, lane, lane.left_sums[shard])
            sources.append(came)
        if step.adds:
            sources.append(operand(op.dtype, here[start:stop]))
        out = operand(op.dtype, lane.own[shard]) if step.last else self._sum(op, lane, lane.own_sums[shard])
        self._reducer.get(op.dtype, op.op if step.last or op.op != "avg" else "sum", self._divisor)(sources, out)

    @staticmethod
    def _sum(op: Operation, lane: RingLane, array: Array) -> Any:
        return operand(op.dtype, array, lane.partial)

    def finish(self, here: Array, lane: RingLane) -> None:
        newest = self.steps[-1].shard
        for shard, (start, stop) in enumerate(lane.bounds):
            here[start:stop] = (lane.lefts if shard == newest else lane.own)[shard]

    def read_by(self, reader: int, level: int, lane: RingLane) -> tuple[int, int]:
        if reader != self.right:
            return 0, 0
        if level == 0:
            shard, nothing, room = self.place, not self._contributes, lane.itemsize
        else:
            shard, nothing, room = self.steps[level - 1].shard, self.steps[level - 1].nothing, lane.room
        if nothing:
            return 0, 0
        start, stop = lane.bounds[shard]
        size = room if level < self.size - 1 else lane.itemsize
        return start * room, start * room + (stop - start) * size
