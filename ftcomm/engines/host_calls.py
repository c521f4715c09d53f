"""The calls of a group whose ops the host drives: which op each of them is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftcomm.arrays import stage
from ftcomm.arrays.flat import to_read, to_write
from ftcomm.collective import schedule
from ftcomm.collective.algorithms.base import Array
from ftcomm.collective.operation import Operation
from ftcomm.collective.scheduled import ScheduledOperation
from ftcomm.engines.base import CollectiveCall, Finish, ReducingGroup
from ftcomm.transport.segment import CHUNK, slot_payload


class HostCalls:
    """The `CallEngine` of ops that the host drives: all calls are there, and arrays of a GPU go through host memory.

    `members`: the most that the group may have, the same number on all of them.
    """

    by_stream = False

    def __init__(self, members: int) -> None:
        self._payload = slot_payload(members)

    def all_reduce(
        self, x: Any, op: str, atomic: bool, compression: str, max_sms: int | None
    ) -> tuple[Operation, Finish | None]:
        staged = stage(x)
        return Operation(staged.flat, staged.dtype, op, CHUNK, atomic, compression), staged.finish

    def may_move(self, call: str) -> None:
        """All are there."""

    to_write, to_read, stage = staticmethod(to_write), staticmethod(to_read), staticmethod(stage)

    def collective(
        self, call: CollectiveCall, array: Array, source: Array, dtype: str, count: int, size: int
    ) -> ScheduledOperation:
        """See `ftcomm.engines.base.CallEngine`. What only moves has come as bytes."""
        kind, roster, me, root, op, counts = call
        nbytes, payload = count * size, self._payload
        in_place = kind in ("broadcast", "reduce")
        if root is not None:
            if kind == "broadcast":
                plan = schedule.broadcast(nbytes, roster, me, root, CHUNK, 1)
            elif kind == "reduce":
                plan = schedule.reduce(count, roster, me, root, payload, size)
            elif kind == "gather":
                plan = schedule.gather(nbytes, roster, me, root, payload, 1)
            else:
                plan = schedule.scatter(nbytes, roster, me, root, CHUNK, 1)
        elif kind == "allgather":
            in_place = _is_part(source, array, me)
            plan = schedule.allgather(nbytes, roster, me, in_place, payload, 1)
            source = array if in_place else source
        elif kind == "reduce_scatter":
            in_place = _is_part(array, source, me)
            plan = schedule.reduce_scatter(count, roster, me, in_place, CHUNK, size)
            array = source if in_place else array
        elif kind == "alltoall":
            plan = schedule.alltoall(tuple(tuple(n * size for n in row) for row in counts), roster, me, CHUNK, 1)
            count = sum(map(sum, counts))
        else:
            plan = schedule.barrier(roster, me)
        if not in_place and np.may_share_memory(source, array):
            source = source.copy()  # the result may overwrite it
        return ScheduledOperation(plan, source, array, dtype, op, count, size)

    def allgather_by_copies(self, group: ReducingGroup, out: Any, x: Any) -> bool:
        return False


def _is_part(part: Array, whole: Array, rank: int) -> bool:
    """Whether the memory of `part` is that of this rank's part of `whole`."""
    here = whole[rank * part.size : (rank + 1) * part.size]
    return here.nbytes == part.nbytes and here.__array_interface__["data"][0] == part.__array_interface__["data"][0]
