"""The memory of a device through which messages go by copy engines: `send` and `recv` with `copy_engine=True`.

The slots are those that channels of pairs have in the staging of the copies (`ftcomm.engines.gpu_kernel.copies`), which
a group does not use otherwise. They lie apart from the slots of the all-reduce, and have no words: what is in them is
said on the connections of messages (`ftcomm.p2p.slots`), which know nothing of epochs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ftcomm.engines.gpu_kernel.copies import SLOTS, SLOTS_IN_ALL
from ftcomm.engines.gpu_kernel.device import Device
from ftcomm.errors import ArgumentError, FtcommError, TransportError
from ftcomm.kernels.dtypes import BYTES, CODES
from ftcomm.p2p.slots import DeviceMemory


class DeviceSlots:
    """See `ftcomm.p2p.slots.Slots`; `nonce` is that of this rank's segment."""

    count = SLOTS_IN_ALL - SLOTS

    def __init__(self, device: Device, nonce: str) -> None:
        self.nonce = nonce
        self._device = device
        self._engines = device.mover()
        self.chunk = device.copies_chunk

    def place(self, x: Any) -> DeviceMemory | None:
        found = place(x, self._device.memory)
        if found is not None:
            if self._device.capturing():
                raise ArgumentError(
                    "send and recv with copy_engine=True cannot be captured: the host drives the copy engines"
                )
            self._device.await_caller()
        return found

    def reaches(self, nonce: str) -> bool:
        with self._device.using(nonce) as reached:
            return reached is not None

    def put(self, slot: int, source: int, nbytes: int) -> None:
        self.move(self._device.own.staging + self._at(slot), source, nbytes)

    def take(self, nonce: str, slot: int, to: int, nbytes: int) -> None:
        with self._device.using(nonce) as reached:
            if reached is None:
                raise TransportError("its memory is not mapped here any more")
            self.move(to, reached.staging + self._at(slot), nbytes)

    def move(self, to: int, source: int, nbytes: int) -> None:
        try:
            self._engines.copy(to, source, nbytes)
            self._engines.wait()
        except RuntimeError as error:
            raise FtcommError(f"a copy of {nbytes} bytes by the copy engines has failed: {error}") from error

    def _at(self, slot: int) -> int:
        """Offset in the staging of a rank."""
        return self._device.copies_at + (SLOTS + slot) * self.chunk


def place(x: Any, kind: str) -> DeviceMemory | None:
    """Returns where an array lies that is one run of bytes, as they are to be sent, in memory of a device of `kind`, or
    pinned."""
    if isinstance(x, torch.Tensor):
        if x.layout is not torch.strided or x.is_quantized or x.is_conj() or x.is_neg() or not x.is_contiguous():
            return None
        if x.device.type != kind and not x.is_pinned():
            return None
        name, address, nbytes = str(x.dtype).removeprefix("torch."), x.data_ptr(), x.numel() * x.element_size()
    elif type(x) is np.ndarray and kind == "cpu":
        if x.dtype.hasobject or not (x.flags.c_contiguous and x.flags.writeable):
            return None
        name, address, nbytes = str(x.dtype), x.ctypes.data, x.nbytes
    else:
        return None
    return DeviceMemory(address, nbytes, name if name in CODES else BYTES, x)
