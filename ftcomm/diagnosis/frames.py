"""Finds the script's line in a stack, and what a stack says of what a rank does. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ftcomm.diagnosis.causes import StallCause
from ftcomm.process.stacks import StackFrame

_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<frozen |^<__")
_PACKAGE = Path(__file__).resolve().parents[1]
_OURS = (f"{_PACKAGE}/", *(f"{_PACKAGE.parent}/{folder}/" for folder in ("control", "kernels")))
_COMPILER = re.compile(
    r"/torch/(_inductor|_dynamo|_functorch|_export|utils/cpp_extension|fx/passes)"
    r"|/triton/(compiler|backends|runtime/(build|cache))|/numba/core/|/jax/_src/(compiler|pjit|interpreters/mlir)"
    r"|/cupy/cuda/compiler|/cupy/_core/_fusion|/torch/jit/"
)
_LOADER = re.compile(
    r"/torch/utils/data/|/torchdata/|/ftcomm/training/(loader|data)\.py|/datasets/(iterable|arrow)_|/dali/"
)


def of_script(frames: Sequence[StackFrame]) -> StackFrame | None:
    """Returns the innermost line that belongs to the script, else the innermost of all; None without frames."""
    for frame in frames:
        if not _LIBRARY.search(frame.file) and not frame.file.startswith(_OURS):
            return frame
    return frames[0] if frames else None


def doing(frames: Sequence[StackFrame]) -> StallCause:
    """Returns what a stack says that its thread does: compile, wait for input, or run code of the script."""
    for frame in frames:  # what is nearest to the innermost frame counts
        if frame.function == "<module>":
            continue  # it is being imported
        if _COMPILER.search(frame.file):
            return StallCause.COMPILATION
        if _LOADER.search(frame.file):
            return StallCause.DATA_LOADER
    return StallCause.OWN_CODE
