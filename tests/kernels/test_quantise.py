"""Quantisation: the format against the definition of E4M3 and of int8, and the kernels against the host form, by bytes.

On a GPU that converts E4M3 the kernels run both with its instruction and without.
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftcomm import kernels
from ftcomm.kernels.check import KernelArgumentError
from ftcomm.kernels.device import DEVICE, INTERPRETED
from ftcomm.kernels.device import quantise as device
from ftcomm.kernels.host import quantise as host
from ftcomm.kernels.host.quantise import BLOCK, FORMATS, Quantised
from tests.kernels.samples import as_bytes, placed, values

DTYPES = ("float32", "float16", "bfloat16")
KINDS = ("fp8", "int8")
WORST = {"fp8": 1 / 16, "int8": 1 / 127}  # of amax: half of the widest step
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # what torch takes the codes for


# The interpreter multiplies and adds NaN and infinities with NumPy, which remarks on it.
pytestmark = [
    pytest.mark.protocol,
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


@pytest.fixture(params=["integers"] if INTERPRETED else ["integers", "converted"])
def convert(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way in which the kernels can convert E4M3 where they run."""
    processors, converts = device._facts(torch.device(DEVICE))
    wanted = request.param == "converted"
    if wanted and not converts:
        pytest.skip("this device has no instruction that converts E4M3")
    monkeypatch.setattr(device, "_facts", lambda _: (processors, wanted))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and len(a) == len(b) and (len(a) == 0 or torch.equal(as_bytes(a), as_bytes(b)))


def moved(source: Quantised, where: str) -> Quantised:
    return dataclasses.replace(source, payload=source.payload.to(where), scales=source.scales.to(where))


def both_quantise(x: torch.Tensor, kind: str, shift: int = 0, sms: int | None = None) -> Quantised:
    """The host's, which the kernel's equals."""
    want = host.quantise(x, kind)
    got = device.quantise(placed(x, shift), kind, sms=sms)
    assert same(got.payload, want.payload)
    assert same(got.scales, want.scales)
    assert (got.kind, got.count, got.dtype) == (want.kind, want.count, want.dtype)
    return want


def both_dequantise(source: Quantised, shift: int = 0, sms: int | None = None) -> torch.Tensor:
    want = host.dequantise(source)
    room = placed(torch.full((source.count + 32,), 7.0, dtype=want.dtype), shift)
    out = room[16 : 16 + source.count]
    assert device.dequantise(moved(source, DEVICE), out=out, sms=sms) is out
    assert same(out, want)
    assert room[:16].eq(7).all()
    assert room[16 + source.count :].eq(7).all()
    return want


def both_reduce(sources: Sequence[Quantised], op: str, sms: int | None = None) -> Quantised:
    want = host.dequantise_reduce_requantise(sources, op)
    got = device.dequantise_reduce_requantise([moved(source, DEVICE) for source in sources], op, sms=sms)
    assert same(got.payload, want.payload)
    assert same(got.scales, want.scales)
    return want


def normal(count: int, dtype: str, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Finite values, the blocks of quite different magnitudes."""
    chance = torch.Generator().manual_seed(seed)
    blocks = -(-count // BLOCK)
    scale = torch.exp(spread * torch.randn(blocks, 1, generator=chance))
    return (torch.randn(blocks, BLOCK, generator=chance) * scale).reshape(-1)[:count].to(getattr(torch, dtype))


def with_scale_one(magnitudes: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values, preceded in every block by the largest code's, so that the scale is 1: [blocks * 256]."""
    largest = float(FORMATS[kind].largest)
    room = BLOCK - 1
    padded = torch.zeros(-(-len(magnitudes) // room) * room)
    padded[: len(magnitudes)] = magnitudes
    rows = padded.reshape(-1, room)
    return torch.cat([torch.full((len(rows), 1), largest), rows], 1).reshape(-1)


def codes_of(magnitudes: torch.Tensor, kind: str) -> torch.Tensor:
    """Codes that host form and kernel give values, with a scale of 1."""
    source = both_quantise(with_scale_one(magnitudes, kind), kind)
    assert source.scales.eq(1).all()
    return source.payload.reshape(-1, BLOCK)[:, 1:].reshape(-1)[: len(magnitudes)]


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Indices in `grid`, ascending, of what is nearest to `x`; of two that are, the even index. In float64: exact."""
    grid = grid.astype(np.float64)
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    down, up = x - grid[above - 1], grid[above] - x
    return np.where((down < up) | ((down == up) & (above % 2 == 1)), above - 1, above)


def edges(grid: np.ndarray) -> torch.Tensor:
    """All of `grid`, the middle of each two neighbours, and the float32 beside each of these; with both signs."""
    exact = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(1e9)), np.nextafter(exact, np.float32(-1e9))])
    near = near[(near >= 0) & (near <= grid[-1])]
    return torch.from_numpy(np.concatenate([near, -near]))


# ---- the format -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("convert")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_decoded(dtype: str) -> None:
    scales = torch.tensor([1.0, 2.0**-20, float("nan")])
    payload = torch.arange(256, dtype=torch.uint8).repeat(3)
    decoded = both_dequantise(Quantised("fp8", placed(payload).cpu(), scales, 768, dtype))
    want = (E4M3 * scales[:, None]).reshape(-1).to(decoded.dtype)
    assert torch.equal(decoded.isnan(), want.isnan())
    assert same(decoded[~want.isnan()], want[~want.isnan()])
    assert decoded[:256].isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    integers = torch.arange(-128, 128).to(torch.int8).repeat(3)
    decoded = both_dequantise(Quantised("int8", integers, scales, 768, dtype))
    want = (integers.reshape(3, 256).float() * scales[:, None]).reshape(-1).to(decoded.dtype)
    assert same(decoded[:512], want[:512])
    assert decoded[512:].isnan().all()


@pytest.mark.usefixtures("convert")
@pytest.mark.parametrize("exponent", [-126, -100, 0, 119])
def test_every_finite_value_of_e4m3_stays(exponent: int) -> None:
    finite = E4M3.isfinite()
    x = torch.zeros(256)
    x[finite] = E4M3[finite] * 2.0**exponent
    source = both_quantise(x, "fp8")
    assert source.scales.tolist() == [2.0**exponent]
    assert torch.equal(source.payload[finite], torch.arange(256, dtype=torch.uint8)[finite])  # -0 is 0x80
    assert same(both_dequantise(source), x)


@pytest.mark.usefixtures("convert")
def test_e4m3_is_rounded_to_nearest_even_in_every_binade() -> None:
    grid = E4M3[:0x7F].numpy()  # ascending: 0 to 448
    x = edges(grid)
    codes = codes_of(x, "fp8")
    want = nearest(x.abs().double().numpy(), grid) | (torch.signbit(x).numpy() << 7)
    assert codes.tolist() == want.tolist()
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.usefixtures("convert")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_halves_become_what_torch_makes_of_them(dtype: str) -> None:
    x = torch.arange(1 << 16).to(torch.uint16).view(getattr(torch, dtype)).float()
    x = x[x.abs() <= 448]
    assert torch.equal(codes_of(x, "fp8"), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.usefixtures("convert")
def test_bits_behind_a_tie_decide_it() -> None:
    """Single bits, far from the ones that are kept, in every binade of codes, subnormal ones included."""
    tops = torch.arange((127 - 11) << 4, ((127 + 8) << 4) + 12).to(torch.int32) << 19  # four bits of mantissa
    low = torch.tensor([0, 1, 1 << 9, 1 << 18, (1 << 19) - 1], dtype=torch.int32)
    x = (tops[:, None] + low).reshape(-1).view(torch.float32)
    x = x[x <= 448]
    want = nearest(x.double().numpy(), E4M3[:0x7F].numpy())
    assert codes_of(x, "fp8").tolist() == want.tolist()


def test_int8_is_rounded_to_nearest_even() -> None:
    x = edges(np.arange(128, dtype=np.float32))
    assert codes_of(x, "int8").tolist() == np.rint(x.double().numpy()).tolist()


@pytest.mark.usefixtures("convert")
@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_the_smallest_powers_of_two_that_hold(kind: str) -> None:
    """Every exponent, at the mantissas about which the scale changes."""
    largest = FORMATS[kind].largest
    turn = int(np.float32(largest).view(np.int32)) & 0x7FFFFF
    mantissas = np.array([0, 1, turn - 1, turn, turn + 1, 0x7FFFFF], np.int32)
    amax = ((np.arange(255, dtype=np.int32) << 23)[:, None] + mantissas).reshape(-1).view(np.float32)
    x = np.zeros((len(amax), BLOCK), np.float32)
    x[:, 17] = -amax
    x[:, 200] = amax / 2
    source = both_quantise(torch.from_numpy(x.reshape(-1)), kind)
    scales = source.scales.double().numpy()
    assert (np.frexp(scales)[0] == 0.5).all()
    top = scales == 2.0 ** (FORMATS[kind].top - 127)
    assert (scales * largest >= amax)[~top].all()
    assert ((scales / 2 * largest < amax) | (scales == 2.0**-126)).all()
    decoded = both_dequantise(source).reshape(-1, BLOCK)
    assert decoded.isfinite().all()
    error = np.abs(decoded[:, 17].double().numpy() + amax.astype(np.float64))
    assert (error <= np.maximum(WORST[kind] * amax, 2.0**-126 / 2))[~top].all()
    assert (error <= amax / 8)[top].all()  # 2^128 saturates to 1.75 * 2^127


@pytest.mark.usefixtures("convert")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_a_nan_or_an_infinity_is_nan(kind: str, dtype: str) -> None:
    clean = normal(5 * BLOCK + 10, dtype, 3)
    x = clean.clone()
    x[5], x[BLOCK + 255], x[3 * BLOCK], x[5 * BLOCK + 9] = float("nan"), float("inf"), -float("inf"), -float("nan")
    source = both_quantise(x, kind)
    poisoned = [0, 1, 3, 5]
    assert source.scales.isnan().nonzero().flatten().tolist() == poisoned
    assert source.scales.view(torch.int32)[poisoned].eq(0x7FC00000).all()
    assert source.payload.reshape(-1, BLOCK)[poisoned].eq(FORMATS[kind].nan).all()
    decoded = both_dequantise(source)
    kept = host.dequantise(host.quantise(clean, kind))
    for block in range(6):
        there = slice(block * BLOCK, (block + 1) * BLOCK)
        assert decoded[there].isnan().all() if block in poisoned else same(decoded[there], kept[there])
    total = both_reduce([host.quantise(clean, kind), source], "sum")
    assert total.scales.isnan().nonzero().flatten().tolist() == poisoned


@pytest.mark.usefixtures("convert")
def test_a_lone_nan_code_makes_the_block_of_the_sum_nan() -> None:
    source = host.quantise(normal(2 * BLOCK, "float32", 4), "fp8")
    source.payload[300] = 0xFF
    assert both_reduce([source, source], "sum").scales.isnan().tolist() == [False, True]


def test_a_sum_that_overflows_is_nan() -> None:
    huge = host.quantise(torch.full((BLOCK,), 3e38), "fp8")
    assert both_reduce([huge, huge], "sum").scales.isnan().all()


@pytest.mark.usefixtures("convert")
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_subnormals(kind: str) -> None:
    source = both_quantise(torch.cat([torch.zeros(BLOCK), -torch.zeros(3)]), kind)
    assert source.scales.tolist() == [2.0**-126] * 2
    assert source.payload[:BLOCK].eq(0).all()
    negative = 0x80 if kind == "fp8" else 0
    assert source.payload[BLOCK:].tolist() == [negative] * 3 + [0] * (BLOCK - 3)
    assert torch.signbit(both_dequantise(source)[BLOCK:]).tolist() == [kind == "fp8"] * 3
    both_reduce([source, source, source], "sum")

    x = torch.arange(-128, 128).to(torch.int32).mul(40_000)
    x = torch.where(x < 0, x.neg() | -(1 << 31), x).view(torch.float32)  # subnormal, both signs
    decoded = both_dequantise(both_quantise(x, kind))
    assert (decoded - x).abs().max() <= (2.0**-126 / 2 if kind == "int8" else x.abs().max() / 16)
    assert decoded.count_nonzero() > 100 if kind == "fp8" else True


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_decoded_stays_when_it_is_quantised_again(kind: str) -> None:
    once = both_dequantise(both_quantise(normal(4000, "float32", 8), kind))
    for dtype in (torch.float32, torch.bfloat16):
        assert same(once.to(dtype).float(), once)
        assert same(both_dequantise(both_quantise(once.to(dtype), kind)), once.to(dtype))


# ---- kernels against the host form ----------------------------------------------------------------------------------

COUNTS = st.one_of(st.integers(0, 3 * BLOCK), st.integers(0, 3 * device.ROWS * BLOCK))
UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
SHAPES = settings(max_examples=40, deadline=None, suppress_health_check=UNHURRIED)


@pytest.mark.usefixtures("convert")
@SHAPES
@given(COUNTS, st.sampled_from(DTYPES), st.sampled_from(KINDS), st.integers(0, 9), st.integers(1, 3), st.integers(0))
def test_any_bits_of_any_length(count: int, dtype: str, kind: str, shift: int, sms: int, seed: int) -> None:
    both_dequantise(both_quantise(values(dtype, count, seed), kind, shift, sms), shift, sms)
    both_dequantise(both_quantise(normal(count, dtype, seed % 1000, 9.0), kind, shift, sms), shift, sms)


@pytest.mark.usefixtures("convert")
@SHAPES
@given(
    COUNTS, st.integers(1, 16), st.sampled_from(DTYPES), st.sampled_from(KINDS), st.sampled_from(("sum", "avg")),
    st.integers(1, 3), st.integers(0, 1000),
)  # fmt: skip
def test_sums_of_any_number_of_any_length(
    count: int, w: int, dtype: str, kind: str, op: str, sms: int, seed: int
) -> None:
    make = (lambda i: normal(count, dtype, seed * 16 + i)) if seed % 4 else (lambda i: values(dtype, count, seed + i))
    both_reduce([host.quantise(make(i), kind) for i in range(w)], op, sms)


@pytest.mark.usefixtures("convert")
@settings(max_examples=30, deadline=None, suppress_health_check=UNHURRIED)
@given(st.integers(1, 16), st.sampled_from(KINDS), st.sampled_from(("sum", "avg")), st.integers(0, 1 << 32))
def test_any_codes_with_any_scales(w: int, kind: str, op: str, seed: int) -> None:
    """As they never come from us: all 256 codes in all blocks, and scales of any bits."""
    chance = np.random.default_rng(seed)
    blocks = int(chance.integers(1, 20))
    sources = []
    for _ in range(w):
        codes = torch.from_numpy(chance.integers(0, 256, blocks * BLOCK, np.uint8)).view(
            getattr(torch, FORMATS[kind].dtype)
        )
        scales = values("float32", blocks, int(chance.integers(1 << 30)))
        sources.append(Quantised(kind, placed(codes).cpu(), scales, blocks * BLOCK, "float32"))
    both_dequantise(sources[0])
    both_reduce([dataclasses.replace(source, scales=_powers(source.scales)) for source in sources], op)


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """Scales as the format has them: powers of two from 2^-126 to 2^119, and NaN."""
    exponents = (scales.view(torch.int32) >> 23 & 0xFF).clamp(1, 127 + 119)
    return torch.where(scales.isnan(), torch.nan, (exponents << 23).view(torch.float32))


def test_the_order_of_the_sources_is_the_order_of_the_sum() -> None:
    parts = [torch.full((BLOCK,), value) for value in (2.0**25, 1.0, 1.0, -(2.0**25))]
    sources = [host.quantise(part, "fp8") for part in parts]
    assert host.dequantise(both_reduce(sources, "sum")).eq(0).all()
    assert host.dequantise(both_reduce([sources[i] for i in (1, 2, 0, 3)], "sum")).eq(0).all()  # 2 + 2^25 is a tie
    assert host.dequantise(both_reduce([sources[i] for i in (0, 3, 1, 2)], "sum")).eq(2).all()


# ---- an all-reduce --------------------------------------------------------------------------------------------------


def _allreduce(inputs: Sequence[torch.Tensor], kind: str, op: str) -> list[torch.Tensor]:
    """What every rank ends with: each quantises its input, reduces its stripe of all, and decodes all stripes."""
    world = len(inputs)
    sent = [device.quantise(placed(x), kind) for x in inputs]
    blocks = len(sent[0].scales)
    bounds = [rank * blocks // world for rank in range(world + 1)]
    stripes = [
        device.dequantise_reduce_requantise([source.blocks(start, stop) for source in sent], op)
        for start, stop in itertools.pairwise(bounds)
    ]
    results = []
    for _ in range(world):
        out = torch.empty_like(sent[0].payload, dtype=inputs[0].dtype)[: len(inputs[0])]
        for stripe, start in zip(stripes, bounds, strict=False):
            device.dequantise(stripe, out=out[start * BLOCK : start * BLOCK + stripe.count])
        results.append(out.cpu())
    return results


@pytest.mark.usefixtures("convert")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world", "op", "dtype"),
    [(2, "sum", "float32"), (3, "avg", "float16"), (4, "sum", "bfloat16"), (8, "avg", "float32")],
)
def test_replicas_stay_equal_and_near_the_exact_sum(kind: str, world: int, op: str, dtype: str) -> None:
    inputs = [normal(7 * BLOCK + 100, dtype, 100 * world + rank) for rank in range(world)]
    results = _allreduce(inputs, kind, op)
    assert all(same(result, results[0]) for result in results)

    divisor = world if op == "avg" else 1
    exact = torch.stack([x.double() for x in inputs]).sum(0) / divisor
    amax = _block_amax(torch.stack([x.double() for x in inputs]))  # [world, blocks]
    sent = WORST[kind] * amax.sum(0) / divisor
    bound = sent + WORST[kind] * (_block_amax(exact[None])[0] + sent)
    bound = bound.repeat_interleave(BLOCK)[: len(exact)] * (1 + 2.0**-20) + 1e-30
    error = (results[0].double() - exact).abs()
    assert (error <= bound + exact.abs() * 2.0**-20).all(), (error / bound).max()


def _block_amax(x: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % BLOCK))
    return padded.reshape(len(x), -1, BLOCK).amax(2)


@pytest.mark.parametrize("w", [1, 3, 8])
def test_stretches_of_blocks_give_the_bytes_of_the_whole(w: int) -> None:
    sources = [host.quantise(normal(20 * BLOCK + 1, "bfloat16", i), "int8") for i in range(w)]
    whole = both_reduce(sources, "sum")
    parts = [both_reduce([s.blocks(a, b) for s in sources], "sum") for a, b in ((0, 3), (3, 3), (3, 20), (20, 21))]
    assert [part.count for part in parts] == [3 * BLOCK, 0, 17 * BLOCK, 1]
    assert same(torch.cat([part.payload for part in parts]), whole.payload)
    assert same(torch.cat([part.scales for part in parts]), whole.scales)


# ---- the public calls -----------------------------------------------------------------------------------------------


def _good() -> Quantised:
    return host.quantise(torch.ones(300), "fp8")


def _mistakes() -> Iterator[tuple[str, object]]:
    good, one = _good(), torch.ones(300)
    bad = dataclasses.replace
    yield "kind='fp4'", lambda form: form.quantise(one, "fp4")
    yield "dtype float64", lambda form: form.quantise(one.double(), "fp8")
    yield "not contiguous", lambda form: form.quantise(torch.ones(10, 10).T, "fp8")
    yield "sms=0", lambda form: form.quantise(one, "fp8", sms=0)
    yield "299 elements", lambda form: form.dequantise(good, out=torch.empty(299))
    yield "dtype float16", lambda form: form.dequantise(good, out=torch.empty(300).half())
    yield (
        "overlaps",
        lambda form: form.dequantise(
            bad(good, count=100, payload=good.payload[:256], scales=good.scales[:1]),
            out=good.payload[:400].view(torch.float32),
        ),
    )
    yield "512 are expected", lambda form: form.dequantise(bad(good, payload=good.payload[:511]))
    yield "1 are expected", lambda form: form.dequantise(bad(good, count=256, payload=good.payload[:256]))
    yield "dtype int8", lambda form: form.dequantise(bad(good, payload=good.payload.view(torch.int8)))
    yield "multiple of 16", lambda form: form.dequantise(bad(good, payload=torch.zeros(600, dtype=torch.uint8)[1:513]))
    yield "'float64'", lambda form: form.dequantise(bad(good, dtype="float64"))
    yield "device meta", lambda form: form.dequantise(good, out=torch.empty(300, device="meta"))
    yield "there are 17", lambda form: form.dequantise_reduce_requantise([good] * 17)
    yield "there are 0", lambda form: form.dequantise_reduce_requantise([])
    yield "op='max'", lambda form: form.dequantise_reduce_requantise([good], "max")
    yield "kind int8", lambda form: form.dequantise_reduce_requantise([good, host.quantise(one, "int8")])
    yield "count 299", lambda form: form.dequantise_reduce_requantise([good, bad(good, count=299)])
    yield "dtype float16", lambda form: form.dequantise_reduce_requantise([good, bad(good, dtype="float16")])
    yield "blocks 1 to 3", lambda form: good.blocks(1, 3)


@pytest.mark.parametrize("form", [kernels, host, device], ids=["public", "host", "device"])
@pytest.mark.parametrize(("message", "call"), list(_mistakes()), ids=[message for message, _ in _mistakes()])
def test_mistakes_are_named(form: object, message: str, call: object) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        call(form)  # type: ignore[operator]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_arrays_of_two_devices_are_refused() -> None:
    good = _good()
    there = moved(good, DEVICE)
    for call in (
        lambda: kernels.dequantise(there, out=torch.empty(300)),
        lambda: kernels.dequantise(dataclasses.replace(there, scales=good.scales)),
        lambda: kernels.dequantise_reduce_requantise([good, there]),
    ):
        with pytest.raises(KernelArgumentError, match=r"is on|has the device"):
            call()


def test_numpy_arrays_give_the_bytes_of_tensors() -> None:
    x = normal(1000, "float16", 1)
    for kind in KINDS:
        got, want = kernels.quantise(x.reshape(20, 50).numpy(), kind), kernels.quantise(x, kind)
        assert isinstance(got.payload, np.ndarray)
        assert got.payload.tobytes() == want.payload.numpy().tobytes()
        assert got.scales.tobytes() == want.scales.numpy().tobytes()
        total = kernels.dequantise_reduce_requantise([got, got], "avg")
        out = np.empty((20, 50), np.float16)
        assert kernels.dequantise(total, out=out) is out
        assert out.tobytes() == kernels.dequantise(want).numpy().tobytes()
    x = np.ones(4, np.float32)
    x.flags.writeable = False
    with pytest.raises(KernelArgumentError, match="read-only"):
        kernels.dequantise(kernels.quantise(x, "fp8"), out=x)


def test_numpy_arrays_need_neither_torch_nor_triton() -> None:
    script = """
import sys, numpy
from ftcomm import kernels
kernels.dequantise(kernels.quantise(numpy.ones(3, "float32"), "fp8"))
sys.exit(bool({"torch", "triton"} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=110)
