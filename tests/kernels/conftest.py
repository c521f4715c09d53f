"""For the tests of kernels."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _denormals() -> None:
    """What another test has loaded may have switched them off for this thread."""
    import torch

    torch.set_flush_denormal(False)
