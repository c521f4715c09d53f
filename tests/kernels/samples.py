"""Arrays that are hard on kernels, and what it means that two are equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftcomm.kernels.device import DEVICE
from ftcomm.kernels.dtypes import DTYPES, OPS, unsupported

PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if unsupported(dtype, op) is None]


def values(dtype: str, count: int, seed: int) -> torch.Tensor:
    """A third any bits at all, a third special values, a third such as are of similar magnitude. In host memory."""
    chance = np.random.default_rng(seed)
    kind = getattr(torch, dtype)
    if count == 0:
        return torch.empty(0, dtype=kind)
    if dtype == "bool":
        return torch.from_numpy(chance.integers(0, 2, count, np.uint8)).view(torch.bool)
    size = DTYPES[dtype].itemsize
    bits = torch.from_numpy(chance.integers(0, 256, count * size, np.uint8)).view(kind)
    if kind.is_floating_point:
        limits = torch.finfo(kind)
        step = limits.smallest_normal * limits.eps  # the smallest subnormal
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, limits.max, -limits.max, limits.tiny, step, -3 * step, 1.0]
        plain = torch.from_numpy(chance.standard_normal(count)).to(kind)
    else:
        edges = torch.iinfo(kind)
        special = [edges.min, edges.max, edges.min + 1, edges.max - 1, 0, 1, 2]
        plain = torch.from_numpy(chance.integers(0, 50, count)).to(kind)
    picked = torch.from_numpy(chance.integers(0, len(special), count))
    special_bits = as_bytes(torch.tensor(special, dtype=kind))[picked]
    which = torch.from_numpy(chance.integers(0, 3, count))
    rows = torch.stack([as_bytes(bits), special_bits, as_bytes(plain)])
    return rows[which, torch.arange(count)].reshape(-1).view(kind)


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """[elements, bytes of one]"""
    return array.cpu().view(torch.uint8).reshape(array.numel(), array.element_size())


def placed(array: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """A copy where kernels run, `shift` elements behind a multiple of 16 bytes."""
    size = array.element_size()
    room = torch.empty((array.numel() + shift) * size + 16, dtype=torch.uint8, device=DEVICE)
    begin = -room.data_ptr() % 16 + shift * size
    there = room[begin : begin + array.numel() * size].view(array.dtype)
    return there.copy_(array)


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit, but that one NaN is as good as another: which bits it has is the processor's affair."""
    got, want = got.cpu(), want.cpu()
    same = (as_bytes(got) == as_bytes(want)).all(1)
    if got.dtype.is_floating_point:
        same |= got.isnan() & want.isnan()
    wrong = torch.nonzero(~same).flatten().tolist()
    if wrong:
        at = wrong[0]
        pytest.fail(f"{len(wrong)} of {len(got)} differ, the first is [{at}]: {got[at]} is not {want[at]}")
