"""The engine whose ops a kernel runs, from the first byte to the last, in memory that all its members share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcomm.engines.base import Events, Finish
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

if TYPE_CHECKING:
    from ftcomm.calls import Calls

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
        times = self._settings.timeouts
        self._exchange = DeviceExchange(
            self._settings.replica,
            self.device,
            deadline_floor=times.op_floor,
            deadline_ceiling=times.op,
            give_up=times.give_up,
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
        name = self.device.layout.engine
        raise ArgumentError(
            f"{call} is not there with FTCOMM_ENGINE={name}, whose kernels only all-reduce; set FTCOMM_ENGINE=host or "
            f"{name.replace('kernel', 'reduce')} on all ranks (or, of allgather, copy_engine=True)"
        )

    def allgather_by_copies(self, group: Calls, out: Any, x: Any) -> bool:
        allgather(group, self.device, self._exchange, out, x)
        return True

    def close(self) -> None:
        self.device.settle(_SETTLE)
        self.device.close()
        self.segment.close()
