"""Block-scaled fp8: a byte for each element and one scale for each block of 256. The format, and what codes in it.

    RECORD    256 codes, E4M3 (torch.float8_e4m3fn), then the scale, float32: 260 bytes

A block and its scale lie together, so any stretch of blocks is one run of bytes. The last block is filled with zeros.

**Scales are powers of two**: the smallest with which the block's largest magnitude (amax) does not exceed the largest
code, 448, from 2^-126 up, as in the OCP's microscaling formats. They buy that nothing is divided by a scale and that
every product of a code and a scale is exact. So
 - every processor gives the same bytes, whether multiplication and addition are fused or not;
 - a decoded value is one of float32 and bfloat16, unrounded but for bfloat16's subnormals, and of float16 in its range;
 - what was decoded is encoded to the same values again: nothing drifts when data passes through twice.

What they cost against amax / 448 (a million values, the blocks of magnitudes over four binades):

    signal to noise, dB     Gaussian         Student's t, 3    uniform          largest error / amax
                            31.6 for 31.7    31.5 for 32.3     31.5 for 31.9    1/16 for 1/28

**Replicas stay equal** because all ranks decode the same bytes, a rank's own slice included. A rank that kept the
float32 sums of the slice that it has reduced would be more exact there and differ from the others for ever.

    NaN, infinity     the whole block becomes NaN: its scale is NaN (0x7FC00000), its codes 0x7F. So an overflow is
                      never hidden. A lone code 0x7F or 0xFF, which only others write, is NaN. Decoded NaN have the bits
                      0x7FC00000, 0x7E00 (fp16), 0x7FC0 (bf16)
    -0                stays
    underflow         to zero, at half a step: 2^-10 of the scale
    subnormal input   is not flushed, but the scale ends at 2^-126; a block of zeros has that scale
    largest           the scale ends where a decoded value could overflow; above 1.75 * 2^127 values saturate. So a
                      finite block is decoded to finite values

What PyTorch does between two float types is exact or rounded to nearest even, so its conversion to E4M3 gives the codes
that are wanted for all that is not NaN. Its conversion from E4M3 is slow: the seven bits behind the sign, moved by
seven, are a float16 that is 256 times smaller, subnormals included, and that one is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ftcomm.kernels.host.tensors import HostArray, lasting, scratch, unlocked

BLOCK = 256
RECORD = np.dtype([("codes", np.uint8, (BLOCK,)), ("scale", np.float32)])
DTYPES = ("float32", "float16", "bfloat16")
OPS = ("sum", "avg")

# The scale of a block is 2^(s - 127), s = ((bits of amax + ROUND_UP) >> 23) - SHIFT, clamped.
LARGEST = 448
ROUND_UP = 0x7FFFFF - 0x600000  # carries a mantissa larger than that of `LARGEST` into the exponent
SHIFT = 8  # exponent of `LARGEST`
TOP = 127 + 119  # highest s with which LARGEST * 2^(s - 127) is finite
NAN = 0x7F  # code of all elements of a block that is NaN

_ROWS = 127  # blocks at a time, which stay in the cache; from 32768 elements on PyTorch may use several threads
_INFINITE = 0x7F800000
_SATURATES = (TOP + SHIFT) << 23  # bits of magnitudes that may exceed the largest code at the largest scale
_NAN_SCALE = np.array(0x7FC00000, np.int32).view(np.float32)
_NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}


def blocks(count: int) -> int:
    """Returns how many blocks hold `count` elements."""
    return -(-count // BLOCK)


class Packed:
    """Records in memory that somebody may only read, made ready to be encoded to and decoded from."""

    def __init__(self, records: HostArray) -> None:
        import torch

        records = records if records.flags.writeable else unlocked(records)
        self.scales = records["scale"]
        with lasting():
            codes = torch.from_numpy(records["codes"])
            self.codes = codes.view(torch.float8_e4m3fn)
            self.signed = codes.view(torch.int8)

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, some: slice) -> Packed:
        found = object.__new__(Packed)
        found.scales, found.codes, found.signed = self.scales[some], self.codes[some], self.signed[some]
        return found


class Packer:
    """Encodes, decodes and reduces. Its scratch memory, three times the largest array, is for one thread at a time."""

    def __init__(self) -> None:
        self._part = scratch(_ROWS, BLOCK)
        self._bits = scratch(_ROWS, BLOCK, dtype="int16")
        self._grow(0)

    def _grow(self, rows: int) -> None:
        self._values = scratch(rows, BLOCK)
        self._largest = scratch(rows)
        self._between = Packed(np.empty(rows, RECORD))

    def _scratch(self, rows: int) -> Any:
        """Returns scratch of float32 [rows, 256]."""
        if len(self._values) < rows:
            self._grow(rows)
        return self._values[:rows]

    def encode(self, dtype: str, x: HostArray, out: Packed) -> None:
        """Encode `x`, a carrier array of float32, float16 or bfloat16, to as many blocks as hold it; the last one is
        filled with zeros."""
        elements, rows = _tensor(dtype, x), len(out)
        if dtype == "float32" and len(elements) == rows * BLOCK:
            self._store(elements.view(rows, BLOCK), out)
            return
        values = self._scratch(rows)
        flat = values.view(-1)
        flat[: len(elements)].copy_(elements)
        flat[len(elements) :].zero_()
        self._store(values, out)

    def decode(self, source: Packed, dtype: str, out: HostArray) -> None:
        """Decode into a carrier array that ends in the last block."""
        elements = _tensor(dtype, out)
        for first, last in _stretches(len(source)):
            begin, end = first * BLOCK, min(last * BLOCK, len(elements))
            values = self._load(source, first, last, self._part)
            elements[begin:end].copy_(values.view(-1)[: end - begin])
        if (source.scales != source.scales).any():  # a NaN of one kind, whatever PyTorch makes of it
            bits = _integers(dtype, elements)
            for block in np.flatnonzero(source.scales != source.scales).tolist():
                bits[block * BLOCK : (block + 1) * BLOCK] = _NAN[dtype]

    def reduce(self, sources: Sequence[Packed], op: str, out: Packed) -> None:
        """Sum or average in float32, in the order of `sources`, encoded once. `out` is none of them."""
        assert op in OPS
        values = self._scratch(len(out))
        for first, last in _stretches(len(out)):
            acc = self._load(sources[0], first, last, values[first:last])
            for source in sources[1:]:
                acc.add_(self._load(source, first, last, self._part))
            if op == "avg":
                acc.div_(len(sources))
        self._store(values, out)

    def reduce_decoded(self, sources: Sequence[Packed], op: str, dtype: str, out: HostArray) -> None:
        """Does what `reduce` and then `decode` do: a member that gets the reduced blocks from another one has the same
        values."""
        rows = len(sources[0])
        self._scratch(rows)
        between = self._between[:rows]
        self.reduce(sources, op, between)
        self.decode(between, dtype, out)

    def _store(self, values: Any, out: Packed) -> None:
        """Store float32 [rows, 256] as blocks."""
        import torch

        rows = len(values)
        if not rows:
            return
        if len(self._largest) < rows:
            self._grow(rows)
        largest = self._largest[:rows]
        for first, last in _stretches(rows):
            torch.amax(torch.abs(values[first:last], out=self._part[: last - first]), dim=1, out=largest[first:last])
        amax = largest.numpy().view(np.int32)
        exponent = np.minimum(np.maximum(((amax + ROUND_UP) >> 23) - SHIFT, 1), TOP)
        inverse = torch.from_numpy(((254 - exponent) << 23).view(np.float32))[:, None]
        odd = amax.max() >= _SATURATES
        for first, last in _stretches(rows):
            scaled = torch.mul(values[first:last], inverse[first:last], out=self._part[: last - first])
            if odd:
                scaled.clamp_(-LARGEST, LARGEST)
            out.codes[first:last].copy_(scaled)
        out.scales[:] = (exponent << 23).view(np.float32)
        if odd:
            poisoned = np.flatnonzero(amax >= _INFINITE)
            out.scales[poisoned] = _NAN_SCALE
            out.signed[torch.from_numpy(poisoned)] = NAN

    def _load(self, source: Packed, first: int, last: int, into: Any) -> Any:
        """The blocks from `first` to `last` in float32, [rows, 256], in the memory of `into`."""
        import torch

        bits, values = self._bits[: last - first], into[: last - first]
        bits.copy_(source.signed[first:last]).bitwise_left_shift_(7).bitwise_and_(~0x4000)  # of the sign, once more
        factor = source.scales[first:last] * np.float32(256)
        return values.copy_(bits.view(torch.float16)).mul_(torch.from_numpy(factor)[:, None])


def _stretches(rows: int) -> list[tuple[int, int]]:
    return [(first, min(first + _ROWS, rows)) for first in range(0, rows, _ROWS)]


def _tensor(dtype: str, carrier: HostArray) -> Any:
    """Returns a tensor of the elements of a carrier array, in its memory."""
    import torch

    return torch.from_numpy(carrier.view(np.int16) if dtype == "bfloat16" else carrier).view(getattr(torch, dtype))


def _integers(dtype: str, values: Any) -> Any:
    import torch

    return values.view(torch.int32 if dtype == "float32" else torch.int16)
