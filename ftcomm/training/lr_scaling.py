"""Scales the learning rate while replicas are away: an average over fewer samples may need a shorter step.

"none"      unchanged
"linear"    times healthy / total, as the batch has shrunk
"sqrt"      times the root of that, as the noise of the gradient has grown
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ftcomm.errors import ArgumentError

if TYPE_CHECKING:
    from torch.optim import Optimizer

POLICIES: dict[str, Callable[[float], float]] = {"none": lambda share: 1.0, "linear": float, "sqrt": math.sqrt}


def lr_multiplier(policy: str, healthy: int, total: int) -> float:
    """Returns the factor for learning rates. Pure; exactly 1.0 when all replicas are healthy."""
    if policy not in POLICIES:
        raise ArgumentError(f"lr={policy!r}; expected one of {', '.join(POLICIES)}.")
    return POLICIES[policy](min(healthy / total, 1.0))


@contextlib.contextmanager
def scaled(optimizer: Optimizer, scale: float) -> Iterator[None]:
    """Multiply the learning rate of each group of `optimizer` by `scale` inside the block; 1.0 touches nothing.

    Afterwards each rate is the same object as before, so schedulers, which may read it back, see no difference.
    """
    if scale == 1.0:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * scale
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
