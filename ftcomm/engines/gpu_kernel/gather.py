"""Allgather by copy engines, which takes no multiprocessor: `copy_engine=True` on a device.

Copies move bytes within one epoch and keep no account of them, so a loss breaks them off, on some members maybe, while
others have all. For the outcome to be the same on all survivors, all-reduces say what it is, of a few bytes each:

    1  of nothing, but compared between the members are the bytes of the call
    2  the copies, in the epoch in force; they end well, or when that epoch does
    3  of nothing. Who failed in 2 comes to it in a later epoch, so it ends in a later epoch on all
    4  the minimum of: did 2 end well here, and is its epoch still in force? who of the roster is still there?

If a member failed in 2 then by 3 all others find in 4 that the epoch is another, and so it does not matter whether the
input of that member counts, as it does not while it catches up. If none failed, 4 may still find so: then some member
of the roster was lost at about the same time, and the call fails on all. What was copied is not defined then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftcomm.engines.base import ReducingGroup
from ftcomm.engines.gpu_kernel.copies import Copies
from ftcomm.engines.gpu_kernel.device import Device
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.engines.gpu_kernel.slots import place
from ftcomm.errors import ArgumentError, LostError
from ftcomm.kernels.call_codes import KINDS, MOVES
from ftcomm.kernels.dtypes import BYTES, CODES
from ftcomm.p2p.slots import DeviceMemory

if TYPE_CHECKING:
    from ftcomm.engines.gpu_kernel.exchange import DeviceExchange


def allgather(group: ReducingGroup, device: Device, exchange: DeviceExchange, out: Any, x: Any) -> None:
    """See `ftcomm.groups.calls.Calls.allgather`. Blocks until all is there. One call at a time in a process."""
    roster = group.roster
    if device.capturing():
        raise ArgumentError("allgather(copy_engine=True) cannot be captured: the host drives the copy engines")
    mine, whole = memory(x, "x", device.memory), memory(out, "out", device.memory)
    if whole.nbytes != len(roster) * mine.nbytes or whole.dtype != mine.dtype:
        raise ArgumentError(
            f"allgather of {mine.nbytes} bytes of {mine.dtype} among {len(roster)} ranks needs out of "
            f"{len(roster) * mine.nbytes}; got {whole.nbytes} of {whole.dtype}"
        )
    to = [whole.address + rank * mine.nbytes for rank in range(len(roster))]
    apart = mine.address + mine.nbytes <= whole.address or whole.address + whole.nbytes <= mine.address
    if not apart and mine.address != to[group.rank]:
        raise ArgumentError(
            "allgather(copy_engine=True): x overlaps out, and is not this rank's part of it; pass x.copy()"
        )

    def body(copies: Copies) -> int:
        return copies.allgather(mine.address, to, [mine.nbytes] * len(roster), exchange.give_up)

    _compare(device, exchange, mine.nbytes)
    while True:
        epoch = exchange.copy(roster, body)
        group.allreduce(np.zeros(1, np.uint8), "max")
        lost = _agree_on_lost(group, exchange, roster, epoch)
        if lost is None:
            return
        if lost:
            who = f"replica{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            raise LostError(
                f"allgather(copy_engine=True): {who} of ranks {roster} went before all had the parts of all"
            )


def _compare(device: Device, exchange: DeviceExchange, nbytes: int) -> None:
    """Raises `MismatchError` unless all members gather as many bytes."""
    staged = device.stage(np.zeros(1, np.uint8))
    op = KernelOperation(staged.flat, staged.dtype, "max", device.layout.chunk)
    op.call = nbytes << 16 | CODES[BYTES] << 8 | MOVES
    exchange.run(op)
    if not op.wait(exchange.give_up) or op.error is not None:
        raise op.error or LostError("allgather(copy_engine=True) was not begun by all members in time")


def copies_detail(call: int) -> int:
    """The collective that a device has compared the call of, for `ftcomm.collective.schedule.explained`."""
    return KINDS.index("allgather") if call & 0xFF == MOVES else 0


def _agree_on_lost(
    group: ReducingGroup, exchange: DeviceExchange, roster: Sequence[int], epoch: int | None
) -> list[int] | None:
    """Agrees on the copies of `epoch`: None if they are complete on all, else the lost of the roster. The same on
    all."""
    view = exchange.view
    told = np.array([epoch == view.epoch, *(member in view.members for member in roster)], np.uint8)
    group.allreduce(told, "min")
    return None if told[0] else [member for member, here in zip(roster, told[1:], strict=True) if not here]


def memory(x: Any, name: str, kind: str) -> DeviceMemory:
    """Returns where a contiguous array lies, of any dtype, in memory of a device of `kind`, or pinned. Raises
    `ArgumentError`."""
    found = place(x, kind)
    if found is not None:
        return found
    said = f"a tensor on {x.device} of strides {x.stride()}" if isinstance(x, torch.Tensor) else type(x).__name__
    raise ArgumentError(
        f"allgather(copy_engine=True) needs {name} as a contiguous array in memory of {kind}; got {said}"
    )
