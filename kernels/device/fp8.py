"""Spans of fp8 records, for one program: the bytes of `ftcomm.kernels.host.fp8`, which says what a record is.

    encode_span       elements --widened--> [bits] --max of a block--> scale --------------------> records
                                      `--------------- / scale --rounded to a code--------------'
    reduce_records    records of w sources --code * scale, in order--> sum or average --as above--> records
    decode_span       records --code * scale--> narrowed --> elements

A tile is BLOCK // 256 blocks, held as rows of 256. A record is 260 bytes, so codes move four at a time, 32 bits.
Whole tiles have no mask, what is left of a span has one of rows, and a last block that the elements do not fill is done
by itself.

What makes the bytes equal on every processor: the maximum is one of integers; scales are powers of two made of exponent
bits, so that x / scale is a multiplication, and code * scale is exact; codes are rounded by integers. What remains is
rounded once, by IEEE: the sum, and the division of an average. So sm_80, which does not convert E4M3, has the same text
as those that do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftcomm.kernels.device.tile import divide, narrow, widen
from ftcomm.kernels.dtypes import OPS
from ftcomm.kernels.host import fp8

ELEMENTS = tl.constexpr(fp8.BLOCK)  # of a record
RECORD = tl.constexpr(fp8.RECORD.itemsize)
_WORDS = tl.constexpr(fp8.RECORD.itemsize // 4)  # of 32 bits, in a record
_LARGEST = tl.constexpr(float(fp8.LARGEST))
_ROUND_UP, _SHIFT, _TOP, _NAN = (tl.constexpr(n) for n in (fp8.ROUND_UP, fp8.SHIFT, fp8.TOP, fp8.NAN))
_SUM, _AVG = (tl.constexpr(OPS.index(op)) for op in fp8.OPS)
_GROUP = tl.constexpr(4)  # sources loaded at a time

_INFINITE = tl.constexpr(0x7F800000)
_NAN_SCALE = tl.constexpr(0x7FC00000)
_LEAST_NORMAL = tl.constexpr(0x3C800000)  # 2^-6, the smallest number of E4M3 that is not subnormal
_REBIAS = tl.constexpr((127 - 7) << 3)  # from the exponent of float32 to that of E4M3, above three bits
_STEPS = tl.constexpr(16384.0)  # 2^14, of which the last bit is 2^-9: one step of the subnormal numbers
_STEPS_BITS = tl.constexpr(0x46800000)


# ---- codes --------------------------------------------------------------------------------------------------------


@triton.jit
def _coded(x):
    """float32 [rows, 256] -> (codes [rows, 256], int8; bits of the scales [rows], int32)."""
    amax = tl.minimum(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), _INFINITE)
    exponent = tl.minimum(tl.maximum(((amax + _ROUND_UP) >> 23) - _SHIFT, 1), _TOP)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = x * inverse[:, None]
    magnitude = tl.minimum(tl.abs(scaled), _LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)  # those of a NaN, and what is added, may exceed 31
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).to(tl.int32) - _REBIAS
    subnormal = (magnitude + _STEPS).to(tl.int32, bitcast=True) - _STEPS_BITS
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(bits < _LEAST_NORMAL, subnormal, normal) | sign
    code = tl.where((amax == _INFINITE)[:, None], _NAN, code)
    return code.to(tl.int8), tl.where(amax == _INFINITE, _NAN_SCALE, exponent << 23)


@triton.jit
def _decoded(codes, scales):
    """(codes [rows, 256], bits of the scales [rows]) -> float32. The seven bits behind the sign, moved by seven, are a
    float16 that is 256 times smaller."""
    half = ((codes.to(tl.int32) << 7) & 0xBF80).to(tl.int16).to(tl.float16, bitcast=True)
    factor = scales.to(tl.float32, bitcast=True) * 256.0
    return half.to(tl.float32) * factor[:, None]


@triton.jit
def _bits(x, T: tl.constexpr):
    """float32 rounded to T, as it lies in memory, in integers; one NaN."""
    if T == tl.float32:
        return tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    elif T == tl.float16:
        return tl.where(x != x, 0x7E00, narrow(x, T).to(tl.int16, bitcast=True)).to(tl.int16)
    else:
        return tl.where(x != x, 0x7FC0, narrow(x, T).to(tl.int16, bitcast=True)).to(tl.int16)


# ---- memory -------------------------------------------------------------------------------------------------------


@triton.jit
def _places(ROWS: tl.constexpr):
    """(the rows of a tile [ROWS, 1], its columns [1, 256])"""
    return tl.arange(0, ROWS)[:, None], tl.arange(0, ELEMENTS)[None, :]


@triton.jit
def _codes(address, row, column):
    """Pointers to the codes of the records from `address` on."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int8)), 4) + row * RECORD + column


@triton.jit
def _scales(address, ROWS: tl.constexpr):
    """Pointers to their scales."""
    return (address + ELEMENTS).to(tl.pointer_type(tl.int32)) + tl.arange(0, ROWS) * _WORDS


@triton.jit
def _array(address, row, column, T: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the elements of blocks from `address` on, as integers."""
    pointer = address.to(tl.pointer_type(tl.int32 if T == tl.float32 else tl.int16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + row * ELEMENTS + column


@triton.jit
def _widened(bits, T: tl.constexpr):
    """Elements as they lie in memory, in integers -> float32."""
    if T == tl.float32:
        return bits.to(tl.float32, bitcast=True)
    elif T == tl.float16:
        return widen(bits.to(tl.float16, bitcast=True), T, _SUM)
    else:
        return widen(bits.to(tl.uint16, bitcast=True), T, _SUM)


@triton.jit
def _fetch(address, rows, ROWS: tl.constexpr):
    """The codes and scales of records from `address` on: of the first `rows` alone, if it is not None."""
    row, column = _places(ROWS)
    if rows is None:
        codes = tl.load(_codes(address, row, column), eviction_policy="evict_first")
        scales = tl.load(_scales(address, ROWS))
    else:
        codes = tl.load(_codes(address, row, column), mask=row < rows, other=0, eviction_policy="evict_first")
        scales = tl.load(_scales(address, ROWS), mask=tl.arange(0, ROWS) < rows, other=0)
    return codes, scales


@triton.jit
def _put(address, codes, scales, rows, ROWS: tl.constexpr):
    """Write codes and scales, likewise."""
    row, column = _places(ROWS)
    if rows is None:
        tl.store(_codes(address, row, column), codes)
        tl.store(_scales(address, ROWS), scales)
    else:
        tl.store(_codes(address, row, column), codes, mask=row < rows)
        tl.store(_scales(address, ROWS), scales, mask=tl.arange(0, ROWS) < rows)


@triton.jit
def _encode(src, dst, there, rows, T: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Encode one tile, of `rows` blocks, of which those elements are `there`, None: all; the others count as zeros."""
    row, column = _places(ROWS)
    if there is None:
        bits = tl.load(_array(src, row, column, T, ALIGNED), eviction_policy="evict_first")
    else:
        bits = tl.load(_array(src, row, column, T, ALIGNED), mask=there, other=0, eviction_policy="evict_first")
    codes, scales = _coded(_widened(bits, T))
    _put(dst, codes, scales, rows, ROWS)


@triton.jit
def _decode(src, dst, there, rows, T: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Decode one tile, likewise; only those elements are written."""
    row, column = _places(ROWS)
    codes, scales = _fetch(src, rows, ROWS)
    tl.store(_array(dst, row, column, T, ALIGNED), _bits(_decoded(codes, scales), T), mask=there)


@triton.jit
def _reduce(table, w, at, dst, rows, OP: tl.constexpr, ROWS: tl.constexpr):
    """Reduce one tile, likewise."""
    codes, scales = _fetch(tl.load(table) + at, rows, ROWS)
    acc = _decoded(codes, scales)
    for group in range(1, w, _GROUP):
        codes_of = ()
        scales_of = ()
        for i in tl.static_range(_GROUP):
            source = tl.load(table + tl.minimum(group + i, w - 1)) + at
            codes, scales = _fetch(source, tl.where(group + i < w, ROWS if rows is None else rows, 0), ROWS)
            codes_of = codes_of + (codes,)
            scales_of = scales_of + (scales,)
        for i in tl.static_range(_GROUP):
            if group + i < w:
                acc += _decoded(codes_of[i], scales_of[i])
    if OP == _AVG:
        acc = divide(acc, w)
    codes, scales = _coded(acc)
    _put(dst, codes, scales, rows, ROWS)


# ---- spans --------------------------------------------------------------------------------------------------------


@triton.jit
def encode_span(src, dst, n, T: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Records at the address `dst` of n elements at `src`; the last block is filled with zeros."""
    rows: tl.constexpr = BLOCK // ELEMENTS
    size: tl.constexpr = T.primitive_bitwidth // 8
    src = tl.cast(src, tl.int64)
    dst = tl.cast(dst, tl.int64)
    n = tl.cast(n, tl.int64)
    full = n // BLOCK
    for tile in range(0, full):
        _encode(src + tile * (BLOCK * size), dst + tile * (rows * RECORD), None, None, T, rows, ALIGNED)
    src += full * (BLOCK * size)
    dst += full * (rows * RECORD)
    rest = (n % BLOCK).to(tl.int32)
    whole = rest // ELEMENTS
    if whole > 0:
        row, _ = _places(rows)
        _encode(src, dst, row < whole, whole, T, rows, ALIGNED)
    if rest % ELEMENTS > 0:
        row, column = _places(rows)
        there = (row == 0) & (column < rest % ELEMENTS)
        _encode(src + whole * (ELEMENTS * size), dst + whole * RECORD, there, 1, T, rows, ALIGNED)


@triton.jit
def decode_span(src, dst, n, T: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """n elements at the address `dst` of records at `src`."""
    rows: tl.constexpr = BLOCK // ELEMENTS
    size: tl.constexpr = T.primitive_bitwidth // 8
    src = tl.cast(src, tl.int64)
    dst = tl.cast(dst, tl.int64)
    n = tl.cast(n, tl.int64)
    full = n // BLOCK
    for tile in range(0, full):
        _decode(src + tile * (rows * RECORD), dst + tile * (BLOCK * size), None, None, T, rows, ALIGNED)
    src += full * (rows * RECORD)
    dst += full * (BLOCK * size)
    rest = (n % BLOCK).to(tl.int32)
    whole = rest // ELEMENTS
    if whole > 0:
        row, _ = _places(rows)
        _decode(src, dst, row < whole, whole, T, rows, ALIGNED)
    if rest % ELEMENTS > 0:
        row, column = _places(rows)
        there = (row == 0) & (column < rest % ELEMENTS)
        _decode(src + whole * RECORD, dst + whole * (ELEMENTS * size), there, 1, T, rows, ALIGNED)


@triton.jit
def reduce_records(table, first, w, offset, dst, blocks, OP: tl.constexpr, BLOCK: tl.constexpr):
    """Records at the address `dst`: sum or average of those of w sources, which lie `offset` bytes behind the addresses
    table[first + i]."""
    rows: tl.constexpr = BLOCK // ELEMENTS
    table = tl.cast(table, tl.pointer_type(tl.int64)) + first
    offset = tl.cast(offset, tl.int64)
    dst = tl.cast(dst, tl.int64)
    blocks = tl.cast(blocks, tl.int64)
    w = tl.cast(w, tl.int32)
    full = blocks // rows
    for tile in range(0, full):
        at = tile * (rows * RECORD)
        _reduce(table, w, offset + at, dst + at, None, OP, rows)
    left = (blocks % rows).to(tl.int32)
    if left > 0:
        at = full * (rows * RECORD)
        _reduce(table, w, offset + at, dst + at, left, OP, rows)
