"""The algorithms in which every member reads from every other: for small ops, and among the members of one host.

one-shot    each member reduces all inputs by itself                                      no steps
two-shot    each member reduces a slice, and all copy the slices                          REDUCED, by all
copy        members without a chunk copy it from one that holds it FINAL, or from the     no steps
            only contributor
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ftcomm.collective.algorithms.base import Algorithm, AlgorithmStep, Array
from ftcomm.collective.plan import GroupView, slices
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.reduce import Reducer, is_operand, of_two, operand
from ftcomm.transport.segment import POSTED, REDUCED, Memory

if TYPE_CHECKING:
    from ftcomm.collective.pipeline import Slot


class OneShotViews(NamedTuple):
    mine: Array
    reduce: Callable[[Array], None]  # reduces the inputs of all into the caller's buffer


class OneShot(Algorithm):
    name = "one-shot"

    def __init__(
        self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer, *, confirms_arrival: bool
    ) -> None:
        """`confirms_arrival` says that what a reader was sent has arrived, even if the connection ends."""
        super().__init__(view, memories, reducer)
        # Two members reduce from the caller's own buffer and the staging of the other. With more, the first step of
        # the sum would overwrite an input that a later one needs. So each overwrites its input when it has that of the
        # other; and, where it is sent from there, when the other has its.
        self._pair = len(view.members) == 2 and len(view.contributors) == 2
        self.straight = self._pair and confirms_arrival

    def make_views(self, dtype: str, op: str, compression: str, count: int, chunk: int) -> OneShotViews:
        carrier = HOST_DTYPES[dtype].carrier
        posted = {m: self.memories[m].carve(POSTED, chunk, 0, count, carrier) for m in (*self.contributors, self.me)}
        return OneShotViews(posted[self.me], self._reduction(dtype, op, posted))

    def _reduction(self, dtype: str, op: str, posted: Mapping[int, Array]) -> Callable[[Array], None]:
        reduction, sources = self.reducer.get(dtype, op), [operand(dtype, posted[m]) for m in self.contributors]

        pair, theirs = of_two(reduction), sources[1 if self._pair and self._first else 0] if sources else None

        def reduce_mine_first(out: Array) -> None:
            pair(out, theirs, out=out)

        def reduce_mine_last(out: Array) -> None:
            pair(theirs, out, out=out)

        def reduce_mine_alone(out: Array) -> None:
            pair(out.copy(), theirs, out=out)

        made: Callable[[Array], None] = partial(reduction, sources)
        if self._pair:
            made = reduce_mine_first if self._first else reduce_mine_last
        if made is reduce_mine_first and isinstance(theirs, np.ndarray) and len(theirs) == 1:
            # Into its first input NumPy adds a single number as the last step of a sum, and keeps another NaN of two.
            made = reduce_mine_alone
        return made if is_operand(dtype) else lambda here: made(operand(dtype, here))

    @property
    def _first(self) -> bool:
        return self.contributors[0] == self.me

    def post(self, slot: Slot) -> None:
        if self.stages_input and not slot.straight:
            slot.views.mine[...] = slot.here

    def finish(self, slot: Slot) -> None:
        slot.views.reduce(slot.here)

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        return (0, slot.views.mine.nbytes) if self.contributes else (0, 0)


class TwoShotViews(NamedTuple):
    staged: Sequence[tuple[slice, Array]]  # what others read of my input, and its places: all but my slice
    itemsize: int
    slices: Mapping[int, tuple[int, int]]  # (start, stop) of each member's slice, in items of these views
    reduce: Callable[[Array], object] | None  # reduces my slice, of which mine is in the caller's; None: it is empty
    reduced: Sequence[tuple[slice, Any]]  # the slices of all, and their places


class TwoShot(Algorithm):
    name = "two-shot"
    straight = True  # all have read it before the whole can be copied

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        super().__init__(view, memories, reducer)
        self.members = view.members
        self.steps = (AlgorithmStep(REDUCED, (), REDUCED), AlgorithmStep(REDUCED, tuple(sorted(self.others)), 0))

    def make_views(self, dtype: str, op: str, compression: str, count: int, chunk: int) -> TwoShotViews:
        carrier = HOST_DTYPES[dtype].carrier
        bounds = dict(zip(self.members, slices(count, carrier.itemsize, len(self.members)), strict=True))
        start, stop = bounds[self.me]
        reduced = [
            (slice(a, b), self.memories[m].carve(REDUCED, chunk, a, b - a, carrier))
            for m, (a, b) in bounds.items()
            if a < b
        ]
        staged = [
            (slice(a, b), self.memories[self.me].carve(POSTED, chunk, a, b - a, carrier))
            for a, b in ((0, start), (stop, count))
            if a < b
        ]
        reduce = self._reduction(dtype, op, slice(start, stop), chunk) if start < stop else None
        return TwoShotViews(staged, carrier.itemsize, bounds, reduce, reduced)

    def _reduction(self, dtype: str, op: str, part: slice, chunk: int) -> Callable[[Array], object]:
        """Returns what reduces my slice of a chunk of the caller's."""
        carrier, reduction = HOST_DTYPES[dtype].carrier, self.reducer.get(dtype, op)

        def view(member: int, region: int) -> Any:
            memory = self.memories[member]
            return operand(dtype, memory.carve(region, chunk, part.start, part.stop - part.start, carrier))

        place = self.contributors.index(self.me) if self.contributes else len(self.contributors)
        before = [view(m, POSTED) for m in self.contributors[:place]]
        after = [view(m, POSTED) for m in self.contributors[place + 1 :]]
        out = view(self.me, REDUCED)
        if not self.contributes:
            return lambda here: reduction(before, out)
        if is_operand(dtype):
            return lambda here: reduction((*before, here[part], *after), out)
        return lambda here: reduction((*before, operand(dtype, here[part]), *after), out)

    def post(self, slot: Slot) -> None:
        if self.stages_input and not slot.straight:
            here = slot.here
            for part, place in slot.views.staged:
                place[...] = here[part]

    def step(self, slot: Slot) -> None:
        """Reduce my slice. My own input is not staged: nobody else reads it."""
        reduce = slot.views.reduce
        if reduce is not None:
            reduce(slot.here)

    def finish(self, slot: Slot) -> None:
        here = slot.here
        for part, source in slot.views.reduced:
            here[part] = source

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        if word != REDUCED and not self.contributes:
            return 0, 0
        start, stop = slot.views.slices[self.me if word == REDUCED else reader]
        return start * slot.views.itemsize, stop * slot.views.itemsize


class Copy(Algorithm):
    """The algorithm of chunks that a member holds FINAL, as the task says."""

    name = "copy"

    def make_views(self, dtype: str, op: str, compression: str, count: int, chunk: int) -> dict[int, Array]:
        carrier = HOST_DTYPES[dtype].carrier
        return {m: self.memories[m].carve(POSTED, chunk, 0, count, carrier) for m in (self.me, *self.others)}

    def reads(self, slot: Slot) -> Collection[int]:
        return (self._holder(slot),) if self._lacks(slot) else ()

    def post(self, slot: Slot) -> None:
        if self.others and self._holder(slot) == self.me:
            slot.views[self.me][...] = slot.here

    def finish(self, slot: Slot) -> None:
        if self._lacks(slot):
            slot.here[...] = slot.views[self._holder(slot)]

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        return (0, slot.views[self.me].nbytes) if self._holder(slot) == self.me else (0, 0)

    @staticmethod
    def _holder(slot: Slot) -> int:
        return slot.task.holder

    @staticmethod
    def _lacks(slot: Slot) -> bool:
        return slot.task.holder != slot.algorithm.me and slot.op.finals[slot.task.chunk] is None
