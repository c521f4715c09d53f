"""Block-scaled quantisation: a byte for each element and one scale for each block of 256. The host form.

    kind     a code is                    largest   relative step
    "fp8"    E4M3 (torch.float8_e4m3fn)   448       an eighth of the value's power of two
    "int8"   two's complement             127       a 64th to a 127th of the block's largest

**Scales are powers of two**: the smallest with which the block's largest magnitude (amax) does not exceed the largest
code, from 2^-126 up, as in the OCP's microscaling formats. They buy that nothing is divided by a scale and that every
product of a code and a scale is exact. So
 - host, interpreter and every GPU give the same bytes, whether multiplication and addition are fused or not;
 - a decoded value is one of float32 and bfloat16, unrounded but for bfloat16's subnormals, and of float16 in its range;
 - what was decoded is encoded to the same values again: nothing drifts when data passes through twice.

What they cost against amax / largest (a million values, the blocks of magnitudes over four binades):

    signal to noise, dB     Gaussian         Student's t, 3    uniform          largest error / amax
    fp8                     31.6 for 31.7    31.5 for 32.3     31.5 for 31.9    1/16 for 1/28
    int8                    39.7 for 43.1    33.2 for 36.5     44.7 for 48.1    1/127 for 1/254

**Replicas stay equal** because all ranks decode the same bytes, a rank's own stripe included. A rank that kept the
float32 sums of the stripe that it has reduced would be more exact there and differ from the others for ever.

256 elements to a block: four bytes in 256 are 1.6% more to send, and a block is still held by half a warp, which finds
its maximum without shared memory.

The payload is padded with zeros to whole blocks, so that kernels move nothing but whole 16-byte lines. Payload and
scales are arrays of their own: any stretch of blocks is one slice of each (`Quantised.blocks`), and is aligned as the
whole is. The payload has to begin at a multiple of 16 bytes. Scales from elsewhere that are no powers of two are
decoded, but host and device may then differ in the last bit of a sum.

    NaN, infinity     the whole block becomes NaN: its scale is NaN (0x7FC00000), its codes 0x7F ("fp8"), -128 ("int8").
                      So an overflow is never hidden, and decoding needs no test. A lone fp8 code 0x7F or 0xFF, which
                      only others write, is NaN. Decoded NaN have the bits 0x7FC00000, 0x7E00 (fp16), 0x7FC0 (bf16).
    -0                stays in fp8; int8 has none
    underflow         to zero, at half a step: 2^-10 (fp8) or 2^-1 (int8) of the scale
    subnormal input   is not flushed, but the scale ends at 2^-126; a block of zeros has that scale
    largest           the scale ends where a decoded value could overflow; above 1.75 * 2^127 (fp8) and 127 * 2^121
                      (int8) values saturate. So a finite block is decoded to finite values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ftcomm.kernels.check import MOST_SOURCES, KernelArgumentError, Span, aligned, check_sms, span_of

Array = Any  # a NumPy array or a torch tensor

BLOCK = 256
DTYPES = ("float32", "float16", "bfloat16")
OPS = ("sum", "avg")


@dataclass(frozen=True)
class Format:
    """A kind of code. The scale of a block is 2^(s - 127), s = ((bits of amax + round_up) >> 23) - shift, clamped."""

    largest: int
    dtype: str  # of the payload
    nan: int  # code of all elements of a block that is NaN
    round_up: int  # carries a mantissa larger than that of `largest` into the exponent
    shift: int  # exponent of `largest`
    top: int  # highest s with which largest * 2^(s - 127) is finite


FORMATS = {
    "fp8": Format(448, "uint8", 0x7F, 0x7FFFFF - 0x600000, 8, 127 + 119),
    "int8": Format(127, "int8", -128, 0x7FFFFF - 0x7E0000, 6, 127 + 121),
}


@dataclass(frozen=True)
class Quantised:
    """A one-dimensional array, quantised. Arrays are as the source's were: NumPy, or torch on its device."""

    kind: str  # "fp8" or "int8"
    payload: Array  # [blocks * 256] uint8 (E4M3 codes) or int8
    scales: Array  # [blocks] float32
    count: int  # elements, at most blocks * 256
    dtype: str  # of the source: what `dequantise` gives back

    def blocks(self, start: int, stop: int) -> Quantised:
        """Blocks `start` to `stop`, as views: what one rank reduces, or one message carries."""
        total = len(self.scales)
        if not 0 <= start <= stop <= total:
            raise KernelArgumentError(f"blocks {start} to {stop} were asked for, but there are {total}.")
        return replace(
            self,
            payload=self.payload[start * BLOCK : stop * BLOCK],
            scales=self.scales[start:stop],
            count=min(self.count, stop * BLOCK) - min(self.count, start * BLOCK),
        )


# ---- what is accepted ---------------------------------------------------------------------------------------------


def check_kind(kind: str) -> Format:
    if kind not in FORMATS:
        raise KernelArgumentError(f"kind={kind!r} is not known; use one of {', '.join(FORMATS)}.")
    return FORMATS[kind]


def check_array(array: Array, name: str, dtypes: Sequence[str], count: int | None = None) -> Span:
    """A contiguous array of one of `dtypes`."""
    span = span_of(name, array)
    if span.dtype not in dtypes:
        raise KernelArgumentError(f"{name} has the dtype {span.dtype}; convert it to {' or '.join(dtypes)}.")
    if count is not None and span.count != count:
        raise KernelArgumentError(f"{name} has {span.count} elements; {count} are expected.")
    return span


def check_quantised(source: Quantised, name: str = "source") -> tuple[Span, Span]:
    """That the arrays are what the fields say: they may have come from elsewhere. Payload and scales."""
    form = check_kind(source.kind)
    if source.dtype not in DTYPES:
        raise KernelArgumentError(f"{name}.dtype is {source.dtype!r}; use one of {', '.join(DTYPES)}.")
    blocks = -(-source.count // BLOCK)
    payload = check_array(source.payload, f"{name}.payload", [form.dtype], blocks * BLOCK)
    scales = check_array(source.scales, f"{name}.scales", ["float32"], blocks)
    if payload.device != scales.device:
        raise KernelArgumentError(f"{payload.name} is on {payload.device}, its scales on {scales.device}; copy one.")
    if blocks and not aligned([payload]):
        raise KernelArgumentError(
            f"{payload.name} begins {payload.address % 16} bytes behind a multiple of 16; copy it to memory of its "
            "own, and take stretches of it with Quantised.blocks()."
        )
    return payload, scales


def check_sources(sources: Sequence[Quantised], op: str) -> None:
    """Several of one kind, count, dtype and device."""
    if op not in OPS:
        raise KernelArgumentError(f"op={op!r} is not done on quantised data; use one of {', '.join(OPS)}.")
    if not 1 <= len(sources) <= MOST_SOURCES:
        raise KernelArgumentError(f"1 to {MOST_SOURCES} sources are expected, there are {len(sources)}.")
    first = sources[0]
    devices = [check_quantised(source, f"sources[{i}]")[0].device for i, source in enumerate(sources)]
    for i, source in enumerate(sources):
        for word, theirs, mine in (
            ("kind", source.kind, first.kind),
            ("count", source.count, first.count),
            ("dtype", source.dtype, first.dtype),
            ("device", devices[i], devices[0]),
        ):
            if theirs != mine:
                raise KernelArgumentError(f"sources[{i}] has the {word} {theirs}, sources[0] has {mine}.")


def check_out(source: Quantised, out: Array) -> None:
    read = check_quantised(source)
    written = check_array(out, "out", [source.dtype], source.count)
    if written.device != read[0].device:
        raise KernelArgumentError(f"out is on {written.device}, source on {read[0].device}; copy one of them.")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise KernelArgumentError("out is read-only; pass an array that may be written.")
    for span in read:
        if written.overlaps(span):
            raise KernelArgumentError(f"out overlaps {span.name}; pass another array.")


# ---- the host form ------------------------------------------------------------------------------------------------


def quantise(x: Array, kind: str, *, sms: int | None = None) -> Quantised:
    """Quantise `x`, contiguous float32, float16 or bfloat16 of any shape, to "fp8" or "int8". See `ftcomm.kernels`."""
    check_sms(sms)
    check_kind(kind)
    span = check_array(x, "x", DTYPES)
    payload, scales = _encode(_widen(_numpy(x), span.dtype), kind)
    return Quantised(kind, _like(x, payload), _like(x, scales), span.count, span.dtype)


def dequantise(source: Quantised, *, out: Array | None = None, sms: int | None = None) -> Array:
    """The values, in `out` (of any shape) or a new array, of the source's dtype.

    They are exact where that dtype has them. Else they are rounded to nearest even: to float16, whose range they may
    leave, and among the subnormals of bfloat16.
    """
    check_sms(sms)
    if out is None:
        check_quantised(source)
        out = empty_like(source.payload, source.count, source.dtype)
    check_out(source, out)
    _numpy(out)[:] = _narrow(_decode(source)[: source.count], source.dtype)
    return out


def dequantise_reduce_requantise(sources: Sequence[Quantised], op: str = "sum", *, sms: int | None = None) -> Quantised:
    """Sum or average of up to 16 quantised arrays, quantised once: accumulated in float32 in the order of `sources`,
    which has to be the same on all ranks if they are to send the same bytes."""
    check_sms(sms)
    check_sources(sources, op)
    first = sources[0]
    with np.errstate(invalid="ignore", over="ignore"):
        acc = _decode(first)
        for source in sources[1:]:
            acc += _decode(source)
        if op == "avg":
            acc /= np.float32(len(sources))
    payload, scales = _encode(acc, first.kind)
    return replace(first, payload=_like(first.payload, payload), scales=_like(first.scales, scales))


def scale_bits(amax: np.ndarray, form: Format) -> np.ndarray:
    """The biased exponent of the scale, from the bits of the block's largest magnitude."""
    exponent: np.ndarray = np.minimum(np.maximum(((amax + form.round_up) >> 23) - form.shift, 1), form.top)
    return exponent


def _encode(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of float32 values; the last block is filled with zeros."""
    form = FORMATS[kind]
    blocks = -(-len(x) // BLOCK)
    padded = np.zeros((blocks, BLOCK), np.float32)
    padded.reshape(-1)[: len(x)] = x
    bits = padded.view(np.int32)
    # As integers magnitudes have the order of the values, and NaN and infinity come last.
    amax = (bits & 0x7FFFFFFF).max(axis=1, initial=0)
    poisoned = amax >= 0x7F800000
    exponent = scale_bits(amax.astype(np.int64), form).astype(np.int32)
    scales = np.where(poisoned, np.int32(0x7FC00000), exponent << 23).view(np.float32)
    inverse = ((254 - exponent) << 23).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = np.minimum(np.abs(padded) * inverse[:, None], np.float32(form.largest))
    codes = _e4m3(magnitude, bits < 0) if kind == "fp8" else _int8(magnitude, bits < 0)
    codes[poisoned] = form.nan
    return codes.reshape(-1), scales


def _e4m3(magnitude: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """To E4M3, to nearest even, in integers: what libraries make of a tie or of a subnormal differs."""
    bits = magnitude.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).astype(np.int32) - ((127 - 7) << 3)
    with np.errstate(invalid="ignore"):
        subnormal = np.rint(magnitude * np.float32(512)).astype(np.int32)
    return (np.where(bits < 0x3C800000, subnormal, normal) | (negative << 7)).astype(np.uint8)


def _int8(magnitude: np.ndarray, negative: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        code = np.rint(magnitude).astype(np.int32)
    return np.where(negative, -code, code).astype(np.int8)


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code >> 7, -value, value).astype(np.float32)


E4M3_VALUES = _e4m3_values()  # of the 256 codes


def _decode(source: Quantised) -> np.ndarray:
    """float32 [blocks * 256]."""
    codes = _numpy(source.payload).reshape(-1, BLOCK)
    values = E4M3_VALUES[codes] if source.kind == "fp8" else codes.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        values *= _numpy(source.scales)[:, None]
    return values.reshape(-1)


# ---- arrays -------------------------------------------------------------------------------------------------------


def empty_like(array: Array, count: int, dtype: str) -> Array:
    """A new array where `array` is."""
    if isinstance(array, np.ndarray):
        return np.empty(count, dtype)
    import torch

    return torch.empty(count, dtype=getattr(torch, dtype), device=array.device)


def _numpy(array: Array) -> np.ndarray:
    """The same memory for NumPy, in one dimension. NumPy has no bfloat16: its bits."""
    if not isinstance(array, np.ndarray):
        import torch

        array = (array.detach().view(torch.uint16) if array.dtype == torch.bfloat16 else array.detach()).numpy()
    return array.reshape(-1)


def _like(model: Array, array: np.ndarray) -> Array:
    if isinstance(model, np.ndarray):
        return array
    import torch

    return torch.from_numpy(array)


def _widen(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def _narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """To `dtype` as it lies in memory, to nearest even; all NaN with the same bits."""
    nan = x != x
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        return np.where(nan, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        narrow = x.astype(dtype)
    narrow[nan] = np.nan
    return narrow
