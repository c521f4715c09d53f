"""The dtypes that can be reduced, and with what: the same for the host and for devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

BITWISE = ("band", "bor", "bxor")  # of integers and bool
OPS = ("sum", "avg", "min", "max", "product", *BITWISE)  # the index of one is its number


class Dtype(NamedTuple):
    """A dtype by its name. NumPy has no bfloat16, so `carrier` is what the bytes are held as."""

    name: str
    code: int  # on the wire; never reused
    carrier: np.dtype[Any]
    kind: str  # "float", "half" (or less; summed in fp32), "int", "bool"

    @property
    def itemsize(self) -> int:
        return self.carrier.itemsize


def _dtype(name: str, code: int, kind: str) -> Dtype:
    return Dtype(name, code, np.dtype("uint16" if name == "bfloat16" else name), kind)


_TABLE = (
    ("float64", "float"),
    ("float32", "float"),
    ("float16", "half"),
    ("bfloat16", "half"),
    ("int8", "int"),
    ("int16", "int"),
    ("int32", "int"),
    ("int64", "int"),
    ("uint8", "int"),
    ("uint16", "int"),
    ("uint32", "int"),
    ("uint64", "int"),
    ("bool", "bool"),
)
DTYPES: dict[str, Dtype] = {name: _dtype(name, code, kind) for code, (name, kind) in enumerate(_TABLE, start=1)}

# The host's engine reduces these as well.
HOST_DTYPES: dict[str, Dtype] = DTYPES | {
    name: Dtype(name, code, np.dtype("uint8"), "half") for name, code in (("float8_e4m3fn", 14), ("float8_e5m2", 15))
}

# What collectives only move, too: a name and a number for members to compare. Any other dtype goes as its bytes.
_MOVED = (
    "complex64",
    "complex128",
    "complex32",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "bytes",
)
BYTES = _MOVED[-1]
CODES: dict[str, int] = {dtype.name: dtype.code for dtype in HOST_DTYPES.values()} | {
    name: code for code, name in enumerate(_MOVED, start=32)
}


def unsupported(dtype: str, op: str, dtypes: Mapping[str, Dtype] = DTYPES) -> str | None:
    """Returns why arrays of `dtype`, one of `dtypes`, cannot be reduced with `op`, with the mend; None if they can."""
    if op not in OPS:
        return f"op={op!r} is not known; use one of {', '.join(OPS)}."
    if dtype not in dtypes:
        return f"dtype {dtype} cannot be reduced; convert to one of {', '.join(dtypes)}."
    if op in BITWISE and dtypes[dtype].kind not in ("int", "bool"):
        return f"op={op!r} of {dtype} is not defined; use it with integers or bool."
    if dtype == "bool" and op == "avg":
        return "the average of bool is not defined; use op='sum' (or) or op='product' (and), or convert to a number."
    return None


def unsupported_on_host(dtype: str, op: str) -> str | None:
    """The same for the host's engine."""
    return unsupported(dtype, op, HOST_DTYPES)
