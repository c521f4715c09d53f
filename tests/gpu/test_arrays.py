"""`stage` for arrays on a CUDA device: through host memory, in the order of the caller's stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftcomm.arrays import Staged, stage

from .rig import gpu

pytestmark = gpu


def add_one(staged: Staged) -> object:
    """Play the op: `flat += 1`, bfloat16 as such. Returns what `finish` does."""
    if staged.dtype == "bfloat16":
        torch.from_numpy(staged.flat).view(torch.bfloat16).add_(1)
    else:
        np.add(staged.flat, 1, out=staged.flat)
    assert staged.finish is not None
    return staged.finish()


@pytest.mark.parametrize("cut", [lambda t: t, lambda t: t[:, ::2]], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_cuda(cut, dtype: torch.dtype) -> None:
    base = torch.zeros(4, 6, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    x = cut(base)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)  # the value is only written when the stream gets there
        x.add_(1)
        staged = stage(x)
    assert add_one(staged) is x
    assert (x == 2).all()


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    base = cupy.zeros((4, 6), np.float32)
    for x in (base, base[:, ::2]):
        assert add_one(stage(x)) is x
    assert base.get().tolist() == [[2, 1, 2, 1, 2, 1]] * 4
