"""For the tests of this folder: ranks that share the GPU, and what they have to come to."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.gpu.ranks import ON_GPU, Ranks

REQUIRED = "FTCOMM_TESTS_NEED_GPU"  # set by `ftcomm bench gpu-check`, in which what is skipped would pass for done

absent = REQUIRED not in os.environ and not torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(absent, reason="no CUDA device")]


@contextlib.contextmanager
def ranks_on_gpu(count: int, staging: str = "device") -> Iterator[Ranks]:
    """Members of one view, and in it. Whatever still runs is ended behind it."""
    from ftcomm.engines.gpu.probe import require_cuda

    require_cuda()
    from ftcomm.engines.gpu_kernel.cuda import CudaDevice
    from ftcomm.engines.gpu_kernel.layout import CUDA

    ranks = Ranks(count, CUDA, functools.partial(CudaDevice, staging=staging), deadline=ON_GPU)
    try:
        ranks.enter()
        yield ranks
    finally:
        ranks.close()


def inputs(count: int, elements: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """On the host, one for each rank."""
    random = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(elements, generator=random).to(dtype) for _ in range(count)]
    return [
        torch.randint(-1000, 1000, (elements,), generator=random, dtype=torch.int64).to(dtype) for _ in range(count)
    ]


def total(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum to the bit: in order, half precision in float32 and rounded once."""
    half = sources[0].dtype in (torch.bfloat16, torch.float16)
    result = sources[0].float() if half else sources[0].clone()
    for source in sources[1:]:
        result += source
    return result.to(sources[0].dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
