"""Reductions by a GPU of what lies in host memory, for an exchange that the host drives."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ftcomm.engines.gpu_reduce.reducer import DeviceReducer
from ftcomm.kernels.dtypes import DTYPES, OPS, unsupported
from ftcomm.kernels.host.reduce import Reducer, operand

from .rig import gpu

pytestmark = gpu

COUNT = 100_003
PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if unsupported(dtype, op) is None]


@pytest.fixture(scope="module")
def reducer() -> Iterator[DeviceReducer]:
    from ftcomm.engines.gpu.probe import require_cuda

    require_cuda()
    from ftcomm.engines.gpu_reduce.mapped import CudaReduceDevice

    made = DeviceReducer(CudaReduceDevice())
    yield made
    made.use([])
    made.warm()


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
@pytest.mark.parametrize("w", [2, 3])
def test_mapped_pinned_and_other_memory(reducer: DeviceReducer, dtype: str, op: str, w: int) -> None:
    """The host's bits, wherever the arrays lie; without NaNs, whose bits are the processor's affair."""
    rng = np.random.default_rng(w)
    carrier = DTYPES[dtype].carrier
    values = [rng.normal(0, 9, COUNT) for _ in range(w)]
    if dtype == "bfloat16":
        inputs = [(x.astype(np.float32).view(np.uint32) >> 16).astype(carrier) for x in values]
    else:
        inputs = [(x if carrier.kind == "f" else x.astype(np.int64)).astype(carrier) for x in values]
    want = np.empty_like(inputs[0])
    Reducer().get(dtype, op)([operand(dtype, x) for x in inputs], operand(dtype, want))
    nbytes = inputs[0].nbytes
    buffer = memoryview(mmap.mmap(-1, 4 * (nbytes + 64)))
    reducer.use([buffer])
    whole = np.frombuffer(buffer, np.uint8)
    mapped = [whole[i * (nbytes + 64) // 8 * 8 :][:nbytes].view(carrier) for i in range(4)]
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().view(carrier)
    for place in (mapped[0], pinned, np.empty_like(want)):
        place[...] = inputs[0]
        mapped[1][...] = inputs[1]
        sources = [place, mapped[1], *inputs[2:]]
        for out in (mapped[3], pinned if place is not pinned else np.empty_like(want), place):
            reducer.get(dtype, op)([operand(dtype, x) for x in sources], operand(dtype, out))
            assert out.tobytes() == want.tobytes()
            place[...] = inputs[0]
