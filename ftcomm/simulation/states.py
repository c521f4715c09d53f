"""What can change as values: hashable, and made live again at will.

Every attribute of an object of the product that is not named as constant is part of its value, so one that is added
tomorrow is saved too, and one of a kind that cannot be saved is an error, never a state that is quietly taken for
another.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Set
from types import FunctionType
from typing import Any

import msgspec
import numpy as np

from ftcomm.control.timeouts import Timeouts
from ftcomm.simulation.memory import TinyMemory
from ftcomm.transport.segment import SLOTS, descriptor

_WORDS = descriptor(SLOTS)  # the words of a memory up to here are in use
_ATOMS = frozenset((int, str, bool, type(None), bytes, float, FunctionType))


class _Frozen(tuple[Any, ...]):
    """(kind, content) of something that can change."""


def freeze(value: Any) -> Hashable:
    """`value` as a hashable. Equal for equal values, whatever the identities."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, tuple | frozenset | enum.Enum | msgspec.Struct | Timeouts):
        same: Hashable = value  # immutable all the way down; if not, its hash fails
        return same
    if kind is list or kind is deque:
        return _Frozen((kind, tuple(map(freeze, value))))
    if kind is set:
        return _Frozen((set, frozenset(value)))
    if kind is dict:
        return _Frozen((dict, tuple((key, freeze(value[key])) for key in sorted(value))))
    if kind is np.ndarray:
        return _Frozen((np.ndarray, (value.dtype.str, value.tobytes())))
    if isinstance(value, BaseException):
        return _Frozen((BaseException, (kind, value.args)))
    if kind.__module__.startswith("ftcomm.") and hasattr(value, "__dict__"):
        return _Frozen((object, (kind, attributes(value, set()))))
    raise TypeError(f"the exhaustive check cannot save {value!r} of {kind}; teach ftcomm/simulation/states.py to")


def thaw(frozen: Any) -> Any:
    if type(frozen) is not _Frozen:
        return frozen
    kind, content = frozen
    if kind is list or kind is deque:
        return kind(map(thaw, content))
    if kind is set:
        return set(content)
    if kind is dict:
        return {key: thaw(value) for key, value in content}
    if kind is np.ndarray:
        return np.frombuffer(content[1], content[0]).copy()
    if kind is BaseException:
        return content[0](*content[1])
    value = object.__new__(content[0])
    value.__dict__.update((key, thaw(one)) for key, one in content[1])
    return value


def attributes(value: object, constant: Set[str]) -> tuple[tuple[str, Hashable], ...]:
    attributes = value.__dict__
    return tuple((name, freeze(attributes[name])) for name in sorted(attributes) if name not in constant)


def save_memory(memory: TinyMemory) -> Hashable:
    if any(memory.words[_WORDS:]):
        raise TypeError("a word beyond the descriptors is in use; teach ftcomm/simulation/states.py to save it")
    return (tuple(memory.words[:_WORDS]), memory._bytes.tobytes())


def load_memory(memory: TinyMemory, saved: Any) -> None:
    memory.words[:_WORDS], content = saved
    memory._bytes[:] = np.frombuffer(content, np.uint8)
