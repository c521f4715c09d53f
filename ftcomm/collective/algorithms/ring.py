"""The ring: an all-reduce in which a member hears from one other alone, its left neighbour.

A chunk has a slice for each place in the ring. Slice s starts at place s and travels to the right; whoever it comes to
adds its own input, until the last one has the sum, which then travels once more around:

    place              0        1        2        3          4 members, what each has done with which slice
    POSTED             0        1        2        3          its own input of it
    level 1            3+0      0+1      1+2      2+3        reduced: left's, and mine
          2            2+3+0    ...
          3            slice 1  slice 2  slice 3  slice 0    whole
          4            slice 0  ...                          copied from the left, for the right
          5            slice 3
          6            slice 2                               copied; nobody needs it from here

    word         written by   value                            polled by            before
    level(l)     owner        tasks that have reached level l  its right neighbour  it reads the slice of that level

So every element is reduced by one chain of members, in the order of the ring, and all copy the same bytes; what crosses
between neighbours is 2 (n - 1) / n of the chunk, in 2 (n - 1) steps. All levels but POSTED lie in the REDUCED region,
each slice at its own place: a whole slice takes the place of its partial sum when it has come around, and so the right
neighbour, which the chain has passed, has read that.

Partial sums may be wider than the elements (`ftcomm.collective.compression`); then each slice has so much room in
REDUCED, and only the first part of it is used when it is whole.

A task goes through its levels in order, and tasks follow each other at each level, so that as many are under way as
there are slots. The caller's buffer stays INPUT until all levels are done and the chunk is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ftcomm.collective.algorithms.base import Algorithm, AlgorithmStep
from ftcomm.collective.compression import hands_on, partial_dtype
from ftcomm.collective.plan import GroupView, slices
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import POSTED, REDUCED, Memory, level, reached_at

if TYPE_CHECKING:
    from ftcomm.collective.operation import Operation
    from ftcomm.collective.pipeline import Slot


class RingTurn(NamedTuple):
    """The work of a member to reach a level."""

    slice: int  # the place where it started
    carries: bool  # some input is in what comes from the left
    adds: bool  # my input is to be added
    last: bool  # then it is whole

    @property
    def nothing(self) -> bool:
        return not (self.carries or self.adds)


@lru_cache(maxsize=256)
def turns(ring: tuple[int, ...], contributing: frozenset[int], place: int) -> tuple[RingTurn, ...]:
    """Returns what the member at `place` does: turn i takes it to level i + 1."""
    n = len(ring)
    made = []
    for turn in range(1, n):
        index = (place - turn) % n
        before = any(ring[(index + hop) % n] in contributing for hop in range(turn))
        made.append(RingTurn(index, before, ring[place] in contributing, turn == n - 1))
    made += [RingTurn((place + 1 - turn) % n, True, False, False) for turn in range(1, n)]
    return tuple(made)


class RingViews:
    """Views of the slices of a chunk of one dtype, compression and size in one slot: the left neighbour's inputs,
    partial sums, and whole slices."""

    def __init__(self, ring: Ring, dtype: str, compression: str, count: int, chunk: int) -> None:
        carrier = HOST_DTYPES[dtype].carrier
        mine, left = ring.memories[ring.me], ring.memories[ring.left]
        self.bounds = slices(count, carrier.itemsize, ring.size)
        self.itemsize = carrier.itemsize
        self.partial = partial_dtype(dtype, compression)
        partial = HOST_DTYPES[self.partial].carrier
        self.room = partial.itemsize  # of each element in REDUCED: a whole slice begins where its partial sum did
        scale = self.room // self.itemsize
        start, stop = self.bounds[ring.place]
        self.part = slice(start, stop)  # of my input, with which my slice starts
        self.mine = mine.carve(POSTED, chunk, start, stop - start, carrier)
        self.begun = [left.carve(POSTED, chunk, a, b - a, carrier) for a, b in self.bounds]
        self.own_sums, self.left_sums = (
            [memory.carve(REDUCED, chunk, a, b - a, partial) for a, b in self.bounds] for memory in (mine, left)
        )
        self.own, self.lefts = (
            [memory.carve(REDUCED, chunk, scale * a, b - a, carrier) for a, b in self.bounds] for memory in (mine, left)
        )


class Ring(Algorithm):
    """Each of its steps waits for the left neighbour alone."""

    name = "ring"
    chained = True
    straight = True

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        super().__init__(view, memories, reducer)
        self.size = len(view.ring)
        most = memories[view.me].layout.members
        if self.size > most:
            raise ValueError(f"a ring of {self.size} members; the segment of {view.me} has words for {most}")
        self.place = view.ring.index(view.me)
        self.left, self.right = view.ring[self.place - 1], view.ring[(self.place + 1) % self.size]
        self.turns = turns(view.ring, view.contributing, self.place)
        last = len(self.turns) - 1
        self.steps = tuple(
            AlgorithmStep(level(i) if i else POSTED, (self.left,), level(i + 1) if i < last else 0)
            for i in range(last + 1)
        )
        self.served = frozenset((self.right,))
        self.readers = {level(i): frozenset((self.right,)) for i in range(1, last + 1)}
        self._divisor = len(view.contributors)

    def handles(self, op: Operation) -> bool:
        """Whether partial sums of `op` can be passed on."""
        return hands_on(op.dtype, op.op, op.compression)

    def make_views(self, dtype: str, op: str, compression: str, count: int, chunk: int) -> RingViews:
        return RingViews(self, dtype, compression, count, chunk)

    def reads(self, slot: Slot) -> Collection[int]:
        return ()

    def post(self, slot: Slot) -> None:
        if self.contributes and not slot.straight:
            slot.views.mine[...] = slot.here[slot.views.part]

    def step(self, slot: Slot) -> None:
        op, views, number = slot.op, slot.views, slot.number
        turn = self.turns[number]
        start, stop = views.bounds[turn.slice]
        if start == stop or turn.nothing:
            return
        index = turn.slice
        if number >= self.size - 1:
            views.own[index][...] = views.lefts[index]
            return
        sources = []
        if turn.carries:
            came = (
                operand(op.dtype, views.begun[index])
                if number == 0
                else operand(op.dtype, views.left_sums[index], views.partial)
            )
            sources.append(came)
        if turn.adds:
            sources.append(operand(op.dtype, slot.here[start:stop]))
        out = (
            operand(op.dtype, views.own[index])
            if turn.last
            else operand(op.dtype, views.own_sums[index], views.partial)
        )
        self.reducer.get(op.dtype, op.op if turn.last or op.op != "avg" else "sum", self._divisor)(sources, out)

    def finish(self, slot: Slot) -> None:
        views, here = slot.views, slot.here
        newest = self.turns[-1].slice
        for index, (start, stop) in enumerate(views.bounds):
            here[start:stop] = (views.lefts if index == newest else views.own)[index]

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        if reader != self.right:
            return 0, 0
        views = slot.views
        if word == POSTED:
            reached, index, nothing, room = 0, self.place, not self.contributes, views.itemsize
        else:
            reached = reached_at(word)
            turn = self.turns[reached - 1]
            index, nothing, room = turn.slice, turn.nothing, views.room
        if nothing:
            return 0, 0
        start, stop = views.bounds[index]
        size = room if reached < self.size - 1 else views.itemsize
        return start * room, start * room + (stop - start) * size
