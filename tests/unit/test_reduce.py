"""Reductions against references, and the same bits on all members whatever lies where."""

from __future__ import annotations

import functools
from operator import and_, or_, xor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.kernels.dtypes import BITWISE, DTYPES, OPS, unsupported
from ftcomm.kernels.host.reduce import Reducer, operand

PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if unsupported(dtype, op) is None]
HALVES = ("float16", "bfloat16")


def carriers(dtype: str, count: int, members: int, seed: int) -> list[np.ndarray]:
    """Any bits at all: NaNs with payloads, infinities, both zeros, denormals."""
    chance = np.random.default_rng(seed)
    if dtype == "bool":
        return [chance.integers(0, 2, count).astype(np.bool_) for _ in range(members)]
    carrier = DTYPES[dtype].carrier
    return [chance.integers(0, 256, count * carrier.itemsize, np.uint8).view(carrier) for _ in range(members)]


def reduce(dtype: str, op: str, sources: list[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    out = np.empty_like(sources[0]) if out is None else out
    with np.errstate(all="ignore"):
        Reducer().get(dtype, op)([operand(dtype, s) for s in sources], operand(dtype, out))
    return out


def at(array: np.ndarray, shift: int) -> np.ndarray:
    """A copy that starts `shift` elements behind a cache line."""
    size = array.itemsize
    raw = np.empty(array.nbytes + 128 + shift * size, np.uint8)
    begin = -raw.ctypes.data % 64 + shift * size
    placed = raw[begin : begin + array.nbytes].view(array.dtype)
    placed[...] = array
    return placed


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_equal_bits_in_place_out_of_place_and_at_any_alignment(dtype: str, op: str) -> None:
    for seed in range(6):
        for count in (1, 7, 64, 1000, 4099):
            for members in (2, 3, 5):
                sources = carriers(dtype, count, members, seed)
                want = reduce(dtype, op, sources).tobytes()
                for shift in (0, 1, 3, 5):
                    first, second, *rest = [at(s, (shift * (i + 1)) % 7) for i, s in enumerate(sources)]
                    assert reduce(dtype, op, [first, second, *rest], at(first, shift)).tobytes() == want
                    in_place = at(first, shift)
                    assert reduce(dtype, op, [in_place, second, *rest], in_place).tobytes() == want
                    in_place = at(second, shift)
                    assert reduce(dtype, op, [first, in_place, *rest], in_place).tobytes() == want


@pytest.mark.parametrize("dtype", HALVES)
def test_equal_bits_with_any_number_of_threads(dtype: str) -> None:
    sources = carriers(dtype, 262_144, 2, 3)
    before = torch.get_num_threads()
    results = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.add(reduce(dtype, "sum", sources).tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", [op for op in OPS if op not in BITWISE])
def test_halves_are_reduced_in_fp32_and_rounded_once(dtype: str, op: str) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(4097).to(getattr(torch, dtype)) for _ in range(5)]
    wide = torch.stack([i.float() for i in inputs])
    acc = wide[0].clone()
    for row in wide[1:]:
        acc = {
            "sum": acc + row,
            "avg": acc + row,
            "product": acc * row,
            "min": torch.minimum(acc, row),
            "max": torch.maximum(acc, row),
        }[op]
    want = (acc / 5 if op == "avg" else acc).to(getattr(torch, dtype)).view(torch.int16).numpy()
    sources = [i.view(torch.int16).numpy().view(DTYPES[dtype].carrier) for i in inputs]
    assert reduce(dtype, op, sources).tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_floats_are_close_to_the_exact_result(dtype: str) -> None:
    chance = np.random.default_rng(5)
    sources = [chance.standard_normal(3000).astype(dtype) for _ in range(4)]
    stack = np.stack(sources).astype(np.longdouble)
    exact = {
        "sum": stack.sum(0),
        "avg": stack.mean(0),
        "min": stack.min(0),
        "max": stack.max(0),
        "product": stack.prod(0),
    }
    for op, want in exact.items():
        tolerance = 8 * np.finfo(dtype).eps * np.maximum(np.abs(want), np.abs(stack).max(0))
        assert (np.abs(reduce(dtype, op, sources) - want) <= tolerance).all()


@settings(max_examples=50)
@given(
    st.sampled_from([d for d in DTYPES if DTYPES[d].kind == "int"]),
    st.integers(1, 5),
    st.integers(0, 99),
    st.sampled_from(OPS),
)
def test_integers_wrap_and_their_average_truncates_toward_zero(dtype: str, members: int, seed: int, op: str) -> None:
    sources = carriers(dtype, 50, members, seed)
    bits = 8 * DTYPES[dtype].itemsize
    signed = DTYPES[dtype].carrier.kind == "i"

    def wrap(value: int, bits: int) -> int:
        value &= (1 << bits) - 1
        return value - (1 << bits) if signed and value >> (bits - 1) else value

    for column, got in zip(
        zip(*(s.tolist() for s in sources), strict=True), reduce(dtype, op, sources).tolist(), strict=True
    ):
        product = 1
        for value in column:
            product *= value
        total = wrap(sum(column), 64)
        average = abs(total) // members * (1 if total >= 0 else -1)
        want = {"sum": sum(column), "product": product, "min": min(column), "max": max(column), "avg": average}
        want |= {"band": functools.reduce(and_, column), "bor": functools.reduce(or_, column)}
        want |= {"bxor": functools.reduce(xor, column)}
        assert got == wrap(want[op], bits)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
def test_nan_is_passed_on(dtype: str, op: str) -> None:
    values = torch.tensor([[float("nan"), 1, 2], [1, float("nan"), 2]]).to(getattr(torch, dtype))
    sources = [
        row.view(getattr(torch, f"int{8 * row.element_size()}")).numpy().view(DTYPES[dtype].carrier) for row in values
    ]
    out = operand(dtype, reduce(dtype, op, sources))
    assert np.isnan(np.asarray(torch.as_tensor(out).double())).tolist() == [True, True, False]


def test_bool() -> None:
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    alike = (("sum", "max", "bor"), a | b), (("product", "min", "band"), a & b), (("bxor",), a ^ b)
    for ops, want in alike:
        assert all((reduce("bool", op, [a, b]) == want).all() for op in ops)


@pytest.mark.parametrize(
    ("dtype", "op", "mend"),
    [
        ("float32", "mean", "use one of sum, avg"),
        ("complex64", "sum", "convert to one of float64"),
        ("bool", "avg", "convert to a number"),
        ("float16", "bxor", "use it with integers or bool"),
    ],
)
def test_what_cannot_be_reduced_is_said_with_the_mend(dtype: str, op: str, mend: str) -> None:
    assert mend in (unsupported(dtype, op) or "")
