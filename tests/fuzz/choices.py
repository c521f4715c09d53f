"""Bytes to choices, and choices to messages of the right types with senseless contents."""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.field_types import DIGEST, Digest
from ftcomm.control.views import Address, Addresses

T = TypeVar("T")

EDGES = (0, 1, 2, 3, 4, 5, 7, -1, -2, -(1 << 31), (1 << 31) - 1, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, (1 << 64) - 1)
WORDS = ("a0", "a1", "a2", "b0", "b1", "", "x" * 300, "\x00\n", "ü")  # the first are incarnations
ADDRESS = Address("127.0.0.1", 1, "boot", 1, 3, "0" * 32)
KINDS: tuple[type[m.Message], ...] = typing.get_args(m.AnyMessage)


class Choices:
    """Reads decisions off `data`; when that is used up, all are the first of what may be chosen."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def number(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.number() % len(choices)]

    def bytes(self) -> bytes:
        start = self._at
        self._at += 1 + self.number() % 8
        return self._data[start : self._at]


@functools.cache
def fields(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(typing.get_type_hints(kind, include_extras=True).items())


def value(choices: Choices, kind: Any, seen: Sequence[int], given: dict[str, Any]) -> Any:
    """Something of the type `kind`. `seen`: numbers that mean something at the moment (epochs, proposals).

    `given` names fields that are mostly as given, since nothing gets far with others.
    """
    if kind is Addresses:
        return Addresses.of((ADDRESS,) * choices.pick((1, 1, 1, 0, 2)))
    if kind is Address:
        return ADDRESS
    if kind == Digest:
        return choices.bytes().ljust(DIGEST, b"0")[:DIGEST]
    if typing.get_origin(kind) is typing.Annotated:
        return value(choices, typing.get_args(kind)[0], seen, given)
    if kind is bool:
        return choices.number() % 2 == 0
    if kind is int:
        if choices.number() % 16 == 15:
            return int.from_bytes(choices.bytes(), "big")
        return choices.pick((*seen, *EDGES[:5])) if choices.number() % 4 else choices.pick(EDGES)
    if kind is float:
        return choices.pick((0.0, 1.0, -1.0, float("inf"), float("nan")))
    if kind is str:
        return choices.pick(WORDS[:4]) if choices.number() % 4 else choices.pick(WORDS)
    if kind is bytes:
        return choices.bytes()
    if kind is type(None):
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return value(choices, choices.pick(arguments), seen, given)
    if origin is dict:
        return {value(choices, arguments[0], seen, given): value(choices, arguments[1], seen, given) for _ in range(2)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(value(choices, arguments[0], seen, given) for _ in range(choices.number() % 4))
    if origin is tuple:
        return tuple(value(choices, each, seen, given) for each in arguments)
    if issubclass(kind, enum.Enum):
        return choices.pick(tuple(kind))
    assert issubclass(kind, msgspec.Struct), f"no idea how to make up a {kind}"
    made = {
        name: given[name] if name in given and choices.number() % 8 else value(choices, hint, seen, given)
        for name, hint in fields(kind)
    }
    return kind(**made)


def message(choices: Choices, seen: Sequence[int], given: dict[str, Any]) -> m.AnyMessage | None:
    """A message as it comes off the wire, or None if what was made up is refused there."""
    try:
        made = value(choices, choices.pick(KINDS), seen, given)
        return m.decode(m.encode(made))
    except (ValueError, OverflowError, msgspec.DecodeError):  # of a malformed view, of a number beyond 64 bits
        return None
