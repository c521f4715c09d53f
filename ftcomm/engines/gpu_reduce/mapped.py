"""An NVIDIA GPU that reduces host memory: a `ReduceDevice`, see `ftcomm.engines.gpu_reduce.reducer`.

Mapped memory is page-locked, and the GPU reads and writes it over PCIe or NVLink-C2C: each source crosses once, and so
does the result. An array on the GPU comes and goes through pinned memory (`ftcomm.arrays`), which kernels reach, too.

Nothing here has a kernel wait for the host or for others, so calls that wait for the GPU are harmless: the thread that
drives makes them, one at a time, on a stream of its own, of the highest priority.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator

import torch
from cupy.cuda import runtime
from triton.errors import TritonError

from ftcomm.engines.gpu.driver import event_ended, relaxed, until
from ftcomm.engines.gpu.pinned import PORTABLE_MAPPED, Pinned
from ftcomm.errors import FtcommError, TransportError
from ftcomm.kernels.device.reduce import reduce_spans
from ftcomm.kernels.spans import MemorySpan

_KERNEL_TIMEOUT = 60.0  # s that the kernels of others may hold up one of ours; the rank ends then
_REACHABLE = (1, 2, 3)  # cudaMemoryTypeHost, Device, Managed


class CudaReduceDevice:
    """Reduces on the current GPU of PyTorch, which stays that of this rank. Call
    `ftcomm.engines.gpu.probe.require_cuda` first.

    `sms`: programs of a kernel, at most; None: as many as pay.
    """

    def __init__(self, sms: int | None = None) -> None:
        self._index = torch.cuda.current_device()
        self._sms = sms
        properties = torch.cuda.get_device_properties(self._index)
        self.device = f"cuda:{self._index}"
        self.kind = f"{properties.name} {properties.major}.{properties.minor} {importlib.metadata.version('triton')}"
        with self._on():
            self._stream = torch.cuda.Stream(self._index, priority=-100)  # the highest there is
            self._done = torch.cuda.Event()

    @contextlib.contextmanager
    def _on(self) -> Iterator[None]:
        """This rank's GPU is the current one of this thread, for PyTorch and for CuPy."""
        with torch.cuda.device(self._index), relaxed():
            runtime.setDevice(self._index)
            yield

    def map(self, address: int, nbytes: int) -> None:
        try:
            with self._on():
                runtime.hostRegister(address, nbytes, PORTABLE_MAPPED)
        except runtime.CUDARuntimeError as error:
            raise TransportError(
                f"cannot lock {nbytes >> 10} KB of staging for the GPU: {error}. Raise the limit of locked memory "
                "(ulimit -l), or use FTCOMM_ENGINE=host."
            ) from error

    def unmap(self, address: int) -> None:
        with self._on():
            runtime.hostUnregister(address)

    def reach(self, address: int, nbytes: int) -> int:
        with self._on():
            there = [runtime.pointerGetAttributes(at) for at in (address, address + nbytes - 1)]
        if any(found.type not in _REACHABLE for found in there):
            return 0
        begin, last = (int(found.devicePointer) for found in there)
        return begin if last - begin == nbytes - 1 else 0

    def scratch(self, nbytes: int) -> tuple[int, int]:
        with self._on():
            pinned = Pinned(nbytes)
            return pinned.address, int(runtime.pointerGetAttributes(pinned.address).devicePointer)

    def reduce(self, spans: list[MemorySpan], w: int, op: str, divisor: int | None) -> None:
        try:
            with self._on():
                with torch.cuda.stream(self._stream):
                    reduce_spans(spans, w, op, divisor, self._sms)
                    self._done.record(self._stream)
                ended = until(lambda: event_ended(self._done.cuda_event), _KERNEL_TIMEOUT)
        except (RuntimeError, TritonError) as error:
            raise FtcommError(f"the GPU cannot reduce: {error}; restart this process") from error
        if not ended:
            raise FtcommError(
                f"the GPU has not reduced a chunk within {_KERNEL_TIMEOUT:g} s: other kernels hold all of it. Let the "
                "script start nothing that waits for an op of ftcomm, or use FTCOMM_ENGINE=host."
            )
