"""Turns a tensor of torch into one flat run of host memory, and back. Imported when the first tensor comes."""

from __future__ import annotations

import numpy as np
import torch

from ftcomm.arrays import CARRIERS, DTYPES, Staged, first_line, may_overlap, refuse, refuse_dtype, type_name

NAMES = {getattr(torch, name): name for name in DTYPES}
_CARRIED = {name: getattr(torch, carrier) for name, carrier in CARRIERS.items()}


def stage_tensor(x: torch.Tensor) -> Staged:
    name = NAMES.get(x.dtype)
    if name is None or not x.is_cpu:
        return _stage_elsewhere(x)
    plain = x.detach() if x.requires_grad else x
    try:
        host = (plain.view(_CARRIED[name]) if name in _CARRIED else plain).numpy()
    except (RuntimeError, TypeError) as error:
        return _stage_odd(x, name, error)
    if not host.flags.carray:  # contiguous, aligned, writable
        return _stage_copy(x, name)
    if x.data_ptr() == 0 and x.numel():
        refuse("a torch tensor whose storage was freed", "Allocate it again before the call.")
    return Staged(host if host.ndim == 1 else host.reshape(-1), name)


def _stage_copy(x: torch.Tensor, name: str) -> Staged:
    if may_overlap(x.shape, x.stride(), 1):
        refuse(
            f"a torch tensor of shape {tuple(x.shape)} and strides {x.stride()}: several elements share one address",
            "Pass x.contiguous(), and use that as the result.",
        )
    caller = x.detach()
    private = torch.empty(x.shape, dtype=x.dtype)
    private.copy_(caller)

    def finish() -> torch.Tensor:
        caller.copy_(private)
        return x

    return Staged(_flat(private, name), name, finish)


def _stage_elsewhere(x: torch.Tensor) -> Staged:
    """Stages a dtype or a device that is not the plain case: CUDA through pinned memory, all else is an error."""
    name = torch_dtype(x)
    if x.device.type != "cuda":
        refuse(
            f"a torch tensor on device {x.device}",
            "ftcomm serves cpu and cuda: pass x.cpu(), and copy the result back.",
        )
    caller = x.detach()
    stream = torch.cuda.current_stream(x.device)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(caller)  # in order with the caller's stream, and blocks until the bytes are here

    def finish() -> torch.Tensor:
        with torch.cuda.stream(
            stream
        ):  # the call's stream, whichever thread waits; pinned memory lives until it is done
            caller.copy_(host, non_blocking=True)
        stream.synchronize()
        return x

    return Staged(_flat(host, name), name, finish)


def torch_dtype(x: torch.Tensor) -> str:
    """Returns the dtype, one of DTYPES, of a tensor with its own memory on its device. Raises `ArgumentError` for
    others."""
    name = NAMES.get(x.dtype)
    if name is None:
        mend = "Pass torch.view_as_real(x)." if x.is_complex() else "Cast it, e.g. x.to(torch.bfloat16)."
        refuse_dtype("torch tensor", str(x.dtype).removeprefix("torch."), mend)
    if x.layout is not torch.strided or _is_wrapper(x):
        _stage_odd(x, name, TypeError(f"layout {x.layout} on device {x.device}"))
    if x.device.type == "meta":
        refuse(
            "a torch tensor on device meta, which has no data", "Give it memory, e.g. module.to_empty(device='cpu')."
        )
    if may_overlap(x.shape, x.stride(), 1):
        refuse("an expanded torch tensor (several elements share one address)", "Pass x.contiguous().")
    return name


def _stage_odd(x: torch.Tensor, name: str, error: Exception) -> Staged:
    """Stages or refuses a CPU tensor that has no plain memory of its own."""
    if type(x) is torch.Tensor and x.layout is torch.strided and x.is_neg():
        return _stage_copy(x, name)  # a lazily negated view: the copy resolves it, the copy back negates it
    mend = "Pass a dense tensor of its values."
    if x.layout is not torch.strided:
        mend = "Pass x.to_dense(), or the dense x.values()."
    elif hasattr(x, "to_local"):
        mend = "Pass x.to_local()."
    refuse(f"a {type_name(x)} without plain memory ({first_line(error)})", mend, error)


def _flat(x: torch.Tensor, name: str) -> np.ndarray:
    """Returns contiguous host memory as (count,), without a copy."""
    flat: np.ndarray = (x.view(_CARRIED[name]) if name in _CARRIED else x).numpy().reshape(-1)
    return flat


def _is_wrapper(x: torch.Tensor) -> bool:
    """Whether `x` only looks like a tensor on its device (DTensor, FakeTensor, NestedTensor)."""
    return type(x) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(x, "__tensor_flatten__")
