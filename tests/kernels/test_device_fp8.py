"""What kernels code and reduce, against the host's code, byte for byte: `ftcomm.kernels.device.fp8`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from ftcomm.kernels.device import DEVICE
from ftcomm.kernels.device.fp8 import decode_span, encode_span, reduce_records
from ftcomm.kernels.dtypes import OPS
from ftcomm.kernels.host.fp8 import BLOCK, DTYPES, LARGEST, RECORD, Packed, blocks
from tests.rigs.examples import drawn

from .test_fp8 import PACKER, carrier, drawn_bits, packed, tensor

GUARD = 64  # bytes in front of what a kernel writes, and behind it, which it leaves alone
TILES = (256, 1024, 4096)  # elements


@triton.jit(do_not_specialize=["src", "dst", "n"])
def _encode(src, dst, n, T: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    encode_span(src, dst, n, T, TILE, ALIGNED)


@triton.jit(do_not_specialize=["src", "dst", "n"])
def _decode(src, dst, n, T: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    decode_span(src, dst, n, T, TILE, ALIGNED)


@triton.jit(do_not_specialize=["table", "w", "offset", "dst", "n"])
def _reduce(table, w, offset, dst, n, OP: tl.constexpr, TILE: tl.constexpr):
    reduce_records(table, 8, w, offset, dst, n, OP, TILE)


class Guarded:
    """Memory on the device that a kernel fills."""

    def __init__(self, nbytes: int) -> None:
        self._all = torch.full((nbytes + 2 * GUARD,), 0xAA, dtype=torch.uint8, device=DEVICE)
        self.memory = self._all[GUARD : GUARD + nbytes]

    @property
    def bytes(self) -> np.ndarray:
        assert (self._all[:GUARD] == 0xAA).all(), "something in front of it was written"
        assert (self._all[len(self._all) - GUARD :] == 0xAA).all(), "something behind it was written"
        return self.memory.cpu().numpy()


def constants(dtype: str, tile: int, *memory: torch.Tensor) -> dict[str, object]:
    return {
        **{"T": getattr(tl, dtype), "TILE": tile, "num_warps": 8, "enable_fp_fusion": False},
        "ALIGNED": all(x.data_ptr() % 16 == 0 for x in memory),
    }


def encoded(x: torch.Tensor, tile: int, shift: int = 0) -> np.ndarray:
    """The records of `x`, by the device, from where an array that lies at a multiple of 16 bytes is moved by `shift`
    elements."""
    there = torch.empty(len(x) + shift, dtype=x.dtype, device=DEVICE)[shift:].copy_(x)
    out = Guarded(blocks(len(x)) * RECORD.itemsize)
    dtype = str(x.dtype).removeprefix("torch.")
    _encode[(1,)](there.data_ptr(), out.memory.data_ptr(), len(x), **constants(dtype, tile, there))
    return out.bytes.view(RECORD)


def decoded(records: np.ndarray, dtype: str, count: int, tile: int) -> np.ndarray:
    """As bytes."""
    there = torch.from_numpy(records.view(np.uint8).copy()).to(DEVICE)
    out = Guarded(count * getattr(torch, dtype).itemsize)
    _decode[(1,)](there.data_ptr(), out.memory.data_ptr(), count, **constants(dtype, tile, out.memory))
    return out.bytes


def reduced(sources: Sequence[np.ndarray], op: str, tile: int) -> np.ndarray:
    there = [
        torch.from_numpy(np.concatenate([np.zeros(1, RECORD), each]).view(np.uint8)).to(DEVICE) for each in sources
    ]
    table = torch.tensor([-1] * 8 + [each.data_ptr() for each in there], device=DEVICE)
    out = Guarded(sources[0].nbytes)
    arguments = table.data_ptr(), len(sources), RECORD.itemsize, out.memory.data_ptr(), len(sources[0])
    _reduce[(1,)](*arguments, OP=OPS.index(op), TILE=tile, num_warps=8, enable_fp_fusion=False)
    return out.bytes.view(RECORD)


def by_host(records: np.ndarray, dtype: str, count: int) -> np.ndarray:
    out = torch.empty(count, dtype=getattr(torch, dtype))
    PACKER.decode(Packed(records), dtype, carrier(out, dtype))
    return carrier(out, dtype).view(np.uint8)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    """A dtype, and bits of float32, with a block of zeros among them."""
    bits = drawn_bits(draw, [0, 1, 255, 256, 257, 1300, 4096, 9000])
    if draw(st.booleans()):
        bits[256:512] &= 1 << 31
    return draw(st.sampled_from(DTYPES)), bits


@drawn(15, 40, arrays(), st.sampled_from(TILES), st.sampled_from([0, 0, 1, 3]))
def test_codes_scales_and_values_are_those_of_the_host(drawn: tuple[str, np.ndarray], tile: int, shift: int) -> None:
    dtype, bits = drawn
    x = tensor(bits, dtype)
    records = packed(x, dtype)
    assert encoded(x, tile, shift).tobytes() == records.tobytes()
    assert decoded(records, dtype, len(x), tile).tobytes() == by_host(records, dtype, len(x)).tobytes()


@drawn(
    15, 40, arrays(), st.integers(1, 16), st.sampled_from(["sum", "avg"]), st.integers(-3, 3), st.sampled_from(TILES)
)
def test_reductions_are_those_of_the_host(
    drawn: tuple[str, np.ndarray], members: int, op: str, far: int, tile: int
) -> None:
    dtype, bits = drawn
    inputs = [tensor(np.roll(bits, 7 * i), dtype) * 2.0 ** (far * (i % 3)) for i in range(members)]
    sources = [packed(x, dtype) for x in inputs]
    want = np.zeros(len(sources[0]), RECORD)
    PACKER.reduce([Packed(source) for source in sources], op, Packed(want))
    assert reduced(sources, op, tile).tobytes() == want.tobytes()


@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_every_rounding_is_that_of_the_host(sign: int) -> None:
    """All float32 up to the largest code by their upper 18 bits, with all kinds of lower ones, at a scale of 1."""
    upper = np.arange(0x3A000000 >> 14, (0x43E00000 >> 14) + 1, dtype=np.uint32) << 14
    kinds = [upper | lower for lower in (0, 1, 0x1FFF, 0x2000, 0x3FFF)]
    bits = np.minimum(np.concatenate(kinds), np.uint32(0x43E00000)) | np.uint32(sign)
    bits = np.resize(bits, blocks(len(bits)) * (BLOCK - 1)).reshape(-1, BLOCK - 1)
    x = tensor(np.hstack([bits, np.full((len(bits), 1), 0x43E00000)]).reshape(-1), "float32")  # 448: scale 1
    records = encoded(x, 4096)
    assert set(records["scale"].tolist()) == {1.0}
    assert records.tobytes() == packed(x, "float32").tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_halves_are_coded_as_by_the_host(dtype: str) -> None:
    """Each with a scale of its own, and beside one that is larger."""
    x = torch.arange(1 << 16).to(torch.uint16).view(getattr(torch, dtype))
    x = x[x.isfinite()]
    assert encoded(x, 4096).tobytes() == packed(x, dtype).tobytes()
    x = torch.stack([torch.full_like(x, LARGEST), x], dim=1).reshape(-1)
    assert encoded(x, 4096).tobytes() == packed(x, dtype).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_codes_at_all_scales_are_decoded_as_by_the_host(dtype: str) -> None:
    records = np.zeros(119 + 126 + 1, RECORD)
    records["codes"] = np.arange(256)
    records["scale"][:-1] = np.ldexp(np.float32(1), np.arange(-126, 119))
    records["scale"][-1] = np.nan
    count = len(records) * BLOCK - 3
    assert decoded(records, dtype, count, 4096).tobytes() == by_host(records, dtype, count).tobytes()


def test_every_scale_is_that_of_the_host() -> None:
    """Every exponent, at the mantissas about which the scale changes."""
    turn = int(np.float32(LARGEST).view(np.int32)) & 0x7FFFFF
    mantissas = np.array([0, 1, turn - 1, turn, turn + 1, 0x7FFFFF], np.int32)
    amax = ((np.arange(256, dtype=np.int32) << 23)[:, None] + mantissas).reshape(-1).view(np.float32)
    x = np.zeros((len(amax), BLOCK), np.float32)
    x[:, 17], x[:, 200] = -amax, amax / 2
    assert (
        encoded(torch.from_numpy(x.reshape(-1)), 4096).tobytes()
        == packed(torch.from_numpy(x.reshape(-1)), "float32").tobytes()
    )
