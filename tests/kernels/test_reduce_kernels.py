"""Reductions in Triton against the host's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.kernels.device import reduce as kernels
from ftcomm.kernels.device.launch import element, operator
from ftcomm.kernels.device.reduce import reduce
from ftcomm.kernels.device.tile import narrow, reduce_span
from ftcomm.kernels.host.reduce import reduce as host_reduce
from tests.kernels.samples import PAIRS, assert_equal, placed, values
from tests.rigs.examples import drawn

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # the interpreter's, of overflow
]

SMALL = 64  # elements to a tile, so that a few hundred are many tiles


def expected(sources: list[torch.Tensor], op: str, divisor: int | None = None) -> torch.Tensor:
    hosts = [source.cpu() for source in sources]
    out = torch.empty_like(hosts[0])
    host_reduce(hosts, out, op, divisor=divisor)
    return out


@triton.jit
def span_kernel(
    table, first, w, offset, dst, n, divisor,
    W: tl.constexpr, T: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    reduce_span(table, first, w, W, offset, dst, n, divisor, T, OP, BLOCK, ALIGNED)


def reduce_by_span(sources: list[torch.Tensor], offset: int, out: torch.Tensor, op: str, w: int, aligned: bool) -> None:
    """As the all-reduce reduces: the addresses stand in a table, and the span begins `offset` elements behind them."""
    dtype = str(out.dtype).removeprefix("torch.")
    first = 5
    table = torch.tensor([0] * first + [source.data_ptr() for source in sources], dtype=torch.int64, device=out.device)
    span_kernel[(1,)](
        table, first, len(sources), offset, out.data_ptr(), out.numel(), len(sources),
        W=w, T=element(dtype), OP=operator(dtype, op), BLOCK=SMALL, ALIGNED=aligned,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


@pytest.mark.parametrize("widths", [(1, 3, 8), pytest.param((2, 4), marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_every_dtype_and_op(dtype: str, op: str, widths: tuple[int, ...]) -> None:
    for w in widths:
        sources = [placed(values(dtype, 1000 + w, seed)) for seed in range(w)]
        out = torch.empty_like(sources[0])
        reduce(sources, out, op)
        assert_equal(out, expected(sources, op))


@drawn(
    40, 120, st.sampled_from(PAIRS), st.integers(1, 16), st.integers(0, 5 * SMALL), st.integers(0, 40), st.booleans(),
    st.integers(0, 1 << 20),
)  # fmt: skip
def test_spans_of_any_shape(pair: tuple[str, str], w: int, n: int, offset: int, aligned: bool, seed: int) -> None:
    dtype, op = pair
    line = 16 // getattr(torch, dtype).itemsize
    if aligned:
        offset = offset // line * line
    shifts = [0] * (w + 1) if aligned else [(seed >> i) % line for i in range(w + 1)]
    arrays = [placed(values(dtype, offset + n, seed + i), shifts[i]) for i in range(w)]
    inputs = [array.clone() for array in arrays]
    wanted = expected([array[offset:] for array in arrays], op)
    fence = values(dtype, n + 2 * line, seed)
    room = placed(fence, shifts[w])
    out = room[line : line + n]
    for specialised in {w if w in (2, 4, 8) else 0, 0}:
        reduce_by_span(arrays, offset, out, op, specialised, aligned)
        assert_equal(out, wanted)
        assert_equal(room[:line], fence[:line])  # nothing else is written
        assert_equal(room[line + n :], fence[line + n :])
    for array, before in zip(arrays, inputs, strict=True):
        assert_equal(array, before)


@pytest.mark.parametrize("sms", [1, 2, None])
@pytest.mark.parametrize("w", [1, 3, 8, *(pytest.param(each, marks=pytest.mark.sweep) for each in (2, 4))])
def test_several_tiles_a_program(w: int, sms: int | None) -> None:
    sources = [placed(values("float32", 40_011, seed)) for seed in range(w)]
    out = torch.empty_like(sources[0])
    reduce(sources, out, sms=sms)
    assert_equal(out, expected(sources, "sum"))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(PAIRS), st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(0, 20_000), st.integers(0, 3),
    st.sampled_from([None, 1, 2, 5]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_arrays_of_any_length(pair: tuple[str, str], w: int, n: int, shift: int, sms: int | None, seed: int) -> None:
    dtype, op = pair
    sources = [placed(values(dtype, n, seed + i), shift) for i in range(w)]
    out = placed(sources[0].cpu(), seed % 2 * shift)
    reduce(sources, out, op, sms=sms)
    assert_equal(out, expected(sources, op))


@pytest.mark.parametrize(("w", "count"), [(1, 100), (2, 20_000), (3, 5_000), (4, 1), (5, 300)])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_in_place_of_any_source(op: str, w: int, count: int) -> None:
    for which in range(w):
        sources = [placed(values("float16", count, i)) for i in range(w)]
        wanted = expected(sources, op)
        reduce(sources, sources[which], op)
        assert_equal(sources[which], wanted)
        hosts = [values("float16", count, i) for i in range(w)]
        host_reduce(hosts, hosts[which], op)
        assert_equal(hosts[which], wanted)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int8", "int64", "uint8", "uint64"])
@pytest.mark.parametrize("w", [1, 2, 3])
def test_an_average_divides_by_the_divisor_given(dtype: str, w: int) -> None:
    for divisor in (1, 3, 7, 1_000_003):
        sources = [placed(values(dtype, 300, 7 * i)) for i in range(w)]
        out = torch.empty_like(sources[0])
        reduce(sources, out, "avg", divisor=divisor)
        assert_equal(out, expected(sources, "avg", divisor))


def test_of_no_elements_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of no programs is an error of CUDA."""
    launched = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **constants: launched.append(grid)

    monkeypatch.setattr(kernels, "reduce_kernel", Kernel())
    for count in (0, 1):
        source = placed(torch.ones(count))
        kernels.reduce([source, source], source.clone())
    assert len(launched) == 1, "that of one element is, so it would have been seen"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_half_and_every_rounding(dtype: str) -> None:
    """x + 0 rounds once, from every fp16, bf16 and from fp32 with ties."""
    if dtype == "float32":
        sources = [placed(torch.tensor([1.0, 1.0, 1 + 2**-23])), placed(torch.tensor([2**-24, 3 * 2**-25, 2**-24]))]
        wanted = torch.tensor([1.0, 1 + 2**-23, 1 + 2**-22])
    else:
        all_of_them = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(getattr(torch, dtype))
        shuffled = all_of_them[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(3))]
        sources = [placed(all_of_them), placed(shuffled)]
        wanted = (all_of_them.double() + shuffled.double()).float().to(all_of_them.dtype)  # exact in fp64 or far away
    out = torch.empty_like(sources[0])
    reduce(sources, out)
    assert_equal(out, wanted)


@triton.jit
def narrow_kernel(source, out, T: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, narrow(tl.load(source + i), T))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_float32_is_rounded_to_a_half(dtype: str) -> None:
    """Ties, overflow, subnormals; and NaN stays NaN where its highest bits alone would be those of infinity or zero."""
    edges = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x477FF000, 0x33000000, 1])
    bits = torch.cat([edges.to(torch.int32), values("int32", 4096 - len(edges), 3)])
    source = placed(bits.view(torch.float32))
    out = placed(torch.zeros(4096, dtype=torch.int16))
    narrow_kernel[(1,)](source, out.view(torch.uint16 if dtype == "bfloat16" else torch.float16), element(dtype), 4096)
    assert_equal(out.view(getattr(torch, dtype)), source.to(getattr(torch, dtype)))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_min_and_max_of_zeros_and_nan(dtype: str, op: str) -> None:
    """Of two equal zeros the second; NaN if there is one, wherever."""
    nan = float("nan")
    rows = torch.tensor([[0.0, -0.0, nan, 1.0, nan], [-0.0, 0.0, 1.0, nan, nan]]).to(getattr(torch, dtype))
    out = torch.empty_like(placed(rows[0]))
    reduce([placed(rows[0]), placed(rows[1])], out, op)
    wanted = torch.tensor([-0.0, 0.0, nan, nan, nan]).to(rows.dtype)
    assert_equal(out, wanted)
    assert_equal(expected([rows[0], rows[1]], op), wanted)
