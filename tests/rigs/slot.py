"""A slot without a pipeline: for tests that play an algorithm through by itself."""

from __future__ import annotations

from ftcomm.collective.algorithms.base import Algorithm
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import Slot


def slot_of(algorithm: Algorithm, op: Operation) -> Slot:
    """The first task of an op of one chunk."""
    slot = Slot(chunk=0)
    slot.index = slot.number = 0
    slot.op, slot.task, slot.algorithm, slot.straight = op, op.tasks[0], algorithm, False
    slot.here = op.array
    slot.views = algorithm.views(op, len(op.array), 0)
    return slot
