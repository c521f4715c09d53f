"""What tensors a call of torch's takes, before anything is exchanged."""

from __future__ import annotations

import pytest
import torch

from ftcomm.errors import ArgumentError
from ftcomm.torch.tensors import fit


@pytest.mark.parametrize("given", [torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.int32)])
def test_a_tensor_of_another_size_or_dtype_is_refused(given: torch.Tensor) -> None:
    """It would get elements of its neighbour, or converted ones, in silence."""
    fit(1, "reduce_scatter", "input", [torch.ones(2, 2)], 4, torch.float32)
    with pytest.raises(ArgumentError, match=r"reduce_scatter: input 1 has .* expected 4 x torch\.float32"):
        fit(1, "reduce_scatter", "input", [torch.ones(4), given], 4, torch.float32)
