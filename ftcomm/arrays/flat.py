"""Turns any array of a caller into its bytes on the host, for collectives that move data and look at no value.

It takes any dtype whose elements are plain bytes: those of `ftcomm.arrays`, and complex numbers, other 8-bit floats,
dates and structures.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ftcomm.arrays import DTYPES, is_torch, refuse, stage
from ftcomm.kernels.dtypes import BYTES, CODES

if TYPE_CHECKING:
    from torch import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """The bytes `flat` of `count` elements of `size` bytes each; `finish` is as in `ftcomm.arrays.Staged`."""

    flat: Bytes  # (count * size,) contiguous; writable, unless it is only read
    dtype: str  # a name of `kernels.dtypes.CODES`
    count: int
    size: int
    finish: Callable[[], Any] | None = None


NONE = Flat(np.empty(0, np.uint8), BYTES, 0, 1)


def plain(x: Any) -> Any:
    """Returns `x`, or a copy if it is an array that could not be changed in place, and need not be."""
    if is_torch(x):
        strided = x.layout is sys.modules["torch"].strided
        return x.detach().contiguous() if strided and not x.is_contiguous() else x
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        return x if x.flags.carray else np.array(x, order="C")
    return x


def to_read(x: Any) -> Flat:
    """Returns the bytes of `x`, which stays as it is. Copies all but plain memory of the host. Raises
    `ArgumentError`."""
    return dataclasses.replace(_flat(plain(x)), finish=None)


def to_write(x: Any) -> Flat:
    """Returns the bytes of `x`, which are changed in place; for an immutable array `finish` makes a new one. Raises
    `ArgumentError`."""
    return _flat(x)


def _flat(x: Any) -> Flat:
    if is_torch(x):
        from ftcomm.arrays.tensors import NAMES

        if x.dtype not in NAMES:
            return _odd_torch(x)
    elif isinstance(x, np.ndarray):
        if x.dtype.name not in DTYPES or not x.dtype.isnative:
            return _odd_numpy(x)
    elif hasattr(x, "dtype") and isinstance(x.dtype, np.dtype) and x.dtype.name not in DTYPES:
        return _odd_other(x)
    staged = stage(x)
    flat = staged.flat
    return Flat(flat.view(np.uint8), staged.dtype, flat.size, flat.itemsize, staged.finish)


def _odd_torch(x: Tensor) -> Flat:
    import torch

    if x.layout is not torch.strided or x.is_quantized:
        refuse(f"a torch tensor of layout {x.layout}, dtype {x.dtype}", "Pass a dense tensor of its values.")
    caller = x.detach()
    plain = caller.resolve_conj().resolve_neg().contiguous()
    staged = stage(plain.reshape(-1).view(torch.uint8))
    private = plain.data_ptr() != caller.data_ptr()

    def finish() -> Tensor:
        if staged.finish is not None:
            staged.finish()
        if private:
            caller.copy_(plain)
        return x

    name = str(x.dtype).removeprefix("torch.")
    changes = private or staged.finish is not None
    return Flat(staged.flat, name if name in CODES else BYTES, x.numel(), x.element_size(), finish if changes else None)


def _odd_numpy(x: np.ndarray[Any, Any]) -> Flat:
    if isinstance(x, np.ma.MaskedArray) or x.dtype.hasobject:
        refuse(f"a NumPy array of type {type(x).__name__} and dtype {x.dtype}", "Pass an array of plain values.")
    if not x.flags.writeable:
        refuse("a NumPy array that is not writable, and the result is put in place", "Pass x.copy(), and use that.")
    caller = x.view(np.ndarray)
    if caller.flags.carray or (caller.flags.c_contiguous and caller.flags.writeable):
        return _of_numpy(caller.reshape(-1).view(np.uint8), x.dtype, None)
    private = caller.copy(order="C")

    def finish() -> np.ndarray[Any, Any]:
        np.copyto(caller, private)
        return x

    return _of_numpy(private.reshape(-1).view(np.uint8), x.dtype, finish)


def _odd_other(x: Any) -> Flat:
    """Takes an array of CuPy or JAX whose dtype cannot be reduced."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array) and x.is_fully_addressable:
        private, sharding = np.array(x, order="C"), x.sharding
        flat = private.reshape(-1).view(np.uint8)
        return _of_numpy(flat, x.dtype, lambda: jax.device_put(private, sharding))
    if type(x).__module__.partition(".")[0] == "cupy" and x.flags.c_contiguous:
        staged = stage(x.reshape(-1).view(np.uint8))
        finish = staged.finish
        assert finish is not None

        def put() -> Any:
            finish()
            return x

        return _of_numpy(staged.flat, x.dtype, put)
    return refuse(f"a {type(x).__name__} of dtype {x.dtype}", "Pass a torch tensor or a NumPy array of its values.")


def _of_numpy(flat: Bytes, dtype: np.dtype[Any], finish: Callable[[], Any] | None) -> Flat:
    name = dtype.name if dtype.name in CODES and dtype.isnative else BYTES
    return Flat(flat, name, flat.size // dtype.itemsize, dtype.itemsize, finish)
