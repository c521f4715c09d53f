"""The forms in which elements travel from one member to another: the `compression` of an all-reduce.

    compression  inputs         partial sums, where they are passed on (a ring)      results
    "input"      unchanged      unchanged, if that rounds nothing                    unchanged, rounded once
    "fp32"       unchanged      halves in float32, so that nothing is rounded        unchanged, rounded once
    "fp8"        coded          never passed on                                      coded, from sums in float32

Halves are always summed in float32. Except in a ring or between hosts, a member has all inputs of an element, so that
only inputs and results travel, and the first two forms are the same bytes. Between the hosts or rows of a group of many
members both pass partial sums on in float32.

Coded elements are a byte each and a scale for each block of 256, see `ftcomm.kernels.host.fp8`. Blocks begin at each
256th element of an op, wherever chunks and slices do. So a result depends only on the inputs and on the contributors,
and not on the transport, the route of the op, or the view. It is coded in any case, also where nothing travels, and a
member that has reduced a slice takes what the others decode. A FINAL chunk has decoded elements, which a member without
them gets after a view change as they are.
"""

from __future__ import annotations

from ftcomm.kernels.call_codes import COMPRESSIONS
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.fp8 import DTYPES as CODED_DTYPES
from ftcomm.kernels.host.fp8 import OPS as CODED_OPS

FP8 = COMPRESSIONS[2]


def unsupported_compression(dtype: str, op: str, compression: str) -> str | None:
    """Returns why `op` of a supported `dtype` cannot have this `compression`, with the mend; None if it can."""
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
    """Returns the dtype of partial sums of `dtype`."""
    return "float32" if compression == "fp32" and HOST_DTYPES[dtype].kind == "half" else dtype


def hands_on(dtype: str, op: str, compression: str) -> bool:
    """Whether partial sums can be passed on in `partial_dtype`: otherwise halves would be rounded at every hop, coded
    elements even more, and averages of integers may need more bits."""
    kind = HOST_DTYPES[dtype].kind
    return compression != FP8 and (kind != "half" or compression == "fp32") and not (kind == "int" and op == "avg")


def widest(dtype: str, compression: str) -> int:
    """Returns the most bytes that an element takes in a slot."""
    return max(HOST_DTYPES[name].itemsize for name in (dtype, partial_dtype(dtype, compression)))
