"""Block-scaled quantisation in Triton: the same bytes as the host form, kernels/host/quantise.py, which defines them.

    quantise       source --x--> [bits] --max--> scale --------------------------> scales
                              `-----------------> x / scale --encode--> code ----> payload
    dequantise     payload --decode--> code * scale --narrow--> out
    reduce         W payloads --decode--> sum of code * scale --as quantise--> payload, scales

A tile is ROWS blocks, held as [ROWS, 256]: a block lies in neighbouring threads of one warp, so its maximum needs no
barrier beyond shuffles. Payloads are whole blocks and their mask is one of rows; only a source or an output can end
within a block, and its last tile alone has a mask of elements.

What makes the bytes equal: the maximum is one of integers, scales are powers of two made of exponent bits, so that x /
scale is a multiplication and code * scale is exact, with which fma(code, scale, sum) is code * scale + sum. What
remains is rounded once, by IEEE: the sum, the average's division, the conversion to a code.

The conversion from and to E4M3 is the hardware's from sm_89 on (CONVERT), elsewhere and in the interpreter integer
operations. Decoding has nothing to round. cvt.rn.satfinite.e4m3x2.f32 rounds to nearest even, keeps the sign of zero,
saturates, and makes every NaN 0x7F, as the host form does; a test goes through both. A reduction of four sources takes
18 instructions an element with it and 54 without, where the memory of an H200 gives time for 31: hence the two ways.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ftcomm.kernels.check import MOST_SOURCES, check_sms
from ftcomm.kernels.device import INTERPRETED
from ftcomm.kernels.device.launch import element, on
from ftcomm.kernels.device.tile import narrow, widen
from ftcomm.kernels.dtypes import OPS
from ftcomm.kernels.host.quantise import (
    BLOCK,
    DTYPES,
    FORMATS,
    Quantised,
    check_array,
    check_kind,
    check_out,
    check_quantised,
    check_sources,
    empty_like,
)

ROWS = 16  # blocks to a tile
WARPS = 8  # 16 elements to a thread: one 16-byte line of codes
SPECIALISED = (2, 4, 8)  # numbers of sources with a kernel of their own; others share one

_BLOCK = tl.constexpr(BLOCK)
_SUM = tl.constexpr(OPS.index("sum"))
_FP8, _INT8 = FORMATS["fp8"], FORMATS["int8"]
_FP8_LARGEST, _INT8_LARGEST = tl.constexpr(float(_FP8.largest)), tl.constexpr(float(_INT8.largest))
_FP8_ROUND_UP, _INT8_ROUND_UP = tl.constexpr(_FP8.round_up), tl.constexpr(_INT8.round_up)
_FP8_SHIFT, _INT8_SHIFT = tl.constexpr(_FP8.shift), tl.constexpr(_INT8.shift)
_FP8_TOP, _INT8_TOP = tl.constexpr(_FP8.top), tl.constexpr(_INT8.top)
_FP8_NAN, _INT8_NAN = tl.constexpr(_FP8.nan), tl.constexpr(_INT8.nan)


# ---- codes --------------------------------------------------------------------------------------------------------


@triton.jit
def _decode(code, FP8: tl.constexpr, CONVERT: tl.constexpr):
    """int8 as it lies in memory -> float32, without the scale."""
    if not FP8:
        return code.to(tl.float32)
    elif CONVERT:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The seven bits behind the sign, 20 to the left, are a float32 smaller by 2^120, subnormals included.
        bits = (code.to(tl.int32).to(tl.uint32, bitcast=True) << 20) & 0x87F00000
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        return tl.where(tl.abs(value) == 480.0, float("nan"), value)  # 480: what 0x7F would be


@triton.jit
def _encode(x, FP8: tl.constexpr, CONVERT: tl.constexpr):
    """float32 of at most twice the largest code, or NaN -> int8."""
    if not FP8:
        clamped = tl.minimum(tl.maximum(x, -_INT8_LARGEST), _INT8_LARGEST)
        # 1.5 * 2^23: what is left of the sum are whole numbers, rounded to nearest even, in the lowest bits.
        code = (clamped + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        return tl.where(x != x, _INT8_NAN, code).to(tl.int8)
    elif CONVERT:
        return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        magnitude = tl.minimum(tl.abs(x), _FP8_LARGEST)
        bits = magnitude.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # (127 - 7) << 3
        subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # in 2^-9, the ulp of 2^14
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        code = tl.where(bits < 0x3C800000, subnormal, normal) | sign
        return tl.where(x != x, _FP8_NAN, code).to(tl.int8)


@triton.jit
def _requantise(x, FP8: tl.constexpr, CONVERT: tl.constexpr):
    """float32 [ROWS, 256] -> codes [ROWS, 256] and scales [ROWS]."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(bits, axis=1)
    # In unsigned arithmetic, since the bits of a NaN and what is added can exceed 31 bits.
    up = amax.to(tl.uint32, bitcast=True) + (_FP8_ROUND_UP if FP8 else _INT8_ROUND_UP)
    exponent = (up >> 23).to(tl.int32) - (_FP8_SHIFT if FP8 else _INT8_SHIFT)
    exponent = tl.minimum(tl.maximum(exponent, 1), _FP8_TOP if FP8 else _INT8_TOP)
    poisoned = amax >= 0x7F800000
    scale = tl.where(poisoned, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(poisoned, 0x7FC00000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    return _encode(x * inverse[:, None], FP8, CONVERT), scale


@triton.jit
def _bits(x, T: tl.constexpr):
    """float32 rounded to T, as the integers that lie in memory; one NaN."""
    if T == tl.float32:
        return tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    elif T == tl.float16:
        return tl.where(x != x, 0x7E00, narrow(x, T).to(tl.int16, bitcast=True)).to(tl.int16)
    else:
        return tl.where(x != x, 0x7FC0, narrow(x, T).to(tl.int16, bitcast=True)).to(tl.int16)


def work(grid: Any, metadata: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """For a profiler: the bytes that a kernel moves. Triton's `launch_metadata`."""
    if "blocks" in arguments:
        what, moved = f"w={arguments['w']}", (arguments["w"] + 1) * arguments["blocks"] * (BLOCK + 4)
    else:
        n, size = arguments["count"], arguments["T"].primitive_bitwidth // 8
        what, moved = f"n={n} {arguments['T']}", n * size + triton.cdiv(n, BLOCK) * (BLOCK + 4)
    return {"name": f"{metadata.name} [{what} programs={grid[0]}]", "bytes": moved}


# ---- kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def _store(payload, scales, offsets, row, codes, scale, mask_rows):
    if mask_rows is None:
        tl.store(payload + offsets, codes)
        tl.store(scales + row, scale)
    else:
        tl.store(payload + offsets, codes, mask=mask_rows[:, None])
        tl.store(scales + row, scale, mask=mask_rows)


@triton.jit
def _quantise_tile(
    x, payload, scales, tile, rest, offsets, row,
    T: tl.constexpr, FP8: tl.constexpr, CONVERT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`rest` elements of it are there; None: all."""
    at = tile * ROWS
    if rest is None:
        there = None
        values = tl.load(x + at * _BLOCK + offsets, eviction_policy="evict_first")
    else:
        there = row * _BLOCK < rest
        values = tl.load(x + at * _BLOCK + offsets, mask=offsets < rest, other=0)
    codes, scale = _requantise(widen(values, T, _SUM), FP8, CONVERT)
    _store(payload + at * _BLOCK, scales + at, offsets, row, codes, scale, there)


@triton.jit(launch_metadata=work, do_not_specialize=["count"], do_not_specialize_on_alignment=["scales", "out_scales"])
def quantise_kernel(
    x, payload, scales, count,
    T: tl.constexpr, FP8: tl.constexpr, CONVERT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x: `count` of T, bfloat16 as int16. The last tile belongs to the program whose turn it is."""
    row = tl.arange(0, ROWS)
    offsets = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    begin = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    full = count.to(tl.int64) // (ROWS * _BLOCK)
    for tile in range(begin, full, step):
        _quantise_tile(x, payload, scales, tile, None, offsets, row, T, FP8, CONVERT, ROWS)
    rest = (count % (ROWS * _BLOCK)).to(tl.int32)
    if (full % step == begin) & (rest > 0):
        _quantise_tile(x, payload, scales, full, rest, offsets, row, T, FP8, CONVERT, ROWS)


@triton.jit
def _dequantise_tile(
    payload, scales, out, tile, rest, offsets, row,
    T: tl.constexpr, FP8: tl.constexpr, CONVERT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`rest` elements of it are wanted; None: all."""
    at = tile * ROWS
    if rest is None:
        codes = tl.load(payload + at * _BLOCK + offsets, eviction_policy="evict_first")
        scale = tl.load(scales + at + row)
    else:
        codes = tl.load(payload + at * _BLOCK + offsets, mask=offsets < rest, other=0)
        scale = tl.load(scales + at + row, mask=row * _BLOCK < rest, other=0)
    bits = _bits(_decode(codes, FP8, CONVERT) * scale[:, None], T)
    if rest is None:
        tl.store(out + at * _BLOCK + offsets, bits, cache_modifier=".cs")
    else:
        tl.store(out + at * _BLOCK + offsets, bits, mask=offsets < rest)


@triton.jit(launch_metadata=work, do_not_specialize=["count"], do_not_specialize_on_alignment=["scales", "out_scales"])
def dequantise_kernel(
    payload, scales, out, count,
    T: tl.constexpr, FP8: tl.constexpr, CONVERT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out: `count` integers of the size of T."""
    row = tl.arange(0, ROWS)
    offsets = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    begin = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    full = count.to(tl.int64) // (ROWS * _BLOCK)
    for tile in range(begin, full, step):
        _dequantise_tile(payload, scales, out, tile, None, offsets, row, T, FP8, CONVERT, ROWS)
    rest = (count % (ROWS * _BLOCK)).to(tl.int32)
    if (full % step == begin) & (rest > 0):
        _dequantise_tile(payload, scales, out, full, rest, offsets, row, T, FP8, CONVERT, ROWS)


@triton.jit
def _accumulate(
    acc, payloads, scales, w, at, offsets, row, rows,
    FIRST: tl.constexpr, LAST: tl.constexpr, ANY: tl.constexpr, FP8: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """acc + sources FIRST to LAST - 1, all under way before the first is used. Those from w on are not touched."""
    codes = ()
    factors = ()
    for i in tl.static_range(FIRST, LAST):
        if ANY:
            there = row < tl.where(i < w, row.shape[0] if rows is None else rows, 0)
        else:
            there = None if rows is None else row < rows
        lines = None if there is None else there[:, None]
        code = tl.load(payloads[i] + at * _BLOCK + offsets, mask=lines, eviction_policy="evict_first")
        codes = codes + (code,)
        factors = factors + (tl.load(scales[i] + at + row, mask=there),)
    for i in tl.static_range(LAST - FIRST):
        factor = tl.broadcast_to(factors[i][:, None], acc.shape)
        added = tl.fma(_decode(codes[i], FP8, CONVERT), factor, acc)
        acc = tl.where(FIRST + i < w, added, acc) if ANY else added
    return acc


@triton.jit
def _reduce(
    payloads, scales, w, at, offsets, row, rows,
    W: tl.constexpr, ANY: tl.constexpr, AVG: tl.constexpr, FP8: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Sum or average of a tile that begins with block `at`, and of which `rows` are there; None: all."""
    acc = tl.full(offsets.shape, -0.0, tl.float32)  # to which adding changes nothing, not even the sign of zero
    if ANY:
        for first in tl.static_range(0, W, 4):
            if first < w:
                acc = _accumulate(acc, payloads, scales, w, at, offsets, row, rows, first, first + 4, ANY, FP8, CONVERT)
    else:
        acc = _accumulate(acc, payloads, scales, w, at, offsets, row, rows, 0, W, ANY, FP8, CONVERT)
    if AVG:
        # The numbers with kernels of their own are powers of two, by which a division is a multiplication.
        acc = tl.div_rn(acc, w.to(tl.float32)) if ANY else acc * (1.0 / W)
    return acc


@triton.jit(
    launch_metadata=work, do_not_specialize=["w", "blocks"], do_not_specialize_on_alignment=["scales", "out_scales"]
)
def reduce_kernel(
    payloads, scales, w, payload, out_scales, blocks,
    W: tl.constexpr, ANY: tl.constexpr, AVG: tl.constexpr,
    FP8: tl.constexpr, CONVERT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """payloads, scales: tuples of W pointers, of which w count if ANY."""
    row = tl.arange(0, ROWS)
    offsets = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    begin = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    full = blocks.to(tl.int64) // ROWS
    for tile in range(begin, full, step):
        at = tile * ROWS
        acc = _reduce(payloads, scales, w, at, offsets, row, None, W, ANY, AVG, FP8, CONVERT)
        codes, scale = _requantise(acc, FP8, CONVERT)
        _store(payload + at * _BLOCK, out_scales + at, offsets, row, codes, scale, None)
    rest = (blocks % ROWS).to(tl.int32)
    if (full % step == begin) & (rest > 0):
        at = full * ROWS
        acc = _reduce(payloads, scales, w, at, offsets, row, rest, W, ANY, AVG, FP8, CONVERT)
        codes, scale = _requantise(acc, FP8, CONVERT)
        _store(payload + at * _BLOCK, out_scales + at, offsets, row, codes, scale, row < rest)


# ---- launching ----------------------------------------------------------------------------------------------------


def constants(convert: bool, any_number: bool = False) -> dict[str, Any]:
    """What all launches on a device are compiled with. Left alone, ptxas spills where there are 16 sources."""
    limit = {"maxnreg": 128} if any_number else {}
    return {"CONVERT": convert, "ROWS": ROWS, "num_warps": WARPS, "enable_fp_fusion": False, **limit}


@functools.cache
def _facts(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors of a device, and whether it converts E4M3."""
    if INTERPRETED:
        return 1, False
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, torch.version.hip is None and (facts.major, facts.minor) >= (8, 9)


def _launch(
    kernel: Any, device: torch.device, blocks: int, sms: int | None, per_sm: int, arguments: Any, **types: Any
) -> None:
    """`per_sm`: programs to a multiprocessor, as far as registers allow, if no number of `sms` is given."""
    if blocks == 0:
        return
    processors, convert = _facts(device)
    programs = min(triton.cdiv(blocks, ROWS), sms or processors * per_sm)
    with on(str(device)):
        kernel[(programs,)](*arguments, **types, **constants(convert, types.get("ANY", False)))


# ---- the public form ----------------------------------------------------------------------------------------------


def quantise(x: torch.Tensor, kind: str, *, sms: int | None = None) -> Quantised:
    """As the host form, on x's device and its current stream; does not wait. `sms` caps the multiprocessors used."""
    check_sms(sms)
    form = check_kind(kind)
    span = check_array(x, "x", DTYPES)
    blocks = triton.cdiv(span.count, BLOCK)
    payload, scales = empty_like(x, blocks * BLOCK, form.dtype), empty_like(x, blocks, "float32")
    source = x.view(torch.uint16) if x.dtype == torch.bfloat16 else x
    arguments = (source, payload.view(torch.int8), scales, span.count)
    _launch(quantise_kernel, x.device, blocks, sms, 4, arguments, T=element(span.dtype), FP8=kind == "fp8")
    return Quantised(kind, payload, scales, span.count, span.dtype)


def dequantise(source: Quantised, *, out: torch.Tensor | None = None, sms: int | None = None) -> torch.Tensor:
    """As the host form, on the current stream; does not wait."""
    check_sms(sms)
    if out is None:
        check_quantised(source)
        out = empty_like(source.payload, source.count, source.dtype)
    check_out(source, out)
    memory = out.view(torch.int32 if out.dtype == torch.float32 else torch.int16)
    arguments = (source.payload.view(torch.int8), source.scales, memory, source.count)
    T, blocks = element(source.dtype), len(source.scales)
    _launch(dequantise_kernel, out.device, blocks, sms, 8, arguments, T=T, FP8=source.kind == "fp8")
    return out


def dequantise_reduce_requantise(sources: Sequence[Quantised], op: str = "sum", *, sms: int | None = None) -> Quantised:
    """As the host form, on the current stream; does not wait."""
    check_sms(sms)
    check_sources(sources, op)
    first, w = sources[0], len(sources)
    blocks = len(first.scales)
    payload, scales = torch.empty_like(first.payload), torch.empty_like(first.scales)
    exact = w in SPECIALISED
    padded = [*sources, *([] if exact else [first] * (MOST_SOURCES - w))]
    arguments = (
        tuple(source.payload.view(torch.int8) for source in padded),
        tuple(source.scales for source in padded),
        w,
        payload.view(torch.int8),
        scales,
        blocks,
    )
    types = {"W": len(padded), "ANY": not exact, "AVG": op == "avg", "FP8": first.kind == "fp8"}
    _launch(reduce_kernel, payload.device, blocks, sms, 4, arguments, **types)
    return replace(first, payload=payload, scales=scales)
