"""Packs and unpacks the parts of a batch, the task of a schedule, through the staging."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ftcomm.collective.algorithms.base import Algorithm, Array
from ftcomm.collective.checksum import fingerprint_of
from ftcomm.collective.resume import REDUCE
from ftcomm.collective.schedule import Batch, Part
from ftcomm.collective.scheduled import ScheduledOperation
from ftcomm.kernels.host.reduce import operand
from ftcomm.transport.segment import POSTED

if TYPE_CHECKING:
    from ftcomm.collective.operation import Operation
    from ftcomm.collective.pipeline import Slot


class ScheduledBatches(Algorithm):
    name = "batches"

    @staticmethod
    def _of(slot: Slot) -> tuple[ScheduledOperation, Batch]:
        """The op and the task of a slot: `Algorithms.of_task` gives this algorithm no others."""
        return cast("ScheduledOperation", slot.op), cast("Batch", slot.task)

    def views(self, op: Operation, count: int, chunk: int) -> None:
        """Return none: each batch has others."""

    def post(self, slot: Slot) -> None:
        self.pack(*self._of(slot), slot.chunk)

    def finish(self, slot: Slot) -> None:
        self.unpack(*self._of(slot), slot.chunk)

    def fingerprint(self, slot: Slot) -> tuple[int, int]:
        """Returns the first part that all take, and the checksum of all of these."""
        op, batch = self._of(slot)
        parts = op.schedule.parts
        shared = [move.part for move in batch.moves if parts[move.part].takers is None]
        if op.error is not None or not shared:
            return shared[0] if shared else 0, 0
        pieces = (op.array[parts[part].dest : parts[part].dest + parts[part].size] for part in shared)
        return shared[0], fingerprint_of(pieces)

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        batch = cast("Batch", slot.task)  # also once it is taken, when the slot has no op any more
        start, stop = batch.span(self.me, self.contributes, reader)
        return start * batch.itemsize, stop * batch.itemsize

    def pack(self, op: ScheduledOperation, batch: Batch, chunk: int) -> None:
        """Stage this member's parts: FINAL ones from the result, others from the caller's input. Make room for what
        `unpack` puts by, too: once this task is posted, a lack of memory would come too late."""
        me, parts, finals = self.me, op.schedule.parts, op.finals
        puts_by = self._puts_by(op)
        for number, holder, _, takers, at, size in batch.moves:
            if not (holder == me or (holder == REDUCE and self.contributes)) or takers == (me,):
                if puts_by and holder == REDUCE:
                    self._staged(op, me, chunk, at, size)
                continue
            array, begin = (op.array, parts[number].dest) if finals[number] else (op.source, parts[number].source)
            self._staged(op, me, chunk, at, size)[...] = array[begin : begin + size]

    def unpack(self, op: ScheduledOperation, batch: Batch, chunk: int) -> None:
        """Turn each part for this member FINAL, in one go."""
        me, parts, finals = self.me, op.schedule.parts, op.finals
        for number, holder, contributors, _, at, size in batch.moves:
            if finals[number] is not None:  # FINAL, or not for this member
                continue
            begin = parts[number].dest
            here = op.array[begin : begin + size]
            if holder == REDUCE:
                self._reduce(op, parts[number], chunk, at, here)
                finals[number] = self.contributors
                continue
            if holder != me:
                here[...] = self._staged(op, holder, chunk, at, size)
            elif op.source is not op.array:
                given = parts[number].source
                here[...] = op.source[given : given + size]
            finals[number] = contributors or (holder,)

    def _reduce(self, op: ScheduledOperation, part: Part, chunk: int, at: int, here: Array) -> None:
        """Reduce for this member alone, so that its own input is read where it lies, or put by first."""
        me, contributors = self.me, self.contributors
        mine = op.source[part.source : part.source + part.size]
        if self._puts_by(op):
            staged = self._staged(op, me, chunk, at, part.size)
            staged[...] = mine
            mine = staged
        sources = [mine if m == me else self._staged(op, m, chunk, at, part.size) for m in contributors]
        self.reducer.get(op.dtype, op.op)([operand(op.dtype, x) for x in sources], operand(op.dtype, here))

    def _puts_by(self, op: ScheduledOperation) -> bool:
        """Whether what is reduced for this member alone would overwrite its own input. In place that has to be one of
        the first two that are summed, see `ftcomm.kernels.host.reduce`; otherwise it is staged first."""
        return op.source is op.array and self.me in self.contributors[2:]

    def _staged(self, op: ScheduledOperation, member: int, chunk: int, at: int, size: int) -> Array:
        return self.memories[member].carve(POSTED, chunk, at, size, op.array.dtype)
