"""Types of options for several commands: values that a function parses, and values with commas between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from ftcomm.errors import SettingsError


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A value that `parse` reads, raising `SettingsError` in words, and `show` writes."""

    def __init__(self, name: str, parse: Callable[[str], Any], show: Callable[[Any], str] = str) -> None:
        self.name, self._parse, self.show = name, parse, show

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except SettingsError as error:
            self.fail(str(error), param, ctx)


class Several(click.ParamType):  # type: ignore[type-arg]
    """Values of one kind with commas between them; becomes a tuple without duplicates."""

    def __init__(self, kind: click.ParamType[Any], name: str) -> None:
        self.kind, self.name = kind, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        return tuple(dict.fromkeys(self.kind.convert(part.strip(), param, ctx) for part in value.split(",")))

    def show(self, values: Iterable[Any]) -> str:
        return ",".join(getattr(self.kind, "show", str)(value) for value in values)


def choices(*names: str) -> Several:
    return Several(click.Choice(names), f"[{','.join(names)}],...")
