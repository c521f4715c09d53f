"""Triton's interpreter in place of a GPU: kernels on host memory, for tests.

To be imported before anything else imports Triton, which decides when a kernel is decorated. The interpreter keeps its
state in globals, so one kernel runs at a time in a process.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # counts from the first import of triton on

import triton.language as tl
from triton.runtime import interpreter

from ftcomm.errors import SettingsError
from ftcomm.kernels.device import INTERPRETED

__all__ = ["interpreter", "tl"]  # for who imports Triton by this

if not (INTERPRETED and isinstance(tl.sum, interpreter.InterpretedFunction)):
    raise SettingsError(
        "FTCOMM_ENGINE=interpreter-... comes too late: Triton was imported before, to compile. Set TRITON_INTERPRET=1 "
        "in the environment, or choose another engine."
    )


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
