"""A `ReduceDevice` without a GPU: its kernels run in Triton's interpreter, on host memory. For tests."""

from __future__ import annotations

import threading

import numpy as np

from ftcomm.engines.gpu.interpreter import interpreter  # first: Triton is to interpret

# isort: split
from ftcomm.errors import FtcommError
from ftcomm.kernels.device.reduce import reduce_spans
from ftcomm.kernels.spans import MemorySpan

_one = threading.Lock()  # around a launch of one of several exchanges in a process; a launch waits for no other member


class InterpretedReduceDevice:
    """See `ftcomm.engines.gpu_reduce.reducer.ReduceDevice`. What is not mapped cannot be reached, as on a GPU."""

    kind = "interpreted"
    device = "cpu"

    def __init__(self, sms: int | None = None) -> None:
        self._sms = sms
        self._mapped: dict[int, int] = {}  # address -> bytes
        self._scratch = np.empty(0, np.uint8)

    def map(self, address: int, nbytes: int) -> None:
        self._mapped[address] = nbytes

    def unmap(self, address: int) -> None:
        del self._mapped[address]

    def reach(self, address: int, nbytes: int) -> int:
        inside = (begin <= address and address + nbytes <= begin + size for begin, size in self._mapped.items())
        return address if any(inside) else 0

    def scratch(self, nbytes: int) -> tuple[int, int]:
        self._scratch = np.empty(nbytes, np.uint8)
        begin = int(self._scratch.ctypes.data)
        return begin, begin

    def reduce(self, spans: list[MemorySpan], w: int, op: str, divisor: int | None) -> None:
        try:
            with _one:
                reduce_spans(spans, w, op, divisor, self._sms)
        except interpreter.InterpreterError as error:
            raise FtcommError(f"a kernel has failed in the interpreter: {error!r}") from error
