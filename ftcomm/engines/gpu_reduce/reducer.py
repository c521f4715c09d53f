"""Reductions by a kernel of a device, of memory of the host: for ops that the host drives and the device reduces.

The host's engine (`ftcomm.collective.exchange`) moves everything as ever, by whatever transport; of its work this takes
the sums alone. So plan, words, resume rules and accounts are those of FTCOMM_ENGINE=host:

    driver thread    posts, sends, receives, waits ... all have posted ... reduce ... raises the word, sends ...
    device                                                               reads the staging of all, writes the sum

The kernel reads the staging where the transport has put it: this rank's segment and the mirrors of its peers are
*mapped*, so that the device has them at addresses of its own, as it has pinned memory. What it cannot reach, as the
segment of another process, which this one may only read, or an array of the host, is copied to and from mapped memory.

The driver waits until the kernel has ended before it raises the word that announces the result: so the words keep their
order, no member reads what is not there yet, and a driver that has stopped has no kernel under way. A kernel waits for
nothing. Bits are those of the host's reductions (tests/kernels), but for which NaN is passed on.

What no kernel has is reduced by the host: fp8 elements and `compression="fp8"`, sums that are held in other floats than
their inputs (halves that are passed on, by `compression="fp32"` or in a group of many members).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from ftcomm.kernels.dtypes import DTYPES, unsupported
from ftcomm.kernels.host import arithmetic
from ftcomm.kernels.host.reduce import Reducer, Reduction
from ftcomm.kernels.host.tensors import HostArray
from ftcomm.kernels.spans import MOST_SOURCES, MemorySpan

_APART = 256  # bytes; arrays in scratch memory begin at multiples of it
_LEAST = 1 << 20  # bytes of scratch memory, so that it grows seldom


class ReduceDevice(Protocol):
    """A device, as far as it reduces. For the driving thread alone, but for `kind`."""

    kind: str  # equal on two devices: they give the same bits for the same inputs
    device: str  # as PyTorch names it

    def map(self, address: int, nbytes: int) -> None:
        """Let kernels reach this memory of the process. Raises `TransportError`."""

    def unmap(self, address: int) -> None:
        """No longer; no kernel runs."""

    def reach(self, address: int, nbytes: int) -> int:
        """The address for kernels; 0 if they cannot reach all of it."""

    def scratch(self, nbytes: int) -> tuple[int, int]:
        """Memory that both reach, for good: its address for the host and that for kernels."""

    def reduce(self, spans: list[MemorySpan], w: int, op: str, divisor: int | None) -> None:
        """See `ftcomm.kernels.device.reduce.reduce_spans`. Blocks until it has ended. Raises `FtcommError`."""


class DeviceReducer(Reducer):
    """The `Reducer` of an exchange that the host drives and for which `device` reduces."""

    def __init__(self, device: ReduceDevice) -> None:
        super().__init__()
        self._device = device
        self._kernels: dict[tuple[str, str, int | None], Reduction] = {}
        self._wanted: dict[int, memoryview] = {}  # to be mapped, by address; replaced as a whole
        self._mapped: dict[int, memoryview] = {}
        self._room = 0  # bytes of scratch memory
        self._host = self._there = 0  # where it begins, for the host and for kernels

    @property
    def arithmetic(self) -> str:
        own = arithmetic.own()  # the host's, as it reduces what no kernel has
        return own and hashlib.sha256(f"{own} {self._device.kind}".encode()).hexdigest()[:16]

    def use(self, buffers: Iterable[memoryview]) -> None:
        # To map and unmap may wait for what runs on the device, which is for the thread that drives. The segment of
        # another process is not mapped: that takes memory which this one may write to.
        self._wanted = {_address(buffer): buffer for buffer in buffers if not buffer.readonly}

    def warm(self) -> None:
        """Map what is used now. Blocks. Raises `TransportError`."""
        self._map()

    def get(self, dtype: str, op: str, divisor: int | None = None) -> Reduction:
        key = (dtype, op, divisor)
        found = self._kernels.get(key)
        if found is None:
            found = by_host = super().get(dtype, op, divisor)
            if unsupported(dtype, op) is None:
                found = partial(self._reduce, by_host, dtype, op, divisor)
            self._kernels[key] = found
        return found

    def _reduce(
        self, by_host: Reduction, dtype: str, op: str, divisor: int | None, sources: Sequence[HostArray], out: HostArray
    ) -> None:
        w = len(sources)
        moves = w == 1 and (op != "avg" or divisor in (None, 1))
        if moves or w > MOST_SOURCES or any(source.dtype != out.dtype for source in sources):
            by_host(sources, out)
            return
        count = len(out)
        if not count:
            return
        if self._mapped is not self._wanted:
            self._map()
        held = _held(dtype, out)
        nbytes = count * DTYPES[held].itemsize
        where = [_begin(array) for array in (*sources, out)]
        there = [self._device.reach(address, nbytes) for address in where]
        copied = [i for i, address in enumerate(there) if not address]
        host = self._reserve(copied, nbytes, there) if copied else {}
        for i in copied:
            if i < w:
                ctypes.memmove(host[i], where[i], nbytes)
        device = self._device.device
        spans = [MemorySpan(address, count, held, device) for address in there]
        self._device.reduce(spans, w, op, divisor)
        if w in host:
            ctypes.memmove(where[w], host[w], nbytes)

    def _map(self) -> None:
        wanted = self._wanted
        for address in self._mapped.keys() - wanted.keys():
            self._device.unmap(address)
        mapped = {address: buffer for address, buffer in self._mapped.items() if address in wanted}
        self._mapped = mapped  # what is mapped, should the next one fail
        for address, buffer in wanted.items():
            if address not in mapped:
                self._device.map(address, buffer.nbytes)
                mapped[address] = buffer
        self._mapped = wanted

    def _reserve(self, which: Sequence[int], nbytes: int, there: list[int]) -> dict[int, int]:
        """Scratch memory for each array of `which`: its address for the host, and that for kernels into `there`."""
        apart = -(-nbytes // _APART) * _APART
        if self._room < len(which) * apart:
            self._room = max(_LEAST, len(which) * apart)
            self._host, self._there = self._device.scratch(self._room)
        for number, i in enumerate(which):
            there[i] = self._there + number * apart
        return {i: self._host + number * apart for number, i in enumerate(which)}


def _held(dtype: str, array: HostArray) -> str:
    """The dtype of the elements of what `ftcomm.kernels.host.reduce.operand` has made."""
    return dtype if isinstance(array, np.ndarray) else str(array.dtype).removeprefix("torch.")


def _begin(array: HostArray) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
