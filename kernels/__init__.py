"""Memory operations: copy, reduce, quantise, signal and wait. Each takes plain arrays and words, and knows no groups.

The functions here take torch tensors or NumPy arrays. Those in host memory are worked on by the calling thread, which
waits; CUDA tensors by a Triton kernel on the current stream, which the caller does not wait for. Both give the same
bits, but that a NaN may have other payload bits on another processor. Arguments are checked first, and wrong ones raise
`ftcomm.kernels.check.KernelArgumentError` before anything is launched or written. Thread-safe.

Importing this imports neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ftcomm.kernels.host.quantise import Quantised

Array = Any  # a contiguous torch tensor or NumPy array


def copy(source: Array, out: Array, *, sms: int | None = None) -> None:
    """out[...] = source[...], with equal dtypes and numbers of elements.

    `out` may be `source`, but not overlap it in part. `sms`: the most blocks (SMs) that a kernel may take; None: all.
    """
    _form("copy", out).copy(source, out, sms=sms)


def reduce(
    sources: Sequence[Array], out: Array, op: str = "sum", *, divisor: int | None = None, sms: int | None = None
) -> None:
    """out[i] = op over the 1 to 16 sources' [i], in their order: ((s0 + s1) + s2) + ...

    op        "sum", "avg" (divides by `divisor`, or the number of sources), "min", "max" (both pass NaN on), "product"
    dtypes    float64 and float32 are reduced in their own precision; float16 and bfloat16 in float32, rounded once to
              nearest even; integers wrap around, but an average is summed in 64 bits and truncated toward zero;
              of bool, sum and max are "or", product and min are "and", and there is no average
    `out`     may be exactly one of the sources, and not overlap one in part
    """
    _form("reduce", out).reduce(sources, out, op, divisor=divisor, sms=sms)


def reduce_forward(sources: Sequence[Array], staging: Array, op: str = "sum", *, sms: int | None = None) -> None:
    """`reduce` into memory that is read again soon, as the partial sums of a ring are: it stays in the cache."""
    _form("forward", staging).reduce_forward(sources, staging, op, sms=sms)


def reduce_copy(
    sources: Sequence[Array],
    outs: Sequence[Array],
    op: str = "sum",
    *,
    divisor: int | None = None,
    sms: int | None = None,
) -> None:
    """`reduce` into each of `outs`, in one pass: the last reduce step of a ring, with outs = (output, staging).

    outs[0] is stored past the cache, the others into it. No two outs overlap.
    """
    _form("forward", *outs).reduce_copy(sources, outs, op, divisor=divisor, sms=sms)


def copy_forward(source: Array, outs: Sequence[Array], *, sms: int | None = None) -> None:
    """`copy` into each of `outs`, reading once: what a ring hands on. As `reduce_copy` otherwise."""
    _form("forward", *outs).copy_forward(source, outs, sms=sms)


def quantise(x: Array, kind: str, *, sms: int | None = None) -> Quantised:
    """`x`, float32, float16 or bfloat16, in a byte an element and a scale a block of 256.

    kind      "fp8" (E4M3) or "int8"; kernels/host/quantise.py describes the format. A NaN or an infinity makes its
              whole block NaN
    """
    return _form("quantise", x).quantise(x, kind, sms=sms)


def dequantise(source: Quantised, *, out: Array | None = None, sms: int | None = None) -> Array:
    """Back in the dtype that was quantised, in `out` (which overlaps nothing of the source) or a new array.

    All ranks that decode the same bytes get the same bits. So in an all-reduce a rank decodes its own stripe as well,
    and does not keep what it had before: it would differ from the others.
    """
    return _form("quantise", source.payload).dequantise(source, out=out, sms=sms)


def dequantise_reduce_requantise(sources: Sequence[Quantised], op: str = "sum", *, sms: int | None = None) -> Quantised:
    """Sum or average ("avg") of 1 to 16 quantised arrays of one kind, count and dtype, quantised once.

    Accumulated in float32 in the order of `sources`: the same order gives the same bytes.
    """
    return _form("quantise", *(source.payload for source in sources)).dequantise_reduce_requantise(sources, op, sms=sms)


def _form(module: str, *outs: Array) -> Any:
    """The module that works where `outs` lie. Triton is imported at the first CUDA tensor."""
    form = "device" if any(getattr(out, "is_cuda", False) for out in outs) else "host"
    return importlib.import_module(f"ftcomm.kernels.{form}.{module}")
