"""How a member gives and takes the parts of a batch, the task of a script, through the slots of one epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE
from ftcomm.collective.script import Batch, Part
from ftcomm.collective.scripted import Scripted
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import POSTED, Memory

Array = np.ndarray[Any, Any]


class Carrier:
    """What a `Stream` does with batches. Neither method waits."""

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        self._me = view.me
        self._contributors = view.contributors
        self._contributes = view.me in view.contributing
        self._memories = memories
        self._reducer = reducer

    def give(self, op: Scripted, batch: Batch, slot: int) -> None:
        """Stage this member's parts: what is FINAL here from the result, what is not from the caller's input."""
        me, parts, finals = self._me, op.script.parts, op.finals
        for number, holder, _, takers, at, size in batch.moves:
            if not (holder == me or (holder == REDUCE and self._contributes)) or takers == (me,):
                continue
            array, begin = (op.array, parts[number].dest) if finals[number] else (op.source, parts[number].source)
            self._staged(op, me, slot, at, size)[...] = array[begin : begin + size]

    def take(self, op: Scripted, batch: Batch, slot: int) -> None:
        """Each part that is for this member becomes FINAL, in one go."""
        me, parts, finals = self._me, op.script.parts, op.finals
        for number, holder, contributors, _, at, size in batch.moves:
            if finals[number] is not None:  # or it is none of this member's
                continue
            begin = parts[number].dest
            here = op.array[begin : begin + size]
            if holder == REDUCE:
                self._reduce(op, parts[number], slot, at, here)
                finals[number] = self._contributors
                continue
            if holder != me:
                here[...] = self._staged(op, holder, slot, at, size)
            elif op.source is not op.array:
                given = parts[number].source
                here[...] = op.source[given : given + size]
            finals[number] = contributors or (holder,)

    def _reduce(self, op: Scripted, part: Part, slot: int, at: int, here: Array) -> None:
        """For this member alone, so its own input comes from where it is. In place it has to be one of the first two
        that are summed, see `ftcomm.kernels.host.reduce`; else it is put by first."""
        me, contributors = self._me, self._contributors
        mine = op.source[part.source : part.source + part.size]
        if op.source is op.array and me in contributors[2:]:
            staged = self._staged(op, me, slot, at, part.size)
            staged[...] = mine
            mine = staged
        sources = [mine if m == me else self._staged(op, m, slot, at, part.size) for m in contributors]
        self._reducer.get(op.dtype, op.op)([operand(op.dtype, x) for x in sources], operand(op.dtype, here))

    def _staged(self, op: Scripted, member: int, slot: int, at: int, size: int) -> Array:
        return self._memories[member].carve(POSTED, slot, at, size, op.array.dtype)
