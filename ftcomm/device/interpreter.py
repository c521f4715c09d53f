"""Triton's interpreter, as FTCOMM_ENGINE=interpret uses it: kernels on host memory, for tests.

To be imported before anything else imports Triton, which decides when a kernel is decorated. The interpreter keeps its
state in globals, so one kernel runs at a time in a process.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

os.environ.setdefault("TRITON_INTERPRET", "1")  # counts from the first import of triton on

import triton.language as tl
from triton.runtime import interpreter

from ftcomm.errors import FtcommError, SettingsError
from ftcomm.kernels.check import Span
from ftcomm.kernels.device import INTERPRETED

if not (INTERPRETED and isinstance(tl.sum, interpreter.InterpretedFunction)):
    raise SettingsError(
        "FTCOMM_ENGINE=interpret comes too late: Triton was imported before, to compile. Set TRITON_INTERPRET=1 "
        "in the environment, or choose another engine."
    )

from ftcomm.kernels.device.reduce import reduce_spans


def _patch_once() -> None:
    """The interpreter patches triton.language for a launch, and again for every call of a function in it, which finds
    nothing left to patch and takes 0.5 ms to do so: two thirds of an op. Here only the first call of each module does.
    """
    real = interpreter._patch_lang
    modules: set[int] = set()  # patched in this launch; one at a time

    def patch(fn: Any) -> Any:
        outermost, module = not modules, id(fn.__globals__)
        if module in modules:
            return None
        modules.add(module)
        scope = real(fn)
        if outermost:
            restore = scope.restore

            def leave() -> None:
                modules.clear()
                restore()

            scope.restore = leave
        return scope

    interpreter._patch_lang = patch


_patch_once()

_one = threading.Lock()  # around a launch of one of several exchanges in a process; a launch waits for nobody


class InterpretedPlace:
    """See `ftcomm.device.reducer.Place`. What is not mapped is treated as if it could not be reached, as on a GPU."""

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

    def reduce(self, spans: list[Span], w: int, op: str, divisor: int | None) -> None:
        try:
            with _one:
                reduce_spans(spans, w, op, divisor, self._sms)
        except interpreter.InterpreterError as error:
            raise FtcommError(f"a kernel has failed in the interpreter: {error!r}") from error
