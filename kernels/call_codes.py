"""The numbers that stand for a call: members compare them, and a recording keeps them. None is ever reused.

place    the boundary behind which the call was made, plus 2, in 24 bits; below it the number of the op in 40
call     elements << 16 | dtype << 8 | reduction, compression and whether it is atomic
detail   members and sizes in 32 bits | 2 of `ftcomm.collective.tree` | root + 1 in 22 | kind in 8; all of it 0 in an
         all-reduce by any route
"""

from __future__ import annotations

from typing import NamedTuple

from ftcomm.kernels.dtypes import CODES, OPS

# The index of a kind is its number.
KINDS = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
    "barrier",
)

# The index of a form in which elements travel is its number, see `ftcomm.collective.compression`.
COMPRESSIONS = ("input", "fp32", "fp8")

# The byte of the reduction: its number in 5 bits, the compression in 2, and
ATOMIC = 0x80
MOVES = 0x7F  # in place of both, if nothing is reduced
COMPRESSION = 5

NUMBER = 40
UNKNOWN = 0  # before the first boundary, or in a group without steps: agrees with any stamp
ELSEWHERE = 1 << NUMBER  # called by another thread than that of the step loop: it may be at any step

NAMES = {code: name for name, code in CODES.items()}  # of dtypes


class CallWords(NamedTuple):
    """A call, as its numbers tell it. `reduction` and `compression` are empty if nothing is reduced."""

    kind: str
    dtype: str
    elements: int
    reduction: str
    compression: str
    atomic: bool
    root: int | None


def decode(call: int, detail: int) -> CallWords:
    """Returns what two numbers say of a call; of numbers that no call has, that they are unknown."""
    code, root = detail & 0xFF, detail >> 8 & 0xFF_FFFF
    kind = KINDS[code] if code < len(KINDS) else f"collective {code}"
    dtype = NAMES.get(call >> 8 & 0xFF, f"dtype {call >> 8 & 0xFF}")
    how, atomic = call & 0xFF & ~ATOMIC, bool(call & ATOMIC)
    rooted = None if kind == "allreduce" or not root else root - 1
    if how == MOVES:
        return CallWords(kind, dtype, call >> 16, "", "", atomic, rooted)
    number, form = how & (1 << COMPRESSION) - 1, how >> COMPRESSION
    reduction = OPS[number] if number < len(OPS) else f"op {number}"
    compression = COMPRESSIONS[form] if form < len(COMPRESSIONS) else f"compression {form}"
    return CallWords(kind, dtype, call >> 16, reduction, compression, atomic, rooted)


def boundary_of(place: int) -> int | None:
    """Returns the number of the boundary that the thread of the step loop had passed last, if that thread has called.
    Numbers begin anew after 16 million."""
    stamp = place >> NUMBER
    return stamp - 2 if stamp >= 2 else None
