"""PyTorch's tensors over our memory, whatever mode and defaults the user's thread has when they are made."""

from __future__ import annotations

import contextlib
import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

HostArray = Any  # a NumPy array, or what `Dtype.operand` makes of one


def torch_missing(dtype: str) -> str | None:
    """Imports torch, in which the host computes with 16 bits and less. Returns why it cannot reduce `dtype` without it,
    with the mend; None if it can."""
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return f"the host reduces {dtype} by torch, which is not installed. Type `pip install torch`, or pass float32."
    return None


def lasting() -> AbstractContextManager[object]:
    """Returns a context in which to make tensors that are kept. Those made under torch.inference_mode() could not be
    changed outside of it."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.inference_mode(False)


def scratch(*shape: int, dtype: str = "float32") -> Any:
    """Memory to be kept, with anything in it."""
    import torch

    with lasting():
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")


def unlocked(array: HostArray) -> HostArray:
    """The same memory, not marked read-only: torch warns about tensors over read-only memory, and we only read."""
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(_Exported(interface, array))


class _Exported:
    def __init__(self, interface: dict[str, Any], keep: HostArray) -> None:
        self.__array_interface__ = interface
        self._keep = keep
