"""Turns what can change into values: hashable, and made live again at will.

Every attribute of an object of the product that is not left out by name is part of its value, so one that is added
tomorrow is saved too, and one of a kind that cannot be saved is an error, never a state that is quietly taken for
another. Where objects know each other (`References`), an attribute is plain data, which is saved, or a reference, which
must stay what it was.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from ftcomm.control.timeouts import Timeouts
from ftcomm.simulation.memory import TinyMemory
from ftcomm.transport.segment import SLOTS, descriptor

_WORDS = descriptor(SLOTS)  # the words of a memory up to here are in use
_ATOMS = frozenset((int, str, bool, type(None), bytes, float))
_IMMUTABLE = (tuple, frozenset, enum.Enum, msgspec.Struct, Timeouts, FunctionType)


class _Frozen(tuple[Any, ...]):
    """The hashable form of a value that can change: its kind, and its content."""


class _Again(int):
    """The hashable form of an object of the product that was met before: which one it was."""


_MADE_AGAIN = frozenset((_Frozen, _Again))  # all else is what it stands for


def freeze(value: Any) -> Hashable:
    """Returns `value` as a hashable, equal for equal values, whatever the identities. Objects of the product that refer
    to one and the same object will do so again."""
    return _freeze(value, {})


def _freeze(value: Any, met: dict[int, _Again]) -> Hashable:
    kind = type(value)
    if kind is list or kind is deque:
        return _Frozen((kind, tuple([one if type(one) in _ATOMS else _freeze(one, met) for one in value])))
    if kind is set:
        return _Frozen((set, frozenset(value)))
    if kind is dict:
        return _Frozen((dict, _freeze_items(value, met)))
    if kind in _ATOMS or isinstance(value, _IMMUTABLE):
        same: Hashable = value  # immutable all the way down; if not, its hash fails
        return same
    if kind is np.ndarray:
        return _Frozen((np.ndarray, (value.dtype.str, value.tobytes())))
    if isinstance(value, BaseException):
        return _Frozen((BaseException, (kind, value.args)))
    if kind.__module__.startswith("ftcomm.") and hasattr(value, "__dict__"):
        if id(value) in met:
            return met[id(value)]
        met[id(value)] = _Again(len(met))
        return _Frozen((object, (kind, _freeze_items(value.__dict__, met))))
    raise TypeError(f"the exhaustive check cannot save {value!r} of {kind}; teach ftcomm/simulation/states.py to")


def _freeze_items(of: dict[Any, Any], met: dict[int, _Again]) -> tuple[tuple[Any, Hashable], ...]:
    return tuple([(key, one if type(one := of[key]) in _ATOMS else _freeze(one, met)) for key in sorted(of)])


def thaw(frozen: Any) -> Any:
    return _thaw(frozen, [])


def _thaw(frozen: Any, made: list[object]) -> Any:
    if type(frozen) is _Again:
        return made[frozen]
    if type(frozen) is not _Frozen:
        return frozen
    kind, content = frozen
    if kind is list or kind is deque:
        return kind([_thaw(one, made) if type(one) in _MADE_AGAIN else one for one in content])
    if kind is set:
        return set(content)
    if kind is dict:
        return {key: _thaw(one, made) if type(one) in _MADE_AGAIN else one for key, one in content}
    if kind is np.ndarray:
        return np.frombuffer(content[1], content[0]).copy()
    if kind is BaseException:
        return content[0](*content[1])
    value = object.__new__(content[0])
    made.append(value)
    value.__dict__.update([(key, _thaw(one, made) if type(one) in _MADE_AGAIN else one) for key, one in content[1]])
    return value


_PLAIN = _ATOMS | {np.ndarray}
_CONTAINERS = frozenset((frozenset, list, deque, set))
_VALUES = (BaseException, enum.Enum, msgspec.Struct)
_ABSENT = object()


def is_plain(value: Any) -> bool:
    """Whether it is data all the way down, and no object that others know."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is dict:
        return all(map(is_plain, value.values()))
    if kind in _CONTAINERS or isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, _VALUES)


class References:
    """Saves the plain data of objects, and sees to it that all else that they refer to stays what it was."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

    def save(self, of: Any, without: Iterable[str] = ()) -> Hashable:
        """Raises `TypeError` if a reference has changed that is not among those to do `without`."""
        known = self._known.setdefault(of, {})
        plain, kind = [], type(of)
        for name, value in vars(of).items():
            if name in without or known.get(name, _ABSENT) is value:
                continue
            if type(value) in _ATOMS:
                if getattr(kind, name, _ABSENT) is not value:  # else it is as its class says
                    plain.append((name, value))
            elif is_plain(value):
                if getattr(kind, name, _ABSENT) is not value:
                    plain.append((name, freeze(value)))
            elif known.setdefault(name, value) is not value:
                raise TypeError(f"{kind.__name__}.{name} refers to something else than before, and is no plain data")
        plain.sort()
        return tuple(plain)

    def load(self, of: Any, saved: Any, without: Iterable[str] = ()) -> None:
        """Arrays stay where they are, as others may know them."""
        here, there, references = vars(of), dict(saved), self._known.get(of, {})
        for name in [name for name in here if name not in without and name not in there and name not in references]:
            del here[name]  # it is as its class says
        for name, value in there.items():
            if type(value) is not _Frozen:
                here[name] = value
                continue
            known, again = here.get(name), thaw(value)
            if isinstance(known, np.ndarray) and isinstance(again, np.ndarray) and known.shape == again.shape:
                known[...] = again
            else:
                here[name] = again


def save_memory(memory: TinyMemory) -> Hashable:
    if any(memory.words[_WORDS:]):
        raise TypeError("a word beyond the descriptors is in use; teach ftcomm/simulation/states.py to save it")
    return (tuple(memory.words[:_WORDS]), memory.buffer.tobytes())


def load_memory(memory: TinyMemory, saved: Any) -> None:
    memory.words[:_WORDS], memory.buffer[:] = saved
