"""Pure helpers between torch's calls and ours: names of reductions, views of tensors, and the share of a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ftcomm.errors import ArgumentError
from ftcomm.torch.versions import premultiplied_by

_Type = dist.ReduceOp.RedOpType
_NAMES = {
    _Type.SUM: "sum",
    _Type.AVG: "avg",
    _Type.MIN: "min",
    _Type.MAX: "max",
    _Type.PRODUCT: "product",
    _Type.BAND: "band",
    _Type.BOR: "bor",
    _Type.BXOR: "bxor",
    _Type.PREMUL_SUM: "sum",
}


def reduction(op: Any) -> tuple[str, Any]:
    """Returns our name of torch's ReduceOp, and the factor for inputs before it, or None."""
    kind = getattr(op, "op", op)
    name = _NAMES.get(kind)
    if name is None:
        raise ArgumentError(f"{op} is not known; use one of dist.ReduceOp.{', '.join(kind.name for kind in _NAMES)}.")
    return name, premultiplied_by(op) if kind == _Type.PREMUL_SUM else None


def reals(x: torch.Tensor, op: str) -> torch.Tensor:
    """Returns the reals to reduce: for a complex tensor its real and imaginary parts, which can be added and scaled."""
    if not x.is_complex():
        return x
    if op not in ("sum", "avg"):
        raise ArgumentError(f"op={op!r} of {x.dtype}: complex numbers can be summed and averaged. Reduce x.abs().")
    return torch.view_as_real(x)


def one(tensors: Sequence[torch.Tensor] | torch.Tensor, what: str) -> torch.Tensor:
    """Returns the tensor of a call that torch writes as a list of one, as if a process had several devices."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(f"{what} got {len(tensors)} tensors; expected one, since a rank has one device.")
    return tensors[0]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a copy of the elements of all tensors, one after the other."""
    return torch.cat([x.reshape(-1) for x in tensors]) if tensors else torch.empty(0)


def spread(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Copies the elements of `flat` out to the tensors; the inverse of `joined`."""
    start = 0
    for x in tensors:
        x.copy_(flat[start : start + x.numel()].view(x.shape))
        start += x.numel()


def fit(rank: int, call: str, what: str, tensors: Iterable[torch.Tensor], count: int, dtype: torch.dtype) -> None:
    """Refuse tensors without `count` elements of `dtype`, before anything is exchanged: they would get elements of
    their neighbours, or converted ones. Shapes may differ, as with NCCL; gloo refuses them. Raises `ArgumentError`."""
    for place, x in enumerate(tensors):
        if x.numel() != count or x.dtype != dtype:
            raise ArgumentError(
                f"rank {rank}: {call}: {what} {place} has {x.numel()} x {x.dtype}; expected {count} x {dtype}."
            )


def equal_sizes(tensors: Sequence[torch.Tensor]) -> bool:
    return all(x.numel() == tensors[0].numel() and x.dtype == tensors[0].dtype for x in tensors)


def rescale(x: torch.Tensor, spans: Iterable[Any], divided_by: int) -> None:
    """Turns `x`, a sum of inputs that were divided by `divided_by`, into the average of the inputs that are in it."""
    for span in spans:
        if len(span.replicas) != divided_by:
            x.view(-1)[span.start : span.stop].mul_(divided_by / len(span.replicas))
