"""What allreduce with compression="fp8" has to give: by the definition of the code, all of an op at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ftcomm.kernels.dtypes import HOST_DTYPES
from tests.rigs import fp8_definition as definition


def coded(inputs: Sequence[np.ndarray], dtype: str, op: str) -> np.ndarray:
    """The result, as carriers like `inputs`, which begin where a block of 256 does and are in the order of members."""
    reduced = definition.reduce([definition.encode(tensor(x, dtype)) for x in inputs], op)
    decoded = definition.decode(reduced, len(inputs[0]), dtype)
    out: np.ndarray = decoded.view(getattr(torch, str(np.dtype(inputs[0].dtype)))).numpy()
    return out


def tensor(carrier: np.ndarray, dtype: str) -> torch.Tensor:
    """The elements of a carrier array, in its memory."""
    assert carrier.dtype == HOST_DTYPES[dtype].carrier
    return torch.from_numpy(carrier).view(getattr(torch, dtype))
