"""One-shot and two-shot for elements that travel as `ftcomm.collective.compression` encodes them, in blocks.

In one-shot each member encodes the sums itself, and decodes what it has encoded, so that all have the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftcomm.collective.algorithms.base import Algorithm, AlgorithmStep
from ftcomm.collective.plan import GroupView, slices
from ftcomm.kernels.host.fp8 import BLOCK, RECORD, Packed
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.transport.segment import POSTED, REDUCED, Memory

if TYPE_CHECKING:
    from ftcomm.collective.pipeline import Slot


class CompressedViews(NamedTuple):
    """Views in blocks, except the slices of `reduced`, which are elements of the caller's."""

    mine: Packed
    sources: Sequence[Packed]  # the inputs of all; in two-shot those of my slice
    slices: Mapping[int, tuple[int, int]]
    out: Packed
    reduced: Sequence[tuple[slice, Packed]]


class CompressedOneShot(Algorithm):
    name = "compressed one-shot"

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        super().__init__(view, memories, reducer)
        self.members = view.members

    def make_views(self, dtype: str, op: str, compression: str, count: int, chunk: int) -> CompressedViews:
        blocks = -(-count // BLOCK)
        bounds = dict(zip(self.members, slices(blocks, RECORD.itemsize, len(self.members)), strict=True))

        def view(member: int, region: int, start: int, stop: int) -> Packed:
            return Packed(self.memories[member].carve(region, chunk, start, stop - start, RECORD))

        mine = bounds[self.me]
        start, stop = mine if self.steps else (0, blocks)
        return CompressedViews(
            view(self.me, POSTED, 0, blocks),
            [view(m, POSTED, start, stop) for m in self.contributors],
            bounds,
            view(self.me, REDUCED, *mine),
            [(slice(a * BLOCK, b * BLOCK), view(m, REDUCED, a, b)) for m, (a, b) in bounds.items() if a < b],
        )

    def post(self, slot: Slot) -> None:
        if self.contributes:
            self.reducer.packer.encode(slot.op.dtype, slot.here, slot.views.mine)

    def finish(self, slot: Slot) -> None:
        op = slot.op
        self.reducer.packer.reduce_decoded(slot.views.sources, op.op, op.dtype, slot.here)

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        return (0, len(slot.views.mine) * RECORD.itemsize) if self.contributes else (0, 0)


class CompressedTwoShot(CompressedOneShot):
    name = "compressed two-shot"

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        super().__init__(view, memories, reducer)
        self.steps = (AlgorithmStep(REDUCED, (), REDUCED), AlgorithmStep(REDUCED, tuple(sorted(self.others)), 0))

    def step(self, slot: Slot) -> None:
        """Reduce my slice."""
        views = slot.views
        start, stop = views.slices[self.me]
        if start < stop:
            self.reducer.packer.reduce(views.sources, slot.op.op, views.out)

    def finish(self, slot: Slot) -> None:
        here, dtype = slot.here, slot.op.dtype
        for part, source in slot.views.reduced:
            self.reducer.packer.decode(source, dtype, here[part])

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        if word != REDUCED and not self.contributes:
            return 0, 0
        start, stop = slot.views.slices[self.me if word == REDUCED else reader]
        return start * RECORD.itemsize, stop * RECORD.itemsize
