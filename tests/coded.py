"""What allreduce with compression="fp8" has to give: by the kernels' definition of the code, all of an op at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host import quantise as definition


def coded(inputs: Sequence[np.ndarray], dtype: str, op: str) -> np.ndarray:
    """The result, as carriers like `inputs`, which begin where a block of 256 does and are in the order of members."""
    sources = [definition.quantise(tensor(x, dtype), "fp8") for x in inputs]
    reduced = definition.dequantise_reduce_requantise(sources, op)
    out: np.ndarray = definition.dequantise(reduced).view(getattr(torch, str(np.dtype(inputs[0].dtype)))).numpy()
    return out


def tensor(carrier: np.ndarray, dtype: str) -> torch.Tensor:
    """The elements of a carrier array, in its memory."""
    assert carrier.dtype == HOST_DTYPES[dtype].carrier
    return torch.from_numpy(carrier).view(getattr(torch, dtype))
