"""The engine whose ops a kernel runs, from the first byte to the last, in memory that all its members share."""

from __future__ import annotations

import dataclasses
from typing import Any

from ftcomm.arrays import Staged
from ftcomm.arrays.flat import NONE, Flat
from ftcomm.collective.watchdog import Deadlines
from ftcomm.engines.base import CollectiveCall, Events, Finish, ReducingGroup
from ftcomm.engines.gpu_kernel.collective import CollectiveOperation
from ftcomm.engines.gpu_kernel.device import Device
from ftcomm.engines.gpu_kernel.exchange import DeviceExchange
from ftcomm.engines.gpu_kernel.gather import allgather
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.engines.gpu_kernel.slots import DeviceSlots
from ftcomm.errors import ArgumentError
from ftcomm.kernels.host import arithmetic
from ftcomm.p2p.slots import Slots
from ftcomm.recorder.recorder import GroupRecorder
from ftcomm.settings import Settings
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import Segment

_SETTLE = 2.0  # s for what was launched to end


class KernelEngine:
    """See `ftcomm.engines.base.GroupEngine`. `device` was made with `segment`."""

    by_stream = True
    transport = "shm"

    def __init__(self, settings: Settings, segment: Segment, device: Device) -> None:
        self._settings = settings
        self.segment, self.device = segment, device
        self.arithmetic = arithmetic.own()
        self.slots: Slots | None = DeviceSlots(device, segment.nonce)

    def exchange(self, events: Events, recorder: GroupRecorder) -> DeviceExchange:
        deadlines = Deadlines.of(self._settings.timeouts)
        self._exchange = DeviceExchange(
            self._settings.replica,
            self.device,
            deadline_floor=deadlines.floor,
            deadline_ceiling=deadlines.ceiling,
            give_up=deadlines.give_up,
            on_stall=events.on_stall,
            on_failed=events.on_failed,
            recorder=recorder,
        )
        return self._exchange

    def all_reduce(
        self, x: Any, op: str, atomic: bool, compression: str, max_sms: int | None
    ) -> tuple[KernelOperation, Finish | None]:
        staged = self.device.stage(x)
        most = self._settings.max_sms if max_sms is None else max_sms
        chunk = self.device.layout.chunk
        return KernelOperation(staged.flat, staged.dtype, op, chunk, atomic, compression, most), staged.finish

    def warm(self) -> None:
        """Do nothing: a variant of the kernel is loaded before its first op is queued."""

    def reach(self, peer: Peer) -> None:
        self.device.reach(peer)

    def leave(self, peer: Peer) -> None:
        self.device.leave(peer)

    def may_move(self, call: str) -> None:
        if self.device.capturing():
            raise ArgumentError(f"{call} cannot be captured into a graph, only allreduce can; call it outside")

    def to_write(self, x: Any) -> Flat:
        return self.device.stage_bytes(x, writes=True)

    def to_read(self, x: Any) -> Flat:
        return dataclasses.replace(self.device.stage_bytes(x, writes=False), finish=None)

    def stage(self, x: Any) -> Staged:
        return self.device.stage(x)

    def collective(
        self, call: CollectiveCall, array: Any, source: Any, dtype: str, count: int, size: int
    ) -> CollectiveOperation:
        device, chunk, most = self.device, self.device.layout.chunk, self._settings.max_sms
        array, source = (self.to_read(x).flat if x is NONE.flat else x for x in (array, source))
        if array is not source and self._overlap(array, source) and not self._in_place(call, array, source):
            source = device.duplicate(source)
        addresses = device.address(array), device.address(source)
        op = CollectiveOperation(call, array, source, dtype, count, size, chunk, addresses, most)
        op.table = device.words(op.pieces) if op.pieces else None
        return op

    def _in_place(self, call: CollectiveCall, array: Any, source: Any) -> bool:
        """Whether the smaller of both is this rank's part of the other, where it may be."""
        gathers = call.kind in ("allgather", "gather")
        part, whole = (source, array) if gathers else (array, source)
        at = self.device.address(whole) + call.rank * part.nbytes
        return (gathers or call.kind in ("reduce_scatter", "scatter")) and self.device.address(part) == at

    def _overlap(self, a: Any, b: Any) -> bool:
        at, to = self.device.address(a), self.device.address(b)
        return bool(at < to + b.nbytes and to < at + a.nbytes)

    def allgather_by_copies(self, group: ReducingGroup, out: Any, x: Any) -> bool:
        allgather(group, self.device, self._exchange, out, x)
        return True

    def close(self) -> None:
        self.device.settle(_SETTLE)
        self.device.close()
        self.segment.close()
