"""Tells by which code this process reduces, on which the bits of a result depend beside its inputs and their order.

An addition is one IEEE operation wherever it runs, but for what the standard leaves open: which of two NaNs is passed
on, which of two zeros is the lesser one. That follows from the instructions, and these from the libraries and from the
vector units for which they choose their code at run time. Where a value lies in memory, or in an array, makes no
difference (tests/unit/test_reduce.py); so processes with the same digest give the same bits for the same inputs.

Not in it: what a script sets for one of its threads, as `torch.set_flush_denormal` does. All ranks run one script.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

CHOICES = ("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "ATEN_CPU_CAPABILITY")  # forbid code to them
_LINE = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)  # x86, ARM
_VECTOR = re.compile(r"(?:s?sse|avx|fma|f16c|amx|bmi|sve|asimd|fphp|neon|bf16|i8mm)\w*")


def digest(processor: str | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """16 hex digits; "", which equals nobody's, where the processor does not say what it can, or torch what it is.

    `processor` is what /proc/cpuinfo says.
    """
    text = Path("/proc/cpuinfo").read_text() if processor is None else processor
    flags = sorted({flag for line in _LINE.findall(text) for flag in line.split() if _VECTOR.fullmatch(flag)})
    torch = _torch()
    if not flags or not torch:
        return ""
    ours = sys.modules[__name__.partition(".")[0]]  # the package that this module is of
    libraries = f"ftcomm {ours.__version__}", f"numpy {np.__version__}", f"torch {torch}"
    parts = [platform.machine(), sys.byteorder, *flags, *libraries]
    parts += [f"{name}={environment.get(name, '')}" for name in CHOICES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def own() -> str:
    """Returns the arithmetic of this process."""
    return digest()


def _torch() -> str:
    """Returns what is in the file by which torch knows its version, and the commit that it is built from; "" where
    there is none.

    torch is not imported for it, nor what reads the metadata of packages: that is a tenth of all that a job of NumPy
    arrays imports.
    """
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return "not installed"
        return Path(spec.origin).with_name("version.py").read_text()
    except (OSError, ValueError):  # another module has that name
        return ""
