"""What the commands of the bench have in common: options and their kinds, files that are written however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import click

from ftcomm.bench.sizes import parse_size
from ftcomm.errors import SettingsError
from ftcomm.settings import TRANSPORTS


class SizeType(click.ParamType):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except SettingsError as error:
            self.fail(str(error), param, ctx)


class ListType(click.ParamType):
    """Values of one kind with commas between them."""

    def __init__(self, kind: click.ParamType, name: str) -> None:
        self.kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self.kind.convert(part.strip(), param, ctx) for part in str(value).split(","))


SIZE = SizeType()
json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write header and rows to this file."
)
csv_option = click.option(
    "--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this file."
)
plot_option = click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw it, as PNG and as SVG."
)
transport_option = click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
    help="Of ftcomm.",
)


def require(module: str, extra: str) -> None:
    """Raises `SettingsError`, with the mend, where a library of an extra is not installed."""
    if importlib.util.find_spec(module) is None:
        raise SettingsError(f"this needs {module}; install it with: pip install 'ftcomm[{extra}]'")


def run(measurement: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(measurement)
    except KeyboardInterrupt:  # all processes are gone by now
        raise click.exceptions.Exit(130) from None


@contextlib.contextmanager
def written(path: Path | None, result: dict[str, Any]) -> Iterator[None]:
    """Write the JSON however the block ends: what was measured before Ctrl-C or a crash is worth keeping."""
    if path is None:
        yield
        return
    with written_with("--json", path, lambda: result):
        yield


@contextlib.contextmanager
def written_with(option: str, path: Path, result: Callable[[], Any]) -> Iterator[None]:
    """Likewise, what `result` says then."""
    _touch(option, path)
    try:
        yield
    finally:
        write(path, result())


def write(path: Path, result: Any) -> None:
    import msgspec

    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


@contextlib.contextmanager
def written_csv(path: Path | None, rows: list[Any]) -> Iterator[None]:
    """The rows, structs of one kind, a line each; likewise."""
    import csv

    if path is None:
        yield
        return
    _touch("--csv", path)
    try:
        yield
    finally:
        names = rows[0].__struct_fields__ if rows else ()
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows([getattr(row, name) for name in names] for row in rows)


def _touch(option: str, path: Path) -> None:
    """Find out before anything is measured."""
    try:
        path.touch()
    except OSError as error:
        raise SettingsError(f"{option} {path}: {error.strerror}; choose a file that you can write to.") from None
