"""Kernels that are broken on purpose, and what `tests.kernels.compiled` says of each, as JSON.

Run as a script: here nothing is interpreted, as in the tests themselves.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import triton
import triton.language as tl

from ftcomm.kernels.device.signal import fence, load, pointer, publish
from tests.kernels.cases import KernelCase
from tests.kernels.compiled import examine

_WIDTH = tl.constexpr(2048)


@triton.jit
def _copy(src, dst, n, T: tl.constexpr, HINT: tl.constexpr, MASK: tl.constexpr):
    source = src.to(tl.pointer_type(T))
    target = dst.to(tl.pointer_type(T))
    if HINT:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    for tile in range(tl.program_id(0), n // _WIDTH, tl.num_programs(0)):
        here = tile.to(tl.int64) * _WIDTH + tl.arange(0, _WIDTH)
        mask = here < n if MASK else None
        tl.store(target + here, tl.load(source + here, mask=mask), mask=mask)


@triton.jit
def _half(src, dst, n, T: tl.constexpr):
    """A hint for where it reads, none for where it writes."""
    source = tl.multiple_of(src.to(tl.pointer_type(T)), 16)
    for tile in range(tl.program_id(0), n // _WIDTH, tl.num_programs(0)):
        here = tile.to(tl.int64) * _WIDTH + tl.arange(0, _WIDTH)
        tl.store(dst.to(tl.pointer_type(T)) + here, tl.load(source + here))


@triton.jit
def _crowded(src, dst, n, T: tl.constexpr):
    """16 tiles at once, for few registers."""
    source = tl.multiple_of(src.to(tl.pointer_type(T)), 16)
    target = tl.multiple_of(dst.to(tl.pointer_type(T)), 16)
    for tile in range(tl.program_id(0), n // _WIDTH, tl.num_programs(0)):
        here = tile.to(tl.int64) * _WIDTH + tl.arange(0, _WIDTH)
        loaded = ()
        for i in tl.static_range(16):
            loaded = loaded + (tl.load(source + i * 65536 + here),)  # noqa: RUF005 (no unpacking in a kernel)
        total = loaded[15]
        for i in tl.static_range(15):
            total = total * 2 + loaded[14 - i]
        tl.store(target + here, total)


@triton.jit
def _noncoherent(src, dst):
    i = tl.arange(0, 32)
    value = tl.inline_asm_elementwise(
        "ld.global.nc.b32 $0, [$1];", "=r,l", [src + 4 * i.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(dst.to(tl.pointer_type(tl.int32)) + i, value)


@triton.jit
def _early_signal(dst, word):
    i = tl.arange(0, 1024)
    tl.store(dst.to(tl.pointer_type(tl.int32)) + i, i)
    tl.inline_asm_elementwise(  # before an atomic of its own, Triton sets a barrier
        "st.release.sys.global.u64 [$1], $1; mov.u32 $0, 0;", "=r,l", [word], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _early_wait(src, dst, word):
    while tl.load(pointer(word), volatile=True) == 0:
        pass
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    i = tl.arange(0, 1024)
    there = tl.load(tl.multiple_of(src.to(tl.pointer_type(tl.int32)), 16) + i)
    tl.store(tl.multiple_of(dst.to(tl.pointer_type(tl.int32)), 16) + i, there)


@triton.jit
def _sound(src, dst, n, word, T: tl.constexpr, FENCE: tl.constexpr, THREADS: tl.constexpr):
    """Waits for its source, copies it and says so; without FENCE it may read before it was told to."""
    while load(word, THREADS) == 0:
        pass
    if FENCE:
        fence()
    _copy(src, dst, n, T, True, False)
    publish(word, 2)


def _case(
    name: str, function: Any, *, loops: int = 0, options: dict[str, int] | None = None, **more: Any
) -> KernelCase:
    orders = {key: more.pop(key) for key in ("signals", "waits", "unfenced") if key in more}
    types = {argument: "i64" for argument in function.arg_names if argument not in more}
    constants = {**more, **(options or {}), "num_warps": 4, "enable_fp_fusion": False}
    return KernelCase("broken", name, function, types, constants, loops, **orders)


CASES = (
    _case("sound", _copy, loops=1, T=tl.bfloat16, HINT=True, MASK=False),
    _case("no hint, 16 bits", _copy, loops=1, T=tl.bfloat16, HINT=False, MASK=False),
    _case("no hint, 32 bits", _copy, loops=1, T=tl.float32, HINT=False, MASK=False),
    _case("masked", _copy, loops=1, T=tl.bfloat16, HINT=True, MASK=True),
    _case("half a hint, 16 bits", _half, loops=1, T=tl.bfloat16),
    _case("half a hint, 32 bits", _half, loops=1, T=tl.float32),
    _case("spilled", _crowded, loops=1, T=tl.float32, options={"maxnreg": 32}),
    _case("non-coherent", _noncoherent),
    _case("early signal", _early_signal, signals=1),
    _case("early wait", _early_wait, waits=1),
    _case("sound order", _sound, loops=1, T=tl.bfloat16, FENCE=True, THREADS=128, signals=1, waits=1, unfenced=0),
    _case("no fence", _sound, loops=1, T=tl.bfloat16, FENCE=False, THREADS=128, signals=1, waits=1, unfenced=0),
    _case("no signal", _copy, loops=1, T=tl.bfloat16, HINT=True, MASK=False, signals=1),
    _case("no program", _copy, T=tl.bfloat16, HINT=True),  # an argument is missing
)

if __name__ == "__main__":
    found = {case.name: examine(case, "sm_90").problems for case in CASES}
    sys.stdout.buffer.write(msgspec.json.encode(found))
