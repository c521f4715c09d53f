"""The fused steps of a ring on the host; see kernels/device/forward.py, which has the picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftcomm.kernels.check import check
from ftcomm.kernels.host.copy import copy
from ftcomm.kernels.host.reduce import reduce

Array = Any  # a NumPy array or a torch tensor


def reduce_forward(sources: Sequence[Array], staging: Array, op: str = "sum", *, sms: int | None = None) -> None:
    """See `ftcomm.kernels.reduce_forward`."""
    reduce(sources, staging, op, sms=sms)


def reduce_copy(
    sources: Sequence[Array],
    outs: Sequence[Array],
    op: str = "sum",
    *,
    divisor: int | None = None,
    sms: int | None = None,
) -> None:
    """See `ftcomm.kernels.reduce_copy`."""
    check(sources, outs, op, divisor, sms)
    first, *rest = outs
    reduce(sources, first, op, divisor=divisor, sms=sms)
    for out in rest:
        copy(first, out)


def copy_forward(source: Array, outs: Sequence[Array], *, sms: int | None = None) -> None:
    """See `ftcomm.kernels.copy_forward`."""
    check([source], outs, sms=sms)
    for out in outs:
        copy(source, out)
