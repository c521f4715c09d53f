"""Arrays, tensors, and dicts and lists of them, as entries of the state: what a script keeps outside of modules and
optimizers.

    params = {"w": np.zeros(1000), "b": np.zeros(10)}
    for step in ftcomm.steps(1000, {"params": params}):
        ...

An array or tensor is overwritten in place where it arrives, so every name that the script has for it stays good. Some
values cannot be overwritten: a number, an array of JAX, a tuple (also a named one, as those of optax), and a mapping
that cannot be changed. In the dict or list that holds it, such a value is replaced by one of the same class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from ftcomm.arrays import is_cupy, is_torch
from ftcomm.errors import StateError
from ftcomm.training.state import Stateful

_KINDS = (np.ndarray, MutableMapping, list)


class ValueEntry:
    """`value` as an entry with state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        _update(self.value, value)


def as_entry(name: str, value: Any) -> Stateful:
    """Returns `value` in a form that the state of a step loop can hold. Raises `StateError` if there is none."""
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        stateful: Stateful = value
        return stateful
    if isinstance(value, _KINDS) or is_torch(value) or is_cupy(value):
        return ValueEntry(value)
    raise StateError(
        f"the entry {name!r} of `state` is a {type(value).__module__}.{type(value).__qualname__}, which a replica that "
        "comes back cannot take over. Expected something with state_dict and load_state_dict, an array of NumPy or "
        "CuPy, a tensor, or a dict or list of these, which is updated in place (an array of JAX goes into a dict)."
    )


def _update(here: Any, there: Any) -> Any:
    """Make `here` hold what `there` holds, in place if possible; returns the holder."""
    if isinstance(here, np.ndarray) and isinstance(there, np.ndarray) and here.flags.writeable:
        np.copyto(here, there)
        return here
    if is_torch(here) and is_torch(there):
        here.detach().copy_(there)
        return here
    if is_cupy(here) and isinstance(there, np.ndarray):
        with here.device:
            here[...] = sys.modules["cupy"].asarray(there)
        return here
    if isinstance(here, MutableMapping) and isinstance(there, Mapping):
        for key in [key for key in here if key not in there]:
            del here[key]
        for key, value in there.items():
            here[key] = _update(here[key], value) if key in here else value
        return here
    if isinstance(here, list) and isinstance(there, list):
        here[:] = [_update(a, b) for a, b in zip(here, there)] + there[len(here) :]  # noqa: B905 (may have grown)
        return here
    if isinstance(here, tuple) and isinstance(there, tuple) and len(here) == len(there):
        values = [_update(a, b) for a, b in zip(here, there, strict=True)]
        make = getattr(type(here), "_make", type(here))  # of a named one
        return make(values)
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        made: Any = type(here)
        return made({key: _update(here[key], value) if key in here else value for key, value in there.items()})
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(here, jax.Array):
        return jax.device_put(there, here.sharding)
    return there
