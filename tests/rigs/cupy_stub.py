"""A stand-in for CuPy whose arrays lie on the host: the part of its API that ftcomm uses, for tests without a GPU."""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class ndarray:
    """An array that, as CuPy's, gives its values by `get` alone, and takes those of its own kind alone."""

    __module__ = "cupy"

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self._host = host
        self.device = contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name not in ("dtype", "shape", "strides", "itemsize", "flags", "size", "ndim"):
            raise AttributeError(name)
        return getattr(self._host, name)

    def __array__(self, *_: object, **__: object) -> None:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def get(self, order: str = "C") -> np.ndarray[Any, Any]:
        return np.array(self._host, order=order)  # type: ignore[call-overload, no-any-return]

    def __setitem__(self, key: Any, value: ndarray) -> None:
        self._host[key] = value._host


class Stream(contextlib.nullcontext[None]):
    def synchronize(self) -> None:
        """Everything is done at once."""


def module() -> ModuleType:
    """What `import cupy` would give."""
    made = ModuleType("cupy")
    made.ndarray = ndarray  # type: ignore[attr-defined]
    made.array = lambda values, dtype: ndarray(np.array(values, dtype))  # type: ignore[attr-defined]
    made.asarray = lambda host: ndarray(np.array(host))  # type: ignore[attr-defined]
    made.cuda = SimpleNamespace(get_current_stream=Stream)  # type: ignore[attr-defined]
    return made
