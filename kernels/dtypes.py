"""The dtypes that can be reduced, and with what: the same for the host and for devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

OPS = ("sum", "avg", "min", "max", "product")


class Dtype(NamedTuple):
    """A dtype by its name. NumPy has no bfloat16, so `carrier` is what the bytes are held as."""

    name: str
    code: int  # on the wire; never reused
    carrier: np.dtype[Any]
    kind: str  # "float", "half" (summed in fp32), "int", "bool"

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


def unsupported(dtype: str, op: str) -> str | None:
    """Why arrays of `dtype` cannot be reduced with `op`, with the mend; None if they can."""
    if op not in OPS:
        return f"op={op!r} is not known; use one of {', '.join(OPS)}."
    if dtype not in DTYPES:
        return f"dtype {dtype} cannot be reduced; convert to one of {', '.join(DTYPES)}."
    if dtype == "bool" and op == "avg":
        return "the average of bool is not defined; use op='sum' (or) or op='product' (and), or convert to a number."
    return None
