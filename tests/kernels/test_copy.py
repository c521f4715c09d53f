"""Copies in Triton against the host's, bit for bit, NaN included."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.kernels.device.copy import copy
from ftcomm.kernels.device.launch import element
from ftcomm.kernels.device.tile import copy_span
from ftcomm.kernels.dtypes import DTYPES
from ftcomm.kernels.host.copy import copy as host_copy
from tests.kernels.samples import as_bytes, placed, values

pytestmark = pytest.mark.protocol

SMALL = 64  # elements to a tile


@triton.jit
def span_kernel(src, dst, n, T: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    copy_span(src, dst, n, T, BLOCK, ALIGNED, True)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(as_bytes(a), as_bytes(b))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(DTYPES)), st.integers(0, 5 * SMALL), st.integers(0, 20), st.integers(0, 20), st.integers())
def test_spans_of_any_shape(dtype: str, n: int, shift: int, out_shift: int, seed: int) -> None:
    source = placed(values(dtype, n, abs(seed)), shift)
    fence = values(dtype, n + 32, abs(seed) + 1)
    room = placed(fence, out_shift)
    out = room[16 : 16 + n]
    aligned = n > 0 and source.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    span_kernel[(1,)](source.data_ptr(), out.data_ptr(), n, T=element(dtype), BLOCK=SMALL, ALIGNED=aligned, num_warps=1)
    assert same_bytes(out, source)
    assert same_bytes(room[:16], fence[:16])
    assert same_bytes(room[16 + n :], fence[16 + n :])


@pytest.mark.parametrize("sms", [None, 1, 4])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_arrays(dtype: str, shift: int, sms: int | None) -> None:
    for count in (0, 1, 15, 8192, 40_003):
        array = values(dtype, count, count)
        source = placed(array, shift)
        out = torch.zeros_like(source)
        copy(source, out, sms=sms)
        assert same_bytes(out, array)
        assert same_bytes(source, array)
        host = torch.zeros_like(array)
        host_copy(array, host, sms=sms)
        assert same_bytes(host, array)


def test_onto_itself() -> None:
    array = values("float32", 10_000, 5)
    source = placed(array)
    copy(source, source)
    assert same_bytes(source, array)
