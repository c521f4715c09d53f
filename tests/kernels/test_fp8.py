"""Coded blocks against their definition, byte for byte, and that against E4M3, as PyTorch has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from ftcomm.kernels.host.fp8 import BLOCK, DTYPES, LARGEST, NAN, RECORD, TOP, Packed, Packer, blocks
from tests.rigs import fp8_definition as definition
from tests.rigs.examples import drawn

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


def same(records: np.ndarray, wanted: np.ndarray) -> bool:
    return records.tobytes() == wanted.tobytes()


def drawn_bits(draw: st.DrawFn, counts: Sequence[int]) -> np.ndarray:
    """Bits of float32: around some magnitude, with odd ones among them."""
    seed, count = draw(st.integers(0, 1 << 30)), draw(st.sampled_from(counts))
    chance = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        bits = (chance.standard_normal(count) * 2.0 ** draw(st.integers(-149, 127))).astype("f4").view(np.uint32)
    for odd in draw(st.lists(st.sampled_from(ODD), max_size=3)):
        if count:
            bits[chance.integers(0, count)] = odd
    return bits


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    """A dtype, and bits of float32."""
    return draw(st.sampled_from(DTYPES)), drawn_bits(draw, [0, 1, 255, 256, 257, 3000, 127 * 256 + 5])


@drawn(100, 300, arrays())
def test_codes_scales_and_values_are_those_of_the_definition(drawn: tuple[str, np.ndarray]) -> None:
    dtype, bits = drawn
    x = tensor(bits, dtype)
    records = packed(x, dtype)
    assert same(records, definition.encode(x))
    want = definition.decode(records, len(x), dtype)
    got = torch.empty_like(x)
    PACKER.decode(Packed(records), dtype, carrier(got, dtype))
    assert carrier(got, dtype).tobytes() == carrier(want, dtype).tobytes()


@drawn(60, 200, arrays(), st.integers(1, 16), st.sampled_from(["sum", "avg"]), st.integers(-3, 3))
def test_reductions_are_those_of_the_definition(drawn: tuple[str, np.ndarray], members: int, op: str, far: int) -> None:
    dtype, bits = drawn
    inputs = [tensor(np.roll(bits, 7 * i), dtype) * 2.0 ** (far * (i % 3)) for i in range(members)]
    sources = [packed(x, dtype) for x in inputs]
    count = len(inputs[0])
    want = definition.reduce(sources, op)
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
        assert same(records, definition.encode(x))


def test_all_codes_are_decoded() -> None:
    records = np.zeros(119 + 126, RECORD)
    records["codes"] = np.where(np.arange(256) & 0x7F == 0x7F, 0, np.arange(256))
    records["scale"] = np.ldexp(np.float32(1), np.arange(-126, 119))
    out = np.empty(len(records) * BLOCK, np.float32)
    PACKER.decode(Packed(records), "float32", out)
    want = definition.E4M3_VALUES[records["codes"]] * records["scale"][:, None]
    assert out.tobytes() == want.tobytes()


# ---- the format ---------------------------------------------------------------------------------------------------

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # what torch takes the codes for


def decoded(records: np.ndarray, count: int, dtype: str = "float32") -> torch.Tensor:
    out = torch.empty(count, dtype=getattr(torch, dtype))
    PACKER.decode(Packed(records), dtype, carrier(out, dtype))
    return out


def codes_of(x: torch.Tensor) -> torch.Tensor:
    """With a scale of 1, that the largest code in every block makes."""
    room = BLOCK - 1
    rows = torch.zeros(-(-len(x) // room), BLOCK)
    rows[:, 0] = LARGEST
    rows[:, 1:] = torch.nn.functional.pad(x, (0, -len(x) % room)).reshape(-1, room)
    records = packed(rows.reshape(-1), "float32")
    assert (records["scale"] == 1).all()
    return torch.from_numpy(records["codes"][:, 1:].reshape(-1)[: len(x)].copy())


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Indices in `grid`, ascending, of what is nearest to `x`; of two that are, the even index. In float64: exact."""
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    down, up = x - grid[above - 1], grid[above] - x
    return np.where((down < up) | ((down == up) & (above % 2 == 1)), above - 1, above)


def test_e4m3_is_rounded_to_nearest_even_in_every_binade() -> None:
    """All its values, the middle of each two neighbours, and the float32 beside each of these; with both signs."""
    grid = E4M3[:0x7F].numpy()  # ascending: 0 to 448
    exact = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(1e9)), np.nextafter(exact, np.float32(-1e9))])
    near = near[(near >= 0) & (near <= LARGEST)]
    x = np.concatenate([near, -near])
    want = nearest(np.abs(x).astype(np.float64), grid.astype(np.float64)) | (np.signbit(x).astype(int) << 7)
    assert codes_of(torch.from_numpy(x)).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_halves_become_what_torch_makes_of_them(dtype: str) -> None:
    x = torch.arange(1 << 16).to(torch.uint16).view(getattr(torch, dtype)).float()
    x = x[x.abs() <= LARGEST]
    assert torch.equal(codes_of(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("exponent", [-126, -100, 0, 119])
def test_every_finite_value_of_e4m3_stays(exponent: int) -> None:
    finite = E4M3.isfinite()
    x = torch.where(finite, E4M3, 0.0) * 2.0**exponent
    records = packed(x, "float32")
    assert records["scale"].tolist() == [2.0**exponent]
    assert torch.equal(torch.from_numpy(records["codes"][0])[finite], torch.arange(256, dtype=torch.uint8)[finite])
    assert carrier(decoded(records, 256), "float32").tobytes() == carrier(x, "float32").tobytes()  # -0, too


def test_scales_are_the_smallest_powers_of_two_that_hold() -> None:
    """Every exponent, at the mantissas about which the scale changes."""
    turn = int(np.float32(LARGEST).view(np.int32)) & 0x7FFFFF
    mantissas = np.array([0, 1, turn - 1, turn, turn + 1, 0x7FFFFF], np.int32)
    amax = ((np.arange(255, dtype=np.int32) << 23)[:, None] + mantissas).reshape(-1).view(np.float32)
    x = np.zeros((len(amax), BLOCK), np.float32)
    x[:, 17], x[:, 200] = -amax, amax / 2
    records = packed(torch.from_numpy(x.reshape(-1)), "float32")
    scales = records["scale"].astype(np.float64)
    assert (np.frexp(scales)[0] == 0.5).all()
    top = scales == 2.0 ** (TOP - 127)
    assert (scales * LARGEST >= amax)[~top].all()
    assert ((scales / 2 * LARGEST < amax) | (scales == 2.0**-126)).all()
    values = decoded(records, x.size).reshape(-1, BLOCK)
    assert values.isfinite().all()
    error = np.abs(values[:, 17].double().numpy() + amax.astype(np.float64))
    assert (error <= np.maximum(amax / 16, 2.0**-126 / 2))[~top].all()
    assert (error <= amax / 8)[top].all()  # 2^128 saturates to 1.75 * 2^127


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_with_a_nan_or_an_infinity_is_nan_and_makes_the_sum_so(dtype: str) -> None:
    x = torch.linspace(-3, 3, 5 * BLOCK + 10).to(getattr(torch, dtype))
    clean = packed(x, dtype)
    x[5], x[BLOCK + 255], x[3 * BLOCK], x[5 * BLOCK + 9] = float("nan"), float("inf"), -float("inf"), -float("nan")
    records = packed(x, dtype)
    poisoned = [0, 1, 3, 5]
    assert np.flatnonzero(np.isnan(records["scale"])).tolist() == poisoned
    assert (records["codes"][poisoned] == NAN).all()
    assert torch.unique(decoded(records, len(x), dtype).isnan().nonzero() // BLOCK).tolist() == poisoned
    total = np.empty(len(records), RECORD)
    PACKER.reduce([Packed(clean), Packed(records)], "sum", Packed(total))
    assert np.flatnonzero(np.isnan(total["scale"])).tolist() == poisoned


def test_a_sum_that_overflows_is_nan() -> None:
    huge, total = packed(torch.full((BLOCK,), 3e38), "float32"), np.empty(1, RECORD)
    PACKER.reduce([Packed(huge), Packed(huge)], "sum", Packed(total))
    assert np.isnan(total["scale"]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_decoded_stays_when_it_is_coded_again(dtype: str) -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(8)).to(getattr(torch, dtype))
    once = decoded(packed(x, dtype), 4000, dtype)
    again = decoded(packed(once, dtype), 4000, dtype)
    assert carrier(again, dtype).tobytes() == carrier(once, dtype).tobytes()


# ---- memory, and what users are told ------------------------------------------------------------------------------


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


@drawn(
    60,
    200,
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
