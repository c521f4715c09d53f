"""Copies in Triton, bit for bit, NaN included."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.kernels.device.launch import element
from ftcomm.kernels.device.tile import copy_span
from ftcomm.kernels.dtypes import DTYPES
from tests.kernels.samples import as_bytes, placed, values

pytestmark = pytest.mark.protocol

SMALL = 64  # elements to a tile


@triton.jit
def span_kernel(src, dst, n, T: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    copy_span(src, dst, n, T, BLOCK, ALIGNED)


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
