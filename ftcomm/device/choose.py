"""From FTCOMM_ENGINE to a segment and what runs kernels on it. Imports no more than the choice needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcomm.transport.segment import Segment

if TYPE_CHECKING:
    from ftcomm.device.device import Device


def open_device(engine: str, staging: str) -> tuple[Segment, Device | None]:
    """This rank's memory, and its device; None: this process reduces by itself. `staging`: see `Settings`.

    Raises `SettingsError` or `InitError` if the device cannot be had here, `TransportError` if there is no memory.
    """
    if engine == "interpret":
        from ftcomm.device.interpret import InterpretDevice
        from ftcomm.device.layout import INTERPRETED

        segment = Segment(INTERPRETED)
        return segment, InterpretDevice(segment)
    if engine == "cuda":
        from ftcomm.device.probe import require_cuda

        require_cuda()
        from ftcomm.device.cuda import CudaDevice
        from ftcomm.device.layout import CUDA

        segment = Segment(CUDA)
        return segment, CudaDevice(segment, staging=staging)
    return Segment(), None
