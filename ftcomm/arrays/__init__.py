"""Turns any array of a caller into one flat run of host memory that an all-reduce works on, and back.

    plain CPU torch tensor, NumPy array       the caller's own memory, nothing to do afterwards
    strided, permuted, byte-shifted           a private copy; copied back into the caller's array
    torch CUDA tensor, CuPy array             a host copy; copied back into the caller's array
    JAX array, other immutable array          a host copy; a new array of the same type on the same device

Dense but permuted memory (channels_last, Fortran order) is copied too: it could be reduced in memory order only if all
ranks had the same strides, which is not known here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from ftcomm.errors import ArgumentError

DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)

# NumPy has no type for these, so integers hold them.
CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

_CARRIED = {name: getattr(torch, carrier) for name, carrier in CARRIERS.items()}
_TORCH_NAMES = {getattr(torch, name): name for name in DTYPES}
# Keyed by type number, since the name of a NumPy dtype costs more than all the rest. `long` and `long long` share one.
_NUMPY_NAMES = {np.dtype(c).num: np.dtype(c).name for c in "?bBhHiIlLqQefd"}
_HOST_DEVICES = (1, 3, 11)  # DLPack: CPU, CUDA pinned host, ROCm pinned host


@dataclasses.dataclass(slots=True)
class Staged:
    """`flat` (count,) is what an op reduces in place; bfloat16 and fp8 come as unsigned integers, see `dtype`.

    With `finish` None `flat` is the caller's memory. Else `finish()` is to be called once, after the op, by the thread
    that waits for it: it writes the result where the caller expects it and returns what the all-reduce returns. It
    blocks for the copy.
    """

    flat: np.ndarray  # (count,) contiguous, aligned, writable, native byte order
    dtype: str  # one of DTYPES
    finish: Callable[[], Any] | None = None


def stage(x: Any) -> Staged:
    """Returns the memory of `x` as one flat host array, or raises `ArgumentError`, before anything is exchanged.

    Thread-safe. A device array is copied to the host before this returns: it blocks until the work queued on the
    current stream is done. Autograd does not see what happens to a tensor that requires grad, as in torch.distributed.
    """
    if isinstance(x, torch.Tensor):
        return _stage_torch(x)
    if isinstance(x, np.ndarray):
        return _stage_numpy(x)
    if type(x).__module__.partition(".")[0] == "cupy" and hasattr(x, "get"):
        return _stage_cupy(x)
    jax = sys.modules.get("jax")  # a holder of a JAX array has imported it
    if jax is not None and isinstance(x, jax.Array):
        return _stage_jax(jax, x)
    if not isinstance(x, np.generic) and hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _stage_dlpack(x)
    scalar = isinstance(x, (bool, int, float, complex, np.generic))
    array = "torch.tensor([value])" if scalar else "torch.tensor(values) or np.array(values)"
    refuse(
        f"a value of type {_type_name(x)}; it has to be an array",
        f"Put the values into one, e.g. {array}, and reduce that.",
    )


# ---- torch --------------------------------------------------------------------------------------------------------


def _stage_torch(x: torch.Tensor) -> Staged:
    name = _TORCH_NAMES.get(x.dtype)
    if name is None or not x.is_cpu:
        return _stage_torch_elsewhere(x)
    plain = x.detach() if x.requires_grad else x
    try:
        host = (plain.view(_CARRIED[name]) if name in _CARRIED else plain).numpy()
    except (RuntimeError, TypeError) as error:
        return _stage_torch_odd(x, name, error)
    if not host.flags.carray:  # contiguous, aligned, writable
        return _stage_torch_copy(x, name)
    if x.data_ptr() == 0 and x.numel():
        refuse("a torch tensor whose storage was freed", "Allocate it again before the call.")
    return Staged(host if host.ndim == 1 else host.reshape(-1), name)


def _stage_torch_copy(x: torch.Tensor, name: str) -> Staged:
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

    return Staged(_torch_flat(private, name), name, finish)


def _stage_torch_elsewhere(x: torch.Tensor) -> Staged:
    """Stages a dtype or a device that is not the plain case: CUDA through pinned memory, all else is an error."""
    name = torch_dtype(x)
    if x.device.type != "cuda":
        refuse(
            f"a torch tensor on device {x.device}",
            "ftcomm serves cpu and cuda: reduce x.cpu() and copy the result back.",
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

    return Staged(_torch_flat(host, name), name, finish)


def torch_dtype(x: torch.Tensor) -> str:
    """Returns the dtype, one of DTYPES, of a tensor with its own memory on its device. Raises `ArgumentError` for
    others."""
    name = _TORCH_NAMES.get(x.dtype)
    if name is None:
        mend = "Pass torch.view_as_real(x)." if x.is_complex() else "Cast it, e.g. x.to(torch.bfloat16)."
        _refuse_dtype("torch tensor", str(x.dtype).removeprefix("torch."), mend)
    if x.layout is not torch.strided or _is_wrapper(x):
        _stage_torch_odd(x, name, TypeError(f"layout {x.layout} on device {x.device}"))
    if x.device.type == "meta":
        refuse(
            "a torch tensor on device meta, which has no data", "Give it memory, e.g. module.to_empty(device='cpu')."
        )
    if may_overlap(x.shape, x.stride(), 1):
        refuse("an expanded torch tensor (several elements share one address)", "Pass x.contiguous().")
    return name


def _stage_torch_odd(x: torch.Tensor, name: str, error: Exception) -> Staged:
    """Stages or refuses a CPU tensor that has no plain memory of its own."""
    if type(x) is torch.Tensor and x.layout is torch.strided and x.is_neg():
        return _stage_torch_copy(x, name)  # a lazily negated view: the copy resolves it, the copy back negates it
    mend = "Pass a dense tensor of its values."
    if x.layout is not torch.strided:
        mend = "Pass x.to_dense(), or the dense x.values()."
    elif hasattr(x, "to_local"):
        mend = "Pass x.to_local()."
    refuse(f"a {_type_name(x)} without plain memory ({_first_line(error)})", mend, error)


def _torch_flat(x: torch.Tensor, name: str) -> np.ndarray:
    """Returns contiguous host memory as (count,), without a copy."""
    flat: np.ndarray = (x.view(_CARRIED[name]) if name in _CARRIED else x).numpy().reshape(-1)
    return flat


def _is_wrapper(x: torch.Tensor) -> bool:
    """Whether `x` only looks like a tensor on its device (DTensor, FakeTensor, NestedTensor)."""
    return type(x) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(x, "__tensor_flatten__")


# ---- NumPy and what goes through it -------------------------------------------------------------------------------


def _stage_numpy(x: np.ndarray) -> Staged:
    dtype = x.dtype
    name = _NUMPY_NAMES.get(dtype.num)
    if name is not None and x.flags.carray and dtype.isnative and type(x) is np.ndarray:
        return Staged(x if x.ndim == 1 else x.reshape(-1), name)
    if isinstance(x, np.ma.MaskedArray):
        refuse("a masked NumPy array", "Pass x.filled(0), or x.data if the mask does not matter.")
    name = _numpy_name(dtype, "NumPy array")
    if not dtype.isnative:
        refuse(
            f"a NumPy array of dtype {dtype.str} (foreign byte order)",
            "Pass x.astype(x.dtype.newbyteorder('='), copy=True), and use that as the result.",
        )
    if not x.flags.writeable:
        refuse(
            "a NumPy array that is not writable, and the result is put in place",
            "Pass x.copy(), and use that as the result (a broadcast or frombuffer array is always read-only).",
        )
    caller = x.view(np.ndarray)  # np.matrix cannot be 1-D
    if caller.flags.carray:
        return Staged(_numpy_flat(caller, name), name, lambda: x)
    if may_overlap(caller.shape, caller.strides, caller.itemsize):
        refuse(
            f"a NumPy array of shape {x.shape} and strides {x.strides}: several elements share one address",
            "Pass x.copy(), and use that as the result.",
        )
    private = caller.copy(order="C")

    def finish() -> np.ndarray:
        np.copyto(caller, private)
        return x

    return Staged(_numpy_flat(private, name), name, finish)


def _stage_cupy(x: Any) -> Staged:
    name = _numpy_name(x.dtype, "CuPy array")
    if may_overlap(x.shape, x.strides, x.itemsize):
        refuse("a broadcast CuPy array (several elements share one address)", "Pass x.copy().")
    cupy = sys.modules[type(x).__module__.partition(".")[0]]
    with x.device:
        stream = cupy.cuda.get_current_stream()
        host = x.get(order="C")  # in order with the caller's stream, and blocks until the bytes are here

    def finish() -> Any:
        with x.device, stream:
            x[...] = cupy.asarray(host)
            stream.synchronize()
        return x

    return Staged(_numpy_flat(host, name), name, finish)


def _stage_jax(jax: Any, x: Any) -> Staged:
    if isinstance(x, jax.core.Tracer):
        refuse("a JAX array that is being traced", "Call it outside jit, grad and vmap, on the arrays they return.")
    if not x.is_fully_addressable:
        refuse("a JAX array with shards in other processes", "Reduce the arrays of x.addressable_shards.")
    if not isinstance(x.dtype, np.dtype):
        _refuse_dtype("JAX array", str(x.dtype), "Pass jax.random.key_data(x).")
    name = _numpy_name(x.dtype, "JAX array")
    if x.is_deleted():
        refuse("a JAX array that was deleted or donated", "Keep it: leave it out of donate_argnums.")
    sharding = x.sharding
    private = np.array(x, order="C")  # blocks until it is computed

    def finish() -> Any:
        return jax.device_put(private, sharding)

    return Staged(_numpy_flat(private, name), name, finish)


def _stage_dlpack(x: Any) -> Staged:
    """Stages an array of any other library: in place if its export is writable, else as a new array through
    `__array_namespace__`."""
    device = tuple(x.__dlpack_device__())
    if device[0] not in _HOST_DEVICES:
        refuse(
            f"a {_type_name(x)} on DLPack device {device}",
            "ftcomm serves torch, CuPy and JAX arrays on devices: pass torch.from_dlpack(x), which shares its memory.",
        )
    try:
        view = np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        refuse(
            f"a {_type_name(x)} that NumPy cannot read ({_first_line(error)})",
            "Pass torch.from_dlpack(x), which shares its memory, or np.asarray(x).",
            error,
        )
    if view.flags.writeable:
        staged = _stage_numpy(view)
        write = staged.finish

        def in_place() -> Any:
            if write is not None:
                write()
            return x

        return Staged(staged.flat, staged.dtype, in_place)
    if not hasattr(x, "__array_namespace__"):
        refuse(
            f"a {_type_name(x)}, which is read-only, and whose library does not say how to make a new one",
            "Pass np.array(x), and make an array of that as the result.",
        )
    namespace = x.__array_namespace__()
    name = _numpy_name(view.dtype, _type_name(x))
    private = view.copy(order="C")
    return Staged(_numpy_flat(private, name), name, lambda: namespace.from_dlpack(private))


def _numpy_flat(x: np.ndarray, name: str) -> np.ndarray:
    """Returns C-contiguous memory as (count,), without a copy."""
    return x.reshape(-1).view(CARRIERS[name]) if name in CARRIERS else x.reshape(-1)


def _numpy_name(dtype: np.dtype[Any], owner: str) -> str:
    name = _NUMPY_NAMES.get(dtype.num)
    if name is None and dtype.name in CARRIERS:  # from ml_dtypes; NumPy itself lacks it
        name = dtype.name
    if name is None:
        mend = f"Pass x.view(np.float{dtype.itemsize * 4})." if dtype.kind == "c" else "Cast it to one of these."
        _refuse_dtype(owner, dtype.name, mend)
    return name


# ---- helpers ------------------------------------------------------------------------------------------------------


def may_overlap(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Whether two elements may share an address. Exact for slices, permutations and broadcasts; True for harder cases.

    Each dimension, from the smallest stride up, has to step over all that lies within the ones before.
    """
    if 0 in shape:
        return False
    extent = item
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def _refuse_dtype(owner: str, dtype: str, mend: str) -> NoReturn:
    refuse(f"a {owner} of dtype {dtype}", f"Supported: {', '.join(DTYPES)}. {mend}")


def refuse(what: str, mend: str, cause: Exception | None = None) -> NoReturn:
    raise ArgumentError(f"cannot reduce {what}. {mend}") from cause


def _type_name(x: Any) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
