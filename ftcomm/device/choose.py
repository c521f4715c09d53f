"""From FTCOMM_ENGINE and FTCOMM_TRANSPORT to what runs ops and reduces. Imports no more than the choice needs.

engine             transport             who runs an op
host               any                   this process, which reduces as well
interpret, cuda    shm                   a kernel, from the first byte to the last (`ftcomm.device.exchange`)
                   auto, tcp, nixl       this process, and a kernel reduces (`ftcomm.device.reducer`)
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from ftcomm.kernels.host.reduce import Reducer
from ftcomm.settings import Settings
from ftcomm.transport.segment import HOST, Layout, Segment, putting

if TYPE_CHECKING:
    from ftcomm.device.device import Device
    from ftcomm.device.reducer import Place


class Opened(NamedTuple):
    segment: Segment  # this rank's memory
    device: Device | None  # what runs ops; None: this process does
    reducer: Reducer  # of this process


def open_engine(settings: Settings) -> Opened:
    """Raises `SettingsError` or `InitError` if the device cannot be had here, `TransportError` without memory."""
    if settings.kernels_run_ops:
        segment, device = _open_device(settings.engine, settings.staging)
        return Opened(segment, device, Reducer())
    layout = HOST if settings.engine == "host" else _REDUCED[settings.engine]
    segment = Segment(putting(layout) if settings.transport == "nixl" else layout)
    if settings.engine == "host":
        return Opened(segment, None, Reducer())
    return Opened(segment, None, _open_reducer(settings.engine, settings.max_sms, segment))


def _open_device(engine: str, staging: str) -> tuple[Segment, Device]:
    if engine == "interpret":
        from ftcomm.device.interpret import InterpretDevice
        from ftcomm.device.layout import INTERPRETED

        segment = Segment(INTERPRETED)
        return segment, InterpretDevice(segment)
    from ftcomm.device.probe import require_cuda

    require_cuda()
    from ftcomm.device.cuda import CudaDevice
    from ftcomm.device.layout import CUDA

    segment = Segment(CUDA)
    return segment, CudaDevice(segment, staging=staging)


def _open_reducer(engine: str, sms: int | None, segment: Segment) -> Reducer:
    if engine == "interpret":
        from ftcomm.device.interpreter import InterpretedPlace

        place: Place = InterpretedPlace(sms)
    else:
        from ftcomm.device.probe import require_cuda

        require_cuda()
        from ftcomm.device.mapped import MappedPlace

        place = MappedPlace(sms)
    from ftcomm.device.reducer import DeviceReducer

    reducer = DeviceReducer(place)
    reducer.use([segment.buffer])
    reducer.warm()
    return reducer


# Staging as the host has it; members of one group reduce alike.
_REDUCED: dict[str, Layout] = {
    engine: dataclasses.replace(HOST, magic=HOST.magic + 0x200 + kind, engine=f"{engine}, driven by hosts")
    for kind, engine in enumerate(("interpret", "cuda"))
}
