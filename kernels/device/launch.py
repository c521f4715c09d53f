"""Decides how the kernels of arrays are launched: types, sizes of tiles and numbers of programs."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl

from ftcomm.kernels.device import INTERPRETED
from ftcomm.kernels.dtypes import BITWISE, DTYPES, OPS
from ftcomm.kernels.spans import MemorySpan, aligned

WARPS = 16
SPECIALISED = (1, 2, 4, 8)  # numbers of sources with a kernel of their own; the others share one

# 16-byte lines of each source that a thread has under way: 8 or more altogether, so that a block has 64 KB on the way.
# Reductions need less than the 128 registers with which a block of 16 warps lives on an SM.
_LINES = {1: 8, 2: 4, 4: 2, 8: 1, 0: 4}
_LINES_OF_MANY = 2  # of a copy whose tiles are dealt to the SMs by the GPU, each a program: several live on an SM
_INTERPRETED_SMS = 3  # so that a program has tiles that are not neighbours


class LaunchConfig(NamedTuple):
    """The grid of a kernel, and the constants it is compiled for."""

    programs: int
    T: tl.dtype
    OP: int
    W: int
    BLOCK: int
    ALIGNED: bool

    def constants(self) -> dict[str, Any]:
        named = self._asdict()
        del named["programs"]
        return {**named, "num_warps": WARPS, "enable_fp_fusion": False}


def element(dtype: str) -> tl.dtype:
    """The type by which a kernel knows a dtype; bool lies in bytes."""
    return tl.uint8 if dtype == "bool" else getattr(tl, dtype)


def operator(dtype: str, op: str) -> int:
    """The op by which a kernel knows one: of bool, sum and max are "or", product and min are "and", as of its bytes."""
    if DTYPES[dtype].kind == "bool" and op not in BITWISE:
        op = "max" if op in ("sum", "max") else "min"
    return OPS.index(op)


def plan(spans: list[MemorySpan], w: int, op: str, sms: int | None) -> LaunchConfig:
    """Plan the launch for `w` sources and the arrays `spans`, of at most `sms` programs. Small arrays take small tiles,
    for more SMs; a copy of one that may have any number of programs, one a tile."""
    span = spans[0]
    kept = w if w in SPECIALISED else 0
    many = kept == 1 and sms is None
    lines = _LINES_OF_MANY if many else _LINES[kept]
    size = DTYPES[span.dtype].itemsize
    if DTYPES[span.dtype].kind in ("int", "bool") and kept != 1:
        # In registers of four bytes, or eight for an average, a narrow integer takes more room than in memory.
        lines = max(1, lines * size // 8 if op == "avg" else lines * min(size, 4) // 4)
    most = sms or _sms(span.device)
    line = 32 * WARPS * 16
    while lines > 1 and span.size < most * lines * line:
        lines //= 2
    block = lines * line // size
    tiles = max(1, -(-span.count // block))
    programs = tiles if many else min(most, tiles)
    return LaunchConfig(programs, element(span.dtype), operator(span.dtype, op), kept, block, aligned(spans))


@functools.cache
def _sms(device: str) -> int:
    if INTERPRETED:
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on(device: str) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return contextlib.nullcontext() if INTERPRETED else torch.cuda.device(device)


def work(grid: Any, metadata: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Tells a profiler the bytes that a kernel moves, which are its roofline. It is Triton's `launch_metadata`."""
    size = arguments["T"].primitive_bitwidth // 8
    name = f"{metadata.name} [w={arguments['w']} n={arguments['n']} {arguments['T']} programs={grid[0]}]"
    return {"name": name, "bytes": (arguments["w"] + 1) * arguments["n"] * size}
