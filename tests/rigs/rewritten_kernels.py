"""What Triton's interpreter does at the first launch of a process, done before ranks are forked: it writes each
function of a kernel anew and imports a dialect of Triton, which takes 0.2 s of a core, as long as several ops.
"""

from __future__ import annotations

import importlib
import pkgutil

from ftcomm.kernels import device


def _rewrite() -> None:
    import triton.experimental.gluon  # noqa: F401
    import triton.language.standard as standard
    from triton.runtime.interpreter import InterpretedFunction

    import ftcomm.engines.gpu_kernel.interpreted  # noqa: F401  it makes the interpreter three times as fast

    names = [f"{device.__name__}.{each.name}" for each in pkgutil.iter_modules(device.__path__)]
    for module in (*map(importlib.import_module, names), standard):
        for value in list(vars(module).values()):
            if isinstance(value, InterpretedFunction):
                value.rewrite()


if device.INTERPRETED:
    _rewrite()
