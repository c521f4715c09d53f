"""The fused steps of a ring against the host's, and a whole ring of them."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from ftcomm.kernels.device import copy as device_copy
from ftcomm.kernels.device import forward as device
from ftcomm.kernels.dtypes import OPS
from ftcomm.kernels.host import copy as host_copy
from ftcomm.kernels.host import forward as host
from tests.kernels.samples import assert_equal, placed, values

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # the interpreter's, of overflow
]

SHAPES = [("float32", 2, 5000), ("float16", 3, 17), ("bfloat16", 4, 30_001), ("int32", 1, 300), ("bool", 2, 999)]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("dtype", "w", "count"), SHAPES)
def test_reduce_into_several_places(dtype: str, w: int, count: int, shift: int) -> None:
    for op in ("sum", "product", "min") + (("avg",) if dtype != "bool" else ()):
        divisor = 7 if op == "avg" else None
        arrays = [values(dtype, count, seed) for seed in range(w)]
        sources = [placed(array, shift) for array in arrays]
        outs = [torch.zeros_like(sources[0]) for _ in range(3)]
        wanted = [torch.zeros_like(arrays[0]) for _ in range(3)]
        device.reduce_copy(sources, outs, op, divisor=divisor)
        host.reduce_copy(arrays, wanted, op, divisor=divisor)
        for out, want in zip(outs, wanted, strict=True):
            assert_equal(out, want)
        if op != "avg":
            staging = torch.zeros_like(sources[0])
            device.reduce_forward(sources, staging, op, sms=2)
            assert_equal(staging, wanted[0])
            host.reduce_forward(arrays, wanted[1].zero_(), op)
            assert_equal(wanted[1], wanted[0])


@pytest.mark.parametrize("form", [device, host])
def test_in_place(form: ModuleType) -> None:
    """The output, or the staging, or both, may be sources."""
    arrays = [values("float32", 9000, seed) for seed in range(3)]
    wanted = torch.empty_like(arrays[0])
    host.reduce_forward(arrays, wanted)
    for places in ((0, None), (2, None), (None, 1), (1, 2)):
        sources = [placed(array) for array in arrays]
        outs = [torch.empty_like(sources[0]) if at is None else sources[at] for at in places]
        form.reduce_copy(sources, outs)
        for out in outs:
            assert_equal(out, wanted)


@pytest.mark.parametrize("count", [1, 8191, 20_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_copy_forward(dtype: str, count: int) -> None:
    array = values(dtype, count, count)
    source = placed(array)
    outs = [torch.zeros_like(source) for _ in range(2)]
    device.copy_forward(source, [*outs, source], sms=2)
    wanted = [torch.zeros_like(array) for _ in range(2)]
    host.copy_forward(array, wanted)
    for out in (*outs, source, *wanted):
        assert out.cpu().view(torch.uint8).equal(array.view(torch.uint8))


def ring(form: ModuleType, copy: ModuleType, arrays: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    """All ranks of a ring in one process, step by step; `staging[r][p]` is where rank r leaves part p for the next."""
    n = len(arrays)
    parts = [list(array.tensor_split(n)) for array in arrays]
    before = [[part.clone() for part in row] for row in parts]
    staging = [[torch.full_like(part, 77) for part in row] for row in parts]
    sum_op = "sum" if op == "avg" else op
    for step in range(2 * n - 1):
        for rank in range(n):
            part = (rank - step) % n
            received = staging[(rank - 1) % n][part]
            mine, own = parts[rank][part], staging[rank][part]
            if step < n:  # until the last reduce step the output is INPUT
                assert_equal(mine, before[rank][part])
            if step == 0:
                copy.copy(mine, own)
            elif step < n - 1:
                form.reduce_forward([received, mine], own, sum_op)
            elif step == n - 1:
                form.reduce_copy([received, mine], [mine, own], op, **({"divisor": n} if op == "avg" else {}))
            elif step < 2 * n - 2:
                form.copy_forward(received, [mine, own])
            else:
                copy.copy(received, mine)
    return arrays


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("dtype", "n"), [("float32", 2), ("float16", 3), ("bfloat16", 5), ("int16", 4)])
def test_a_ring(dtype: str, n: int, op: str) -> None:
    arrays = [values(dtype, 1003, seed) for seed in range(n)]
    got = ring(device, device_copy, [placed(array) for array in arrays], op)
    wanted = ring(host, host_copy, [array.clone() for array in arrays], op)
    for mine, want in zip(got, wanted, strict=True):
        assert_equal(mine, want)
        assert_equal(mine, got[0])


def test_a_ring_of_integers_gives_the_sum_of_all() -> None:
    arrays = [values("int32", 500, seed) for seed in range(4)]
    wanted = np.add.reduce([array.numpy() for array in arrays], dtype=np.int32)
    for out in ring(device, device_copy, [placed(array) for array in arrays], "sum"):
        assert (out.cpu().numpy() == wanted).all()
