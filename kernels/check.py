"""The arguments of the kernels' public calls, checked before anything is launched or written.

Imports neither torch nor triton: whoever passes a tensor has imported torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ftcomm.kernels.dtypes import DTYPES, unsupported

MOST_SOURCES = 16


class KernelArgumentError(ValueError):
    """What was expected, what was there, and what to do. Nothing has been launched or written."""


class Span(NamedTuple):
    """An array as kernels see it: elements in a row."""

    name: str  # in messages
    address: int
    count: int
    dtype: str  # of dtypes.DTYPES
    device: str  # "cpu", "cuda:0"

    @property
    def size(self) -> int:
        return self.count * DTYPES[self.dtype].itemsize

    def same(self, other: Span) -> bool:
        return (self.address, self.size) == (other.address, other.size)

    def overlaps(self, other: Span) -> bool:
        return self.address < other.address + other.size and other.address < self.address + self.size


def check(
    sources: Sequence[Any],
    outs: Sequence[Any],
    op: str = "sum",
    divisor: int | None = None,
    sms: int | None = None,
) -> list[Span]:
    """The spans of all `sources`, then of all `outs`, or `KernelArgumentError`.

    Each may be a contiguous torch tensor or NumPy array of any shape. All have the same dtype, device and number of
    elements. An output may be exactly one of the sources; it overlaps nothing else, and no other output. Sources may
    overlap each other.
    """
    if not 1 <= len(sources) <= MOST_SOURCES:
        _refuse(f"1 to {MOST_SOURCES} sources are expected, there are {len(sources)}; reduce in several calls.")
    if not outs:
        _refuse("at least one output is expected, there is none; pass where the result is to go.")
    names = ["source" if len(sources) == 1 else f"sources[{i}]" for i in range(len(sources))]
    names += ["out" if len(outs) == 1 else f"outs[{i}]" for i in range(len(outs))]
    spans = [span_of(name, array) for name, array in zip(names, [*sources, *outs], strict=True)]
    first = spans[0]
    problem = unsupported(first.dtype, op)
    if problem is not None:
        _refuse(problem)
    for span in spans[1:]:
        for word, theirs, mine, mend in (
            ("dtype", span.dtype, first.dtype, "convert one with .to() or .astype()"),
            ("device", span.device, first.device, "copy one with .to()"),
            ("number of elements", span.count, first.count, "slice the longer one"),
        ):
            if theirs != mine:
                _refuse(f"{span.name} has the {word} {theirs}, {first.name} has {mine}; {mend}.")
    _check_outs(spans[: len(sources)], spans[len(sources) :], outs)
    if divisor is not None and (op != "avg" or not _whole(divisor) or divisor >= 1 << 31):
        _refuse(f"divisor={divisor!r} with op={op!r}; pass a whole number from 1 to 2^31 - 1, with op='avg' only.")
    check_sms(sms)
    return spans


def _check_outs(sources: Sequence[Span], outs: Sequence[Span], arrays: Sequence[Any]) -> None:
    for i, (out, array) in enumerate(zip(outs, arrays, strict=True)):
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            _refuse(f"{out.name} is read-only; pass an array that may be written, such as a copy.")
        for other in (*sources, *outs[:i]):
            if out.overlaps(other) and not (other in sources and out.same(other)):
                allowed = "be that array exactly, or not overlap it" if other in sources else "not overlap it"
                _refuse(f"{out.name} overlaps {other.name}; it has to {allowed}. Pass another array.")


def check_sms(sms: int | None) -> None:
    """`sms`: the most blocks to launch, 1 or more; None for as many as are of use."""
    if sms is not None and not _whole(sms):
        _refuse(f"sms={sms!r} is not a number of blocks; pass a whole number from 1 on, or None for as many as help.")


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def span_of(name: str, array: Any) -> Span:
    if isinstance(array, np.ndarray):
        native = array.dtype.isnative
        address, count, dtype, device = array.ctypes.data, array.size, array.dtype.name, "cpu"
        contiguous = array.flags.c_contiguous
    else:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(array, torch.Tensor):
            _refuse(f"{name} is a {type(array).__name__}; pass a torch tensor or a NumPy array.")
        native = True
        device, contiguous = str(array.device), array.layout is torch.strided and array.is_contiguous()
        address = array.data_ptr() if contiguous else 0
        count, dtype = array.numel(), str(array.dtype).removeprefix("torch.")
    if device != "cpu" and not device.startswith("cuda"):
        _refuse(f"{name} is on the device {device}; copy it to the CPU or to a CUDA device with .to().")
    if dtype not in DTYPES or not native:
        kind = dtype if native else f"{dtype} in the other byte order"
        _refuse(f"{name} has the dtype {kind}; convert it to one of {', '.join(DTYPES)}.")
    if not contiguous:
        _refuse(f"{name} is not contiguous; pass .contiguous() or np.ascontiguousarray() of it.")
    size = DTYPES[dtype].itemsize
    if count and address % size:
        _refuse(f"{name} begins at {address:#x}, not a multiple of its element size, {size}; copy it to other memory.")
    return Span(name, address, count, dtype, device)


def aligned(spans: Sequence[Span]) -> bool:
    """Whether all begin at multiples of 16 bytes, so that kernels may move 128 bits at a time."""
    return math.gcd(16, *(span.address for span in spans)) == 16


def _refuse(message: str) -> None:
    raise KernelArgumentError(message)
