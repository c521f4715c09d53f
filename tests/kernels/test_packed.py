"""Packed blocks against the form that says what they are: the same bytes, for every value and every length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.kernels.host import quantise as definition
from ftcomm.kernels.host.packed import RECORD, Packed, Packer, blocks
from ftcomm.kernels.host.quantise import BLOCK, DTYPES, Quantised

CARRIER = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.uint16}
PACKER = Packer()

# Bits of a few float32 whose blocks are no ordinary ones, beside those that are drawn.
ODD = [0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF]


def tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32)).to(getattr(torch, dtype))


def carrier(x: torch.Tensor, dtype: str) -> np.ndarray:
    return x.view(CARRIER[dtype]).numpy()


def packed(x: torch.Tensor, dtype: str) -> np.ndarray:
    records = np.full(blocks(len(x)), 0xAA, np.uint8).repeat(RECORD.itemsize).view(RECORD)
    PACKER.encode(dtype, carrier(x, dtype), Packed(records))
    return records


def as_defined(records: np.ndarray, count: int, dtype: str) -> Quantised:
    codes, scales = (np.ascontiguousarray(records[name]).reshape(-1) for name in ("codes", "scale"))
    room = np.empty(len(codes) + 16, np.uint8)
    begin = -room.ctypes.data % 16
    room[begin : begin + len(codes)] = codes
    return Quantised("fp8", room[begin : begin + len(codes)], scales, count, dtype)


def same(records: np.ndarray, quantised: Quantised) -> bool:
    codes, scales = np.asarray(quantised.payload), np.asarray(quantised.scales)
    return records["codes"].tobytes() == codes.tobytes() and records["scale"].tobytes() == scales.tobytes()


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    """A dtype, and bits of float32: around some magnitude, with odd ones among them."""
    seed, count = draw(st.integers(0, 1 << 30)), draw(st.sampled_from([0, 1, 255, 256, 257, 3000, 127 * 256 + 5]))
    chance = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        bits = (chance.standard_normal(count) * 2.0 ** draw(st.integers(-149, 127))).astype("f4").view(np.uint32)
    for odd in draw(st.lists(st.sampled_from(ODD), max_size=3)):
        if count:
            bits[chance.integers(0, count)] = odd
    return draw(st.sampled_from(DTYPES)), bits


@settings(max_examples=300, deadline=None)
@given(arrays())
def test_codes_scales_and_values_are_those_of_the_definition(drawn: tuple[str, np.ndarray]) -> None:
    dtype, bits = drawn
    x = tensor(bits, dtype)
    records = packed(x, dtype)
    assert same(records, definition.quantise(x, "fp8"))
    want = definition.dequantise(as_defined(records, len(x), dtype), out=torch.empty_like(x))
    got = torch.empty_like(x)
    PACKER.decode(Packed(records), dtype, carrier(got, dtype))
    assert carrier(got, dtype).tobytes() == carrier(want, dtype).tobytes()


@settings(max_examples=200, deadline=None)
@given(arrays(), st.integers(1, 16), st.sampled_from(["sum", "avg"]), st.integers(-3, 3))
def test_reductions_are_those_of_the_definition(drawn: tuple[str, np.ndarray], members: int, op: str, far: int) -> None:
    dtype, bits = drawn
    inputs = [tensor(np.roll(bits, 7 * i), dtype) * 2.0 ** (far * (i % 3)) for i in range(members)]
    sources = [packed(x, dtype) for x in inputs]
    count = len(inputs[0])
    want = definition.dequantise_reduce_requantise([as_defined(s, count, dtype) for s in sources], op)
    out = np.zeros(blocks(count), RECORD)
    PACKER.reduce([Packed(source) for source in sources], op, Packed(out))
    assert same(out, want)
    decoded, at_once = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    PACKER.decode(Packed(out), dtype, carrier(decoded, dtype))
    PACKER.reduce_decoded([Packed(source) for source in sources], op, dtype, carrier(at_once, dtype))
    assert carrier(at_once, dtype).tobytes() == carrier(decoded, dtype).tobytes()


@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_every_rounding_of_a_code_is_to_nearest_even(sign: int) -> None:
    """All float32 up to the largest code by their upper 22 bits, with all kinds of lower ones, at a scale of 1."""
    upper = np.arange(0x3A000000 >> 10, (0x43E00000 >> 10) + 1, dtype=np.uint32) << 10
    for lower in (0, 1, 0x1FF, 0x200, 0x3FF):
        bits = np.minimum(upper | lower, np.uint32(0x43E00000)) | np.uint32(sign)
        bits = np.resize(bits, blocks(len(bits)) * (BLOCK - 1)).reshape(-1, BLOCK - 1)
        x = tensor(np.hstack([bits, np.full((len(bits), 1), 0x43E00000)]).reshape(-1), "float32")  # 448: scale 1
        records = packed(x, "float32")
        assert set(records["scale"].tolist()) == {1.0}
        assert same(records, definition.quantise(x, "fp8"))


def test_all_codes_are_decoded() -> None:
    records = np.zeros(119 + 126, RECORD)
    records["codes"] = np.where(np.arange(256) & 0x7F == 0x7F, 0, np.arange(256))
    records["scale"] = np.ldexp(np.float32(1), np.arange(-126, 119))
    out = np.empty(len(records) * BLOCK, np.float32)
    PACKER.decode(Packed(records), "float32", out)
    want = definition.E4M3_VALUES[records["codes"]] * records["scale"][:, None]
    assert out.tobytes() == want.tobytes()


def test_memory_that_may_only_be_read_is_decoded_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    records = packed(torch.ones(300), "float32")
    records.flags.writeable = False
    out = np.empty(300, np.float32)
    PACKER.decode(Packed(records), "float32", out)
    assert set(out.tolist()) == {1.0}
    assert not [warning for warning in recwarn if not issubclass(warning.category, ResourceWarning)]  # of other tests


def most(x: np.ndarray) -> np.ndarray:
    """By how much coding changes each of these elements at most, as `ftcomm.Group.allreduce` says it."""
    largest = np.abs(np.resize(np.append(x, np.zeros(-len(x) % BLOCK)), (blocks(len(x)), BLOCK))).max(axis=1)
    return np.maximum(np.abs(x) / 16, largest.repeat(BLOCK)[: len(x)] / 2**17)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 3000),
    st.integers(1, 16),
    st.sampled_from(["sum", "avg"]),
    st.integers(0, 40),
)
def test_a_result_is_as_near_as_users_are_told(seed: int, count: int, members: int, op: str, binades: int) -> None:
    chance = np.random.default_rng(seed)
    scale = np.exp2(chance.integers(-binades, binades + 1, (members, count)))
    inputs = (chance.standard_normal((members, count)) * scale).astype(np.float32)
    sources = [Packed(packed(torch.from_numpy(x), "float32")) for x in inputs]
    decoded = np.empty_like(inputs)
    for source, x, values in zip(sources, inputs, decoded, strict=True):
        PACKER.decode(source, "float32", values)
        assert (np.abs(values.astype(np.float64) - x) <= most(x)).all()
    result = np.empty(count, np.float32)
    PACKER.reduce_decoded(sources, op, "float32", result)
    share = members if op == "avg" else 1
    reduced = decoded.astype(np.float64).sum(axis=0) / share
    rounded = members * 2.0**-23 * np.abs(decoded).astype(np.float64).sum(axis=0)  # by additions in float32
    assert (np.abs(result - reduced) <= most(reduced) + 2 * rounded).all()
    exact = inputs.astype(np.float64).sum(axis=0) / share
    each = sum(most(x.astype(np.float64)) for x in inputs) / share
    assert (np.abs(result - exact) <= each + most(reduced) + 2 * rounded).all()
