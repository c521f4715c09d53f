"""In which form elements cross from one member to another: the `wire` of an all-reduce.

    wire      inputs           partial sums, where they are handed on (a ring)     results
    "input"   as they are      as they are, if that rounds nothing                  as they are, rounded once
    "fp32"    as they are      halves in float32, so that nothing is rounded        as they are, rounded once
    "fp8"     coded            never handed on                                      coded, from sums in float32

All sums of halves are made in float32 in any case. Where one member has all inputs of an element before it, which is
so but in a ring, nothing else than inputs and results crosses, and the first two forms are the same bytes.

Coded: a byte an element and a scale for each block of 256, `ftcomm.kernels.host.fp8`. Blocks begin at each 256th
element of an op, wherever chunks and shards do. So a result depends on the inputs and on who contributes, and on
nothing else: not on the transport, nor on the way that an op takes, nor on who is in the view. It is coded in any case,
also where nothing crosses, and whoever has reduced a shard takes what the others decode. FINAL is a chunk of decoded
elements, which is what a member gets that lacks it after a view change: as they are.
"""

from __future__ import annotations

from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.fp8 import DTYPES as CODED_DTYPES
from ftcomm.kernels.host.fp8 import OPS as CODED_OPS

# The place of a form is its number in the call that members compare; never reused.
COMPRESSIONS = ("input", "fp32", "fp8")
FP8 = COMPRESSIONS[2]


def unsupported_compression(dtype: str, op: str, compression: str) -> str | None:
    """Why `op` of `dtype`, which is supported, cannot cross as `wire`, with the mend; None if it can."""
    if compression not in COMPRESSIONS:
        return f"compression={compression!r} is not known; use one of {', '.join(COMPRESSIONS)}, or None for the first."
    found = HOST_DTYPES[dtype]
    if compression == "fp32" and not (found.kind == "half" or dtype == "float32"):
        return f"compression='fp32' of {dtype}: it is for floats of 32 bits and less; leave compression out."
    if compression == FP8 and dtype not in CODED_DTYPES:
        return f"compression='fp8' of {dtype}: it is for {', '.join(CODED_DTYPES)}; leave compression out."
    if compression == FP8 and op not in CODED_OPS:
        return f"compression='fp8' with op={op!r}: it is for {' and '.join(CODED_OPS)}; leave compression out."
    return None


def partial_dtype(dtype: str, compression: str) -> str:
    """The dtype of partial sums of `dtype`."""
    return "float32" if compression == "fp32" and HOST_DTYPES[dtype].kind == "half" else dtype


def hands_on(dtype: str, op: str, compression: str) -> bool:
    """Whether partial sums can be handed on as `partial_dtype` has them: halves would be rounded at every hop, what is
    coded even more, and sums of integers that are averaged may need more bits."""
    kind = HOST_DTYPES[dtype].kind
    return compression != FP8 and (kind != "half" or compression == "fp32") and not (kind == "int" and op == "avg")


def widest(dtype: str, compression: str) -> int:
    """The most bytes that an element takes in a slot."""
    return max(HOST_DTYPES[name].itemsize for name in (dtype, partial_dtype(dtype, compression)))
