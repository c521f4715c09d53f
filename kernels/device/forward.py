"""The steps of a ring, fused as in FTAR: what goes on to the next rank is read once and written where it is needed.

Rank r of a ring holds an array in parts, one for each rank; `in` is where the rank before it has written.

    step                    reads              writes                    call
    reduce, not the last    in, own part       staging                   reduce_forward
    reduce, the last        in, own part       output and staging        reduce_copy      (average: divides here)
    forward                 in                 output and staging        copy_forward
    forward, the last       in                 output                    ftcomm.kernels.copy

Partial sums never touch the output, so that an output is INPUT or FINAL at any moment. They are rounded to the dtype at
each step, as in any ring. `staging` is read by the next rank right away: it stays in the cache, the output is stored
past it. Publishing it, by a word behind the data, is the caller's part (ftcomm.kernels.device.signal).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftcomm.kernels.device.copy import launch_copy
from ftcomm.kernels.device.reduce import launch_reduce


def reduce_forward(
    sources: Sequence[torch.Tensor], staging: torch.Tensor, op: str = "sum", *, sms: int | None = None
) -> None:
    """See `ftcomm.kernels.reduce_forward`. On the current stream; does not wait."""
    launch_reduce(sources, [staging], op, None, sms, stream=False)


def reduce_copy(
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    op: str = "sum",
    *,
    divisor: int | None = None,
    sms: int | None = None,
) -> None:
    """See `ftcomm.kernels.reduce_copy`. On the current stream; does not wait."""
    launch_reduce(sources, outs, op, divisor, sms, stream=True)


def copy_forward(source: torch.Tensor, outs: Sequence[torch.Tensor], *, sms: int | None = None) -> None:
    """See `ftcomm.kernels.copy_forward`. On the current stream; does not wait."""
    launch_copy(source, outs, sms)
