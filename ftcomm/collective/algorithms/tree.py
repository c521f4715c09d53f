"""The tree: an all-reduce of a small op in a group of many members, in which partial sums go up and the result down.

    place           0            1            2            3            with a fan of 1: a line of 4 members
    POSTED          -            -            -            3            its own input
    GATHERED        -            1 + (2+3)    2 + 3        -            the sum of its subtree, for its parent
    ANNOUNCED       0 + (1+2+3)  the same     the same     -            the result, for its children

Each member adds its own input, which it reads where it lies, and what its children have, in the order of their numbers;
so the order of a sum follows from who contributes and from the members of the view alone. The top makes the result, and
all others copy its bytes. Halves are summed in float32 on the way up, and rounded once.

The caller's buffer stays INPUT until the result has come down to it. Partial sum and result have the same place in the
staging: the result comes from the parent, which has read the sum before.

`ftcomm.collective.tree` says who is whose child, and what the words say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ftcomm.collective.algorithms.base import Algorithm, Array
from ftcomm.collective.plan import GroupView
from ftcomm.collective.tree import TreeBranch, tree
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import ANNOUNCED, GATHERED, POSTED, REDUCED, Memory

if TYPE_CHECKING:
    from ftcomm.collective.operation import Operation
    from ftcomm.collective.pipeline import Slot


class TreeViews(NamedTuple):
    mine: Array  # my posted input
    below: tuple[Any, ...]  # what my children have, in order
    sum: Any  # of my subtree; at the top, the result
    result: Array  # in my staging
    above: Array  # the result, where I copy it from
    partial: int  # bytes of an element of a partial sum


class Tree(Algorithm):
    """The algorithm has no steps: its tasks wait for what the first task of every op goes through in such a view."""

    name = "tree"

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer, place: TreeBranch) -> None:
        super().__init__(view, memories, reducer)
        places = tree(view.members, view.tuning.tree_fan)
        self._place, self._leaf = place, not place.children
        self._top = place.parent < 0
        self._giving = [m for m in place.children if not view.contributing.isdisjoint(places[m].below)]
        self._gives = not view.contributing.isdisjoint(place.below)
        self._divisor = len(view.contributors)

    def handles(self, op: Operation) -> bool:
        """Whether a partial sum of `op` can be passed on, and there is room for it."""
        kind = HOST_DTYPES[op.dtype].kind
        room = HOST_DTYPES[self._partial(op.dtype)].itemsize * op.count
        return len(op.finals) == 1 and not (kind == "int" and op.op == "avg") and room <= self.memories[self.me].chunk

    @staticmethod
    def _partial(dtype: str) -> str:
        """Returns the dtype of partial sums."""
        return "float32" if HOST_DTYPES[dtype].kind == "half" else dtype

    def make_views(self, dtype: str, op: str, compression: str, count: int, chunk: int) -> TreeViews:
        carrier, held = HOST_DTYPES[dtype].carrier, self._partial(dtype)
        partial = HOST_DTYPES[held].carrier

        def below(member: int) -> Any:
            memory = self.memories[member]
            if member in self._place.leaves:
                return operand(dtype, memory.carve(POSTED, chunk, 0, count, carrier))
            return operand(dtype, memory.carve(REDUCED, chunk, 0, count, partial), held)

        own, above = self.memories[self.me], self.memories[self.me if self._top else self._place.parent]
        result = own.carve(REDUCED, chunk, 0, count, carrier)
        summed = result if self._top else own.carve(REDUCED, chunk, 0, count, partial)
        return TreeViews(
            own.carve(POSTED, chunk, 0, count, carrier),
            tuple(below(member) for member in self._giving),
            operand(dtype, summed, None if self._top else held),
            result,
            above.carve(REDUCED, chunk, 0, count, carrier),
            partial.itemsize,
        )

    def reads(self, slot: Slot) -> Collection[int]:
        return ()

    def post(self, slot: Slot) -> None:
        if self._leaf and self.contributes:
            slot.views.mine[...] = slot.here

    def gather(self, slot: Slot) -> None:
        """Sum what this subtree has; all of it is posted."""
        if not self._gives:
            return
        op, views = slot.op, slot.views
        sources = (operand(op.dtype, slot.here), *views.below) if self.contributes else views.below
        kind = op.op if self._top or op.op != "avg" else "sum"
        self.reducer.get(op.dtype, kind, self._divisor)(sources, views.sum)

    def announce(self, slot: Slot) -> None:
        """Pass the result on."""
        slot.views.result[...] = slot.views.above

    def finish(self, slot: Slot) -> None:
        slot.here[...] = slot.views.above

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        views, whole = slot.views, slot.views.mine.nbytes
        if word == ANNOUNCED:
            return (0, whole) if reader in self._place.children else (0, 0)
        if reader != self._place.parent:
            return 0, 0
        if word == GATHERED:
            return (0, len(views.mine) * views.partial) if self._gives else (0, 0)
        return (0, whole) if self._leaf and self.contributes else (0, 0)
