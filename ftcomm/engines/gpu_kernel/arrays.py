"""Turns whatever array the caller has into one flat run of GPU memory that kernels work on, and back.

    plain torch tensor, CuPy or other DLPack array there   the caller's own memory, nothing to do afterwards
    strided, permuted                                      a private copy there, copied back
    arrays of the host, JAX                                a copy there by way of `ftcomm.arrays.stage`, copied back

Everything is queued on the stream that is current in PyTorch, which the op follows. `finish` is to be called when the
current stream waits for the op; it queues the copy back on it, and blocks for arrays of the host only.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ftcomm.arrays import DTYPES, Staged, may_overlap, refuse, stage
from ftcomm.arrays.flat import Flat, to_read, to_write
from ftcomm.arrays.tensors import torch_dtype
from ftcomm.kernels.dtypes import BYTES, CODES

_CUDA = 2  # DLPack


def stage_device(x: Any, device: torch.device) -> Staged:
    """`flat` (count,) is a torch tensor on `device`; bool comes as uint8. `ArgumentError` before anything is exchanged.

    Thread-safe. Does not wait for the GPU, but for arrays of the host.
    """
    if isinstance(x, torch.Tensor):
        if x.device.type == device.type or x.device.type not in ("cpu", "cuda"):
            return _stage_tensor(x, device)
    elif type(x).__module__.partition(".")[0] == "cupy" and hasattr(x, "__dlpack__"):
        return _stage_cupy(x, device)
    elif not _is_jax(x) and hasattr(x, "__dlpack_device__") and _dlpack_device(x) == _CUDA:
        staged = _stage_tensor(_from_dlpack(x), device)
        return _answering(staged, x)
    return _stage_host(x, device)


def stage_bytes(x: Any, device: torch.device, *, writes: bool) -> Flat:
    """The same of an array of any dtype, as bytes: for what only moves. Without `writes` it stays as it is."""
    if isinstance(x, torch.Tensor) and x.device.type == device.type:
        return _tensor_bytes(x, device, writes)
    if type(x).__module__.partition(".")[0] == "cupy" and str(x.dtype) in DTYPES:
        staged = _stage_cupy(x, device)
        return Flat(staged.flat.view(torch.uint8), staged.dtype, x.size, x.dtype.itemsize, staged.finish)
    host = to_write(x) if writes else to_read(x)
    memory = torch.from_numpy(host.flat)
    there: Any = torch.empty(memory.shape, dtype=torch.uint8, device=device)
    there.copy_(memory)

    def finish() -> Any:
        memory.copy_(there)
        return x if host.finish is None else host.finish()

    return Flat(there, host.dtype, host.count, host.size, finish)


def _tensor_bytes(x: torch.Tensor, device: torch.device, writes: bool) -> Flat:
    if x.layout is not torch.strided or x.is_quantized:
        refuse(f"a torch tensor of layout {x.layout}, dtype {x.dtype}", "Pass a dense tensor of its values.")
    _check_device(x, device)
    caller = x.detach()
    private = caller.resolve_conj().resolve_neg().contiguous()
    flat: Any = private.reshape(-1).view(torch.uint8)

    def finish() -> torch.Tensor:
        caller.copy_(private)
        return x

    name = str(x.dtype).removeprefix("torch.")
    back = finish if writes and private.data_ptr() != caller.data_ptr() else None
    return Flat(flat, name if name in CODES else BYTES, x.numel(), x.element_size(), back)


def _check_device(x: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        refuse(
            f"a torch tensor on {x.device} in a rank whose GPU is {device}",
            f"Call torch.cuda.set_device() before ftcomm.init(), or move the tensor: x.to('{device}').",
        )


def _stage_tensor(x: torch.Tensor, device: torch.device) -> Staged:
    name = torch_dtype(x)
    _check_device(x, device)
    caller = x.detach()
    if caller.is_contiguous() and not caller.is_neg():  # a lazily negated view has other bits than it says
        return Staged(_flat(caller), name)
    private = torch.empty(caller.shape, dtype=caller.dtype, device=device)
    private.copy_(caller)

    def finish() -> torch.Tensor:
        caller.copy_(private)
        return x

    return Staged(_flat(private), name, finish)


def _stage_cupy(x: Any, device: torch.device) -> Staged:
    """Stage a CuPy array in the order of CuPy's current stream, before the op and behind it."""
    if may_overlap(x.shape, x.strides, x.itemsize):
        refuse("a broadcast CuPy array (several elements share one address)", "Pass x.copy().")
    cupy = sys.modules[type(x).__module__.partition(".")[0]]
    with x.device:
        private = x if x.flags.c_contiguous else cupy.ascontiguousarray(x)
        boolean = x.dtype.kind == "b"
        staged = _stage_tensor(_from_dlpack(private.view("uint8") if boolean else private), device)

    def finish() -> Any:
        with x.device:
            stream, done = cupy.cuda.get_current_stream(), torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
            cupy.cuda.runtime.streamWaitEvent(stream.ptr, done.cuda_event)
            if private is not x:
                x[...] = private
        return x

    return Staged(staged.flat, "bool" if boolean else staged.dtype, finish)


def _from_dlpack(x: Any) -> torch.Tensor:
    """Shares its memory; PyTorch's current stream waits for that of its library."""
    try:
        return torch.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        refuse(f"an array that PyTorch cannot read ({error})", "Pass a contiguous one of a supported dtype.", error)


def _stage_host(x: Any, device: torch.device) -> Staged:
    host = stage(x)
    memory = torch.from_numpy(host.flat)
    there = torch.empty(memory.shape, dtype=memory.dtype, device=device)
    there.copy_(memory)

    def finish() -> Any:
        memory.copy_(there)
        return x if host.finish is None else host.finish()

    flat = there.view(torch.bfloat16) if host.dtype == "bfloat16" else _flat(there)
    return Staged(flat, host.dtype, finish)


def _answering(staged: Staged, x: Any) -> Staged:
    """Returns `staged` for a caller who has to get `x` back."""
    write = staged.finish

    def finish() -> Any:
        if write is not None:
            write()
        return x

    return Staged(staged.flat, staged.dtype, finish)


def _flat(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1)
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def _dlpack_device(x: Any) -> int:
    kind, _ = x.__dlpack_device__()
    return int(kind)


def _is_jax(x: Any) -> bool:
    """A JAX array must not be written to, and its library makes the new one from host memory."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)
