"""The options of torch's calls, as they come: torch's own object for them, or what may stand in its place."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ftcomm.errors import ArgumentError


def options_of(given: Any, kind: type, timeout: timedelta | None = None) -> Any:
    """Returns torch's options of a call. It may also be made with a ReduceOp in their place, or with nothing."""
    if isinstance(given, kind):
        return given
    opts = kind()
    if given is not None:
        opts.reduceOp = given
    if timeout is not None:
        opts.timeout = timeout
    return opts


def rooted(given: Any, kind: type, root: int, timeout: timedelta | None) -> Any:
    """Returns the options of a call with a root, which may also be made with the root in their place."""
    if isinstance(given, kind):
        return given
    opts = kind()
    opts.rootRank = root if given is None else given
    if timeout is not None:
        opts.timeout = timeout
    return opts


def counts(x: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Returns the elements for each rank; torch splits along the first dimension."""
    if not splits:
        if x.numel() % size:
            raise ArgumentError(
                f"all_to_all_single of {x.numel()} elements in a group of {size}: expected a multiple of {size}, or "
                "splits."
            )
        return [x.numel() // size] * size
    if len(splits) != size or (x.dim() and sum(splits) != x.shape[0]):
        raise ArgumentError(
            f"splits {list(splits)} of a tensor of shape {tuple(x.shape)} in a group of {size}: expected one for each "
            "rank, that add up to its first dimension."
        )
    row = x[0].numel() if x.dim() > 1 and x.shape[0] else 1
    return [split * row for split in splits]
