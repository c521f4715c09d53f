"""Turns any array of a caller into one flat run of host memory that an all-reduce works on, and back.

    plain CPU torch tensor, NumPy array       the caller's own memory, nothing to do afterwards
    strided, permuted, byte-shifted           a private copy; copied back into the caller's array
    torch CUDA tensor, CuPy array             a host copy; copied back into the caller's array
    JAX array, other immutable array          a host copy; a new array of the same type on the same device

No library is imported here but NumPy: who passes an array of another one has imported it. So a job of NumPy or JAX pays
nothing for torch, and runs without it.

Dense but permuted memory (channels_last, Fortran order) is copied too: it could be reduced in memory order only if all
ranks had the same strides, which is not known here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from ftcomm.errors import ArgumentError

DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)

# NumPy has no type for these, so integers hold them.
CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

# Keyed by type number, since the name of a NumPy dtype costs more than all the rest. `long` and `long long` share one.
_NUMPY_NAMES = {np.dtype(c).num: np.dtype(c).name for c in "?bBhHiIlLqQefd"}
_NATIVE = {np.dtype(c): np.dtype(c).name for c in "?bBhHiIlLqQefd"}  # those of them in the byte order of the host
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


STAGE_TORCH: dict[type, Callable[[Any], Staged]] = {}  # the classes of tensors that have come so far


def stage(x: Any) -> Staged:
    """Returns the memory of `x` as one flat host array, or raises `ArgumentError`, before anything is exchanged.

    Thread-safe. A device array is copied to the host before this returns: it blocks until the work queued on the
    current stream is done. Autograd does not see what happens to a tensor that requires grad, as in torch.distributed.
    """
    kind = type(x)
    if kind is np.ndarray:
        name = _NATIVE.get(x.dtype)
        if name is not None and x.flags.carray:
            return Staged(x if x.ndim == 1 else x.reshape(-1), name)
        return _stage_numpy(x)
    stage_torch = STAGE_TORCH.get(kind)
    return stage_torch(x) if stage_torch else _stage_other(x)


def is_torch(x: Any) -> bool:
    """Whether `x` is a tensor of torch, which is not imported here: a holder of such a tensor has imported it."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(x, tensor)


def is_cupy(x: Any) -> bool:
    """Whether `x` is an array of CuPy, which is not imported here either."""
    return type(x).__module__.partition(".")[0] == "cupy" and hasattr(x, "get")


def _stage_other(x: Any) -> Staged:
    if is_torch(x):
        from ftcomm.arrays.tensors import stage_tensor

        STAGE_TORCH[type(x)] = stage_tensor
        return stage_tensor(x)
    if isinstance(x, np.ndarray):
        return _stage_numpy(x)
    if is_cupy(x):
        return _stage_cupy(x)
    jax = sys.modules.get("jax")  # a holder of a JAX array has imported it
    if jax is not None and isinstance(x, jax.Array):
        return _stage_jax(jax, x)
    if not isinstance(x, np.generic) and hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _stage_dlpack(x)
    scalar = isinstance(x, (bool, int, float, complex, np.generic))
    array = "np.array([value])" if scalar else "np.array(values) or torch.tensor(values)"
    refuse(
        f"a value of type {type_name(x)}; it has to be an array",
        f"Put the values into one, e.g. {array}, and pass that.",
    )


# ---- NumPy and what goes through it -------------------------------------------------------------------------------


def _stage_numpy(x: np.ndarray) -> Staged:
    dtype = x.dtype
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
        mend = "Call it outside jit, grad and vmap, on the arrays they return; ftcomm.jax.allreduce works inside jit."
        refuse("a JAX array that is being traced", mend)
    if not x.is_fully_addressable:
        refuse("a JAX array with shards in other processes", "Pass the arrays of x.addressable_shards, one by one.")
    if not isinstance(x.dtype, np.dtype):
        refuse_dtype("JAX array", str(x.dtype), "Pass jax.random.key_data(x).")
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
            f"a {type_name(x)} on DLPack device {device}",
            "ftcomm serves torch, CuPy and JAX arrays on devices: pass torch.from_dlpack(x), which shares its memory.",
        )
    try:
        view = np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        refuse(
            f"a {type_name(x)} that NumPy cannot read ({first_line(error)})",
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
            f"a {type_name(x)}, which is read-only, and whose library does not say how to make a new one",
            "Pass np.array(x), and make an array of that as the result.",
        )
    namespace = x.__array_namespace__()
    name = _numpy_name(view.dtype, type_name(x))
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
        refuse_dtype(owner, dtype.name, mend)
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


def refuse_dtype(owner: str, dtype: str, mend: str) -> NoReturn:
    refuse(f"a {owner} of dtype {dtype}", f"What can be reduced: {', '.join(DTYPES)}. {mend}")


def refuse(what: str, mend: str, cause: Exception | None = None) -> NoReturn:
    raise ArgumentError(f"ftcomm cannot take {what}. {mend}") from cause


def type_name(x: Any) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
