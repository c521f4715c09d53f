"""`stage_device` with the CPU as the device: what is the caller's memory, what is a copy, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ftcomm.arrays import DTYPES, Staged
from ftcomm.engines.gpu_kernel.arrays import stage_device
from ftcomm.errors import ArgumentError

CPU = torch.device("cpu")


def finish(staged: Staged, x: Any) -> Any:
    return x if staged.finish is None else staged.finish()


@pytest.mark.parametrize("name", DTYPES)
def test_a_plain_tensor_is_worked_on_in_place(name: str) -> None:
    x = torch.zeros(3, 4, dtype=getattr(torch, name))
    staged = stage_device(x, CPU)
    assert staged.finish is None
    assert staged.dtype == name
    assert staged.flat.data_ptr() == x.data_ptr()
    assert (len(staged.flat), staged.flat.ndim) == (12, 1)
    assert staged.flat.dtype == (torch.uint8 if name == "bool" else x.dtype)
    staged.flat[5] = 1
    assert x[1, 1] == 1


def test_a_parameter_is_worked_on_in_place() -> None:
    x = torch.nn.Parameter(torch.zeros(4))
    stage_device(x, CPU).flat.add_(1)
    assert x.tolist() == [1] * 4


@pytest.mark.parametrize("cut", [lambda t: t[:, ::2], lambda t: t.T, lambda t: t[1:, 1:]], ids=["step", "T", "corner"])
def test_a_strided_tensor_is_copied_back(cut: Any) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    x, before = cut(base), cut(base).clone()
    staged = stage_device(x, CPU)
    assert staged.flat.tolist() == before.reshape(-1).tolist()
    staged.flat.add_(1)
    assert x.equal(before)  # until the op is done
    assert finish(staged, x) is x
    assert x.equal(before + 1)
    assert base.sum() == torch.arange(24.0).sum() + x.numel()


@pytest.mark.parametrize("values", [[2.0, -4.0], [2.0]], ids=["strided", "contiguous"])
def test_a_negated_view_is_copied(values: list[float]) -> None:
    x = torch.tensor([complex(1, value) for value in values]).conj().imag
    assert x.is_neg()
    assert x.is_contiguous() == (len(values) == 1)
    staged = stage_device(x, CPU)
    assert not staged.flat.is_neg()  # a kernel sees the bits alone
    assert staged.flat.tolist() == [-value for value in values]
    staged.flat.mul_(10)
    finish(staged, x)
    assert x.tolist() == [-10 * value for value in values]


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.uint64, np.int8])
def test_a_host_array_goes_through_the_device(dtype: Any) -> None:
    base = np.zeros((4, 6), dtype)
    for x in (base, base[:, ::2]):
        staged = stage_device(x, CPU)
        assert isinstance(staged.flat, torch.Tensor)
        assert staged.dtype == np.dtype(dtype).name
        staged.flat.copy_(torch.ones(len(staged.flat), dtype=staged.flat.dtype))
        assert not x.any()
        assert finish(staged, x) is x
        assert x.all()
        base[...] = 0


def test_bfloat16_of_the_host_is_bfloat16_on_the_device() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.full((2, 2), 1.5, jax.numpy.bfloat16)
    staged = stage_device(x, CPU)
    assert staged.flat.dtype == torch.bfloat16
    staged.flat.add_(1)
    result = finish(staged, x)
    assert result.dtype == x.dtype
    assert (result == 2.5).all()
    assert (x == 1.5).all()  # immutable


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64.*view_as_real"),
        (torch.zeros(1).expand(4), "several elements share one address"),
        (torch.zeros(2).to_sparse(), "to_dense"),
        (torch.zeros(2, device="meta"), "device meta"),
        ([1.0], "a value of type list"),
        (np.zeros(2, np.complex64), "complex64"),
    ],
)
def test_what_cannot_be_reduced(x: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        stage_device(x, CPU)


def test_a_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"on cpu in a rank whose GPU is cpu:1.*set_device"):
        stage_device(torch.zeros(2), torch.device("cpu", 1))
