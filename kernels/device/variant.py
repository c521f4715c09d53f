"""The parameters that the kernels of whole ops are compiled for, and the shape of a program on a GPU. No kernel is
imported here."""

from __future__ import annotations

from typing import Any

import msgspec
import triton.language as tl

SCALARS = ("ctl", "state", "view", "array", "kept", "chunks", "count", "call", "template", "deadline_ns")

# If it is no all-reduce.
COLLECTIVE_SCALARS = (*("source" if name == "kept" else name for name in SCALARS), "who", "pieces")

MOVED, REDUCED = 1, 2  # what becomes of the rows of those

_WARPS = 8
_LINE = 16  # bytes that a thread loads at a time
_SMALL = 64 << 10  # bytes of an op that takes tiles of one line a thread: short code, which is fetched for each launch
_REGISTERS = 255  # a thread may have; the compiler aims at two programs a multiprocessor else, and spills


class Variant(msgspec.Struct, frozen=True, eq=False):
    """Says what the exchange asks the kernel to be compiled for, by the names that it has there. Each is made once, and
    is found by its identity at a launch."""

    T: tl.dtype
    OP: int
    W: int
    ALIGNED: bool
    LANES: int
    CHUNK: int
    ONE_SHOT: int
    CODED: bool


class CollectiveVariant(msgspec.Struct, frozen=True, eq=False):
    """The same of a collective that is no all-reduce."""

    T: tl.dtype
    OP: int
    W: int
    ALIGNED: bool
    LANES: int
    CHUNK: int
    ROWS: int


def small(nbytes: int) -> bool:
    """Whether an op of so many bytes has a kernel of its own."""
    return nbytes <= _SMALL


def compiled_for(variant: Variant | CollectiveVariant, small: bool) -> dict[str, Any]:
    """Returns constants of the kernel and options of the compiler. A program of an op that is not small has 16 KB of
    every source in flight while it reduces, of eight sources 8 KB, and 64 KB while it copies. Of elements that travel
    coded a tile is as many as of float32, whatever they are."""
    reduced, copied = (1, 1) if small else (2 if variant.W == 8 else 4, 16)  # lines a thread
    size = variant.T.primitive_bitwidth // 8
    each = 4 if isinstance(variant, Variant) and variant.CODED else size
    return {
        **msgspec.structs.asdict(variant),
        "BLOCK": 32 * _WARPS * reduced * _LINE // each,
        "COPIED": 32 * _WARPS * copied * _LINE // size,
        "THREADS": 32 * _WARPS,
        "num_warps": _WARPS,
        "maxnreg": _REGISTERS,
        "enable_fp_fusion": False,
    }
