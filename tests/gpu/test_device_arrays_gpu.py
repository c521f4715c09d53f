"""`stage_device` on a GPU: nothing leaves it, and the order of the caller's streams holds, PyTorch's and CuPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ftcomm.arrays import Staged
from ftcomm.engines.gpu_kernel.arrays import stage_device
from ftcomm.errors import ArgumentError

from .rig import gpu

pytestmark = gpu


def on_gpu(x: Any) -> Staged:
    return stage_device(x, torch.device("cuda", torch.cuda.current_device()))


def add_one(staged: Staged, x: Any) -> Any:
    staged.flat.add_(1)
    return x if staged.finish is None else staged.finish()


@pytest.mark.parametrize("cut", [lambda t: t, lambda t: t[:, ::2]], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_torch(cut: Any, dtype: torch.dtype) -> None:
    base = torch.zeros(4, 6, dtype=dtype, device="cuda")
    x = cut(base)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)  # the value is only written when the stream gets there
        x.add_(1)
        staged = on_gpu(x)
        assert staged.flat.is_cuda
        assert (staged.flat.data_ptr() == x.data_ptr()) == x.is_contiguous()
        assert add_one(staged, x) is x
        result = x.clone()
    torch.cuda.synchronize()
    assert (result == 2).all()
    assert base.sum() == 2 * x.numel()


def test_numpy() -> None:
    x = np.zeros((4, 6), np.float32)
    assert add_one(on_gpu(x), x) is x
    assert (x == 1).all()


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("step", [1, 2, -1])
def test_cupy(own_stream: bool, step: int) -> None:
    cupy = pytest.importorskip("cupy")
    base = cupy.zeros((4, 6), np.float32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null:
        x = base[:, ::step]
        x += 1
        assert add_one(on_gpu(x), x) is x
        result = (x * 10).get()
    assert (result == 20).all()


def test_cupy_bool() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.zeros(8, np.bool_)
    staged = on_gpu(x)
    assert (staged.dtype, staged.flat.dtype) == ("bool", torch.uint8)
    assert add_one(staged, x) is x
    assert x.get().all()


def test_a_tensor_on_another_gpu_is_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with pytest.raises(ArgumentError, match=r"cuda:1 in a rank whose GPU is cuda:0.*set_device"):
        stage_device(torch.zeros(2, device="cuda:1"), torch.device("cuda", 0))
