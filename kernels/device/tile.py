"""Spans of memory, tile by tile: what all kernels move and reduce with.

Addresses are int64, counts and offsets are in elements. A *tile* is BLOCK elements of each source at once, held in
registers as rows of one 16-byte line, so that a mask over rows costs no vector: all accesses are 128 bits wide, but for
the last elements that fill no line. Every element is loaded by the thread that stores it, all sources of a tile are
loaded before it is stored: an output may be the same memory as a source, but not overlap it otherwise.

    W > 0    the loads of a tile are asked for together
    W == 0   any number of sources, GROUP of them at a time; the same bits

What is asked for together need not be under way together: to save registers, ptxas moves loads behind the arithmetic
(sm_90, four sources: 5 to 7 of 16 loads at a time), barriers or not. It cannot with what the next turn of a loop uses,
so with AHEAD a turn loads the next tile while it reduces its own. That takes registers, which a kernel that does more
than this has not got.

An address that comes as a number tells the compiler nothing about its alignment, and it then loads element by element;
ALIGNED (all addresses, and all offsets in bytes, are multiples of 16) makes `tl.multiple_of` true and gives the vectors
back.

Sources are read once, so they leave the caches first.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from ftcomm.kernels.device import INTERPRETED
from ftcomm.kernels.dtypes import OPS

_SUM, _AVG, _MIN, _MAX, _PRODUCT, _BAND, _BOR = (
    tl.constexpr(OPS.index(op)) for op in ("sum", "avg", "min", "max", "product", "band", "bor")
)
_INTERPRETED = tl.constexpr(INTERPRETED)
_GROUP = tl.constexpr(4)  # sources loaded at a time where their number is not known when compiling


# ---- elements -----------------------------------------------------------------------------------------------------


@triton.jit
def widen(x, T: tl.constexpr, OP: tl.constexpr):
    """Elements of T as they lie in memory (bf16: its bits) in the type that they are reduced in."""
    if T == tl.bfloat16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif T == tl.float16:
        return x.to(tl.float32)
    elif (OP == _AVG) & T.is_int_signed():
        return x.to(tl.int64)
    elif (OP == _AVG) & T.is_int_unsigned():
        return x.to(tl.uint64)
    else:
        return x


@triton.jit
def narrow(x, T: tl.constexpr):
    """Converts back, rounded to nearest even. The interpreter truncates to bf16, so there it is done in integers."""
    if T == tl.bfloat16:
        if _INTERPRETED:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).to(tl.uint32)) >> 16
            return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)
        else:
            return x.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        return x.to(T)


@triton.jit
def combine(x, y, OP: tl.constexpr):
    """One step of a reduction. Of two equal zeros min and max give the second, as NumPy does, and they pass NaN on."""
    if OP <= _AVG:
        if x.dtype.is_floating():
            return x + y
        else:
            return tl.add(x, y, sanitize_overflow=False)
    elif OP <= _MAX:
        if x.dtype.is_floating():
            first = (x < y) if OP == _MIN else (x > y)
            return tl.where(first | (x != x), x, y)
        else:
            return tl.minimum(x, y) if OP == _MIN else tl.maximum(x, y)
    elif OP == _PRODUCT:
        if x.dtype.is_floating():
            return x * y
        else:
            return tl.mul(x, y, sanitize_overflow=False)
    elif OP == _BAND:
        return x & y
    elif OP == _BOR:
        return x | y
    else:
        return x ^ y


@triton.jit
def divide(x, divisor):
    """Divides: exactly rounded; integers toward zero."""
    d = divisor.to(x.dtype)
    if x.dtype == tl.float32:
        return tl.div_rn(x, d)
    elif x.dtype == tl.float64:
        return x / d
    else:
        return x // d


# ---- addresses ----------------------------------------------------------------------------------------------------


def unspecialised(addresses: Sequence[int]) -> tuple[int, ...]:
    """Addresses in a form for which Triton compiles one variant, whatever they are multiples of.

    `do_not_specialize` does not reach the elements of a tuple (Triton 3.6 and 3.9): each that is a multiple of 16 would
    be marked so, and every pattern of marks compiled anew, in the middle of an op. Odd numbers are never marked. What a
    kernel is to know of alignment it is told by ALIGNED. See `addresses_of`.
    """
    return tuple(2 * address + 1 for address in addresses)


@triton.jit
def addresses_of(odd):
    """The tuple of addresses that `unspecialised` was given."""
    addresses = ()
    for i in tl.static_range(len(odd)):
        addresses = addresses + (tl.cast(odd[i], tl.int64) >> 1,)
    return addresses


# ---- tiles --------------------------------------------------------------------------------------------------------


@triton.jit
def _pointer(address, T: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint16 if T == tl.bfloat16 else T))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(address, offsets, mask, T: tl.constexpr, ALIGNED: tl.constexpr):
    return tl.load(_pointer(address, T, ALIGNED) + offsets, mask=mask, eviction_policy="evict_first")


@triton.jit
def _fetch(sources, shift, offsets, mask, W: tl.constexpr, T: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile of each of W sources, as they lie in memory."""
    loaded = ()
    for i in tl.static_range(W):
        loaded = loaded + (_load(sources[i] + shift, offsets, mask, T, ALIGNED),)
    return loaded


@triton.jit
def _fold(loaded, divisor, W: tl.constexpr, T: tl.constexpr, OP: tl.constexpr):
    """A tile of the result, as it lies in memory."""
    if W == 1:
        result = loaded[0]
    else:
        acc = widen(loaded[0], T, OP)
        for i in tl.static_range(1, W):
            acc = combine(acc, widen(loaded[i], T, OP), OP)
        if OP == _AVG:
            acc = divide(acc, divisor)
        result = narrow(acc, T)
    return result


@triton.jit
def _gather(
    sources, table, shift, w, offsets, mask, divisor,
    W: tl.constexpr, T: tl.constexpr, OP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load and reduce a tile of any number of sources."""
    if W > 0:
        result = _fold(_fetch(sources, shift, offsets, mask, W, T, ALIGNED), divisor, W, T, OP)
    else:
        acc = widen(_load(tl.load(table) + shift, offsets, mask, T, ALIGNED), T, OP)
        for group in range(1, w, _GROUP):
            loaded = ()
            for i in tl.static_range(_GROUP):
                source = tl.load(table + tl.minimum(group + i, w - 1)) + shift
                there = tl.full(offsets.shape, group + i, tl.int32) < w
                if mask is not None:
                    there = there & mask
                loaded = loaded + (_load(source, offsets, there, T, ALIGNED),)
            for i in tl.static_range(_GROUP):
                if group + i < w:
                    acc = combine(acc, widen(loaded[i], T, OP), OP)
        if OP == _AVG:
            acc = divide(acc, divisor)
        result = narrow(acc, T)
    return result


@triton.jit
def _store(tile, out, offsets, mask, T: tl.constexpr, ALIGNED: tl.constexpr):
    tl.store(_pointer(out, T, ALIGNED) + offsets, tile, mask=mask)


@triton.jit
def _all(offsets, tile, tiles):
    """A mask of a whole tile: whether it is one of the first `tiles`."""
    return tl.full(offsets.shape, tile, tl.int64) < tiles


@triton.jit
def tiles(
    sources, table, w, offset, out, n, divisor, begin, step,
    W: tl.constexpr, T: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Tiles `begin`, `begin + step`, ... of n elements: out[i] = OP over the sources' [i].

    sources   W > 0: a tuple of W addresses.   table   W == 0: pointer to w addresses
    offset    bytes from all these addresses to where the sources begin
    out       an address
    AHEAD     W > 1: load the next tile while this one is reduced
    """
    SIZE: tl.constexpr = T.primitive_bitwidth // 8
    LINE: tl.constexpr = 16 // SIZE
    column = tl.arange(0, LINE)[None, :]
    row = tl.arange(0, BLOCK // LINE)[:, None]
    offsets = row * LINE + column
    full = n // BLOCK
    if AHEAD and W > 1:
        ahead = _fetch(sources, offset + begin * (BLOCK * SIZE), offsets, _all(offsets, begin, full), W, T, ALIGNED)
        for tile in range(begin, full, step):
            loaded = ahead
            following = tile + step
            ahead = _fetch(
                sources, offset + following * (BLOCK * SIZE), offsets, _all(offsets, following, full), W, T, ALIGNED
            )
            result = _fold(loaded, divisor, W, T, OP)
            _store(result, out + tile * (BLOCK * SIZE), offsets, None, T, ALIGNED)
    else:
        for tile in range(begin, full, step):
            shift = tile * (BLOCK * SIZE)
            result = _gather(sources, table, offset + shift, w, offsets, None, divisor, W, T, OP, ALIGNED)
            _store(result, out + shift, offsets, None, T, ALIGNED)
    if full % step == begin:
        rest = (n % BLOCK).to(tl.int32)
        shift = full * (BLOCK * SIZE)
        if rest >= LINE:
            there = row < rest // LINE
            result = _gather(sources, table, offset + shift, w, offsets, there, divisor, W, T, OP, ALIGNED)
            _store(result, out + shift, offsets, there, T, ALIGNED)
        if rest % LINE > 0:
            shift += (rest // LINE) * 16
            there = column < rest % LINE
            result = _gather(sources, table, offset + shift, w, column, there, divisor, W, T, OP, ALIGNED)
            _store(result, out + shift, column, there, T, ALIGNED)


# ---- spans, for one program ---------------------------------------------------------------------------------------


@triton.jit
def copy_span(src, dst, n, T: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """dst[0:n] = src[0:n]."""
    src = tl.cast(src, tl.int64)
    dst = tl.cast(dst, tl.int64)
    n = tl.cast(n, tl.int64)
    zero = tl.zeros((), tl.int64)
    tiles((src,), None, 1, 0, dst, n, None, zero, zero + 1, 1, T, _SUM, BLOCK, ALIGNED, False)


@triton.jit
def reduce_span(
    table, first, w, W: tl.constexpr, src_offset, dst, n, divisor,
    T: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """dst[0:n] = OP over i < w of source i [src_offset : src_offset + n], which is at the address table[first + i].

    W is w, or 0 for any w. `divisor` divides an average. `dst` may be one of the sources' spans.
    """
    first = tl.cast(table, tl.pointer_type(tl.int64)) + first
    shift = tl.cast(src_offset, tl.int64) * (T.primitive_bitwidth // 8)
    dst = tl.cast(dst, tl.int64)
    n = tl.cast(n, tl.int64)
    w = tl.cast(w, tl.int32)
    divisor = tl.cast(divisor, tl.int32)
    zero = tl.zeros((), tl.int64)
    sources = ()
    for i in tl.static_range(W):
        sources = sources + (tl.load(first + i),)
    tiles(sources, first, w, shift, dst, n, divisor, zero, zero + 1, W, T, OP, BLOCK, ALIGNED, False)
