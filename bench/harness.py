"""Runs an experiment: says what it declares, and does everything that follows from it.

An experiment is one file with one `Experiment` in it. Its request is a frozen dataclass whose fields are the options
of the command (`option`), checked by `check` and made small by `smoke`; its docstring is the help text. `measure` is
given the request and a `BenchReport`, to which it adds records as they are measured. From these follow the click
command, the progress bar, the header, the tables on the terminal, the JSON, the CSV, the picture and the exit code:

    request -> check -> measure -> records -> tables, JSON (header, request, records, summary), CSV, picture -> verdict
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import dataclasses
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from ftcomm.bench.header import device_fields, device_lines, header, header_lines
from ftcomm.bench.plots import check_plot
from ftcomm.bench.progress import ProgressBar
from ftcomm.bench.sizes import format_size, parse_size
from ftcomm.errors import SettingsError
from ftcomm.launch.commands.option_types import Parsed, Several

# -- options -----------------------------------------------------------------------------------------------------------


SIZE = Parsed("SIZE", parse_size, format_size)
SIZES = Several(SIZE, "SIZE,...")
INTS = Several(click.INT, "N,...")
FILE = click.Path(dir_okay=False, path_type=Path)


def option(default: Any, *names: str, kind: click.ParamType | None = None, help: str = "", show: str = "") -> Any:
    """A field of a `Request` that is an option of the command. Without `names` it is called like the field, without
    `kind` it is of the type of `default`. `show`: the default as the help says it, if not as it would be typed."""
    return dataclasses.field(default=default, metadata={"option": (names, kind, help, show)})


def click_options(request: type) -> list[Callable[[Any], Any]]:
    found = []
    for field in dataclasses.fields(request):
        if "option" not in field.metadata:
            continue
        names, kind, help, show = field.metadata["option"]
        names = names or (f"--{field.name.replace('_', '-')}",)
        if field.default is False:
            found.append(click.option(*names, field.name, is_flag=True, help=help))
            continue
        if not show and field.default not in (None, ()):
            show = getattr(kind, "show", str)(field.default)
        help += f"  [default: {show}]" if show else ""
        kind = kind or type(field.default)
        found.append(click.option(*names, field.name, type=kind, default=field.default, help=help.strip()))
    return found


# -- tables ------------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    name: str
    unit: str
    width: int  # negative: to the left
    text: Callable[[Any], str]

    def align(self, text: str) -> str:
        return text.rjust(self.width) if self.width > 0 else text.ljust(-self.width)


class Table(NamedTuple):
    """The records of one kind: `key` is their name in the JSON, `columns` is how the terminal shows each."""

    key: str
    kind: type
    columns: Sequence[Column] = ()  # none: they are not shown as they come, or by `line`
    line: Callable[[Any], str] | None = None  # in place of columns
    late: bool = False  # its heading stands before its first record, not at the top

    def heading(self) -> list[str]:
        if not self.columns:
            return []
        names, units = [column.name for column in self.columns], [column.unit for column in self.columns]
        return [f"# {self._join(texts)}".rstrip() for texts in (names, units) if any(texts)]

    def lines(self, record: Any) -> list[str]:
        if self.line is not None:
            return [self.line(record)]
        return [f"  {self._join([column.text(record) for column in self.columns])}".rstrip()] if self.columns else []

    def _join(self, texts: Sequence[str]) -> str:
        return " ".join(column.align(text) for column, text in zip(self.columns, texts, strict=True))


def figure_text(value: float | None, none: str = "never") -> str:
    return none if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


# -- an experiment -----------------------------------------------------------------------------------------------------


class BenchReport:
    """Collects what was measured by now. Experiments add to it from one thread."""

    def __init__(
        self,
        experiment: Experiment,
        request: Any,
        fields: Mapping[str, Any],
        json_file: Path | None = None,
        speaks: bool = True,
    ) -> None:
        self.request, self.fields = request, fields
        self._json_file, self.speaks = json_file, speaks
        self.more: dict[str, Any] = {}  # further entries of the JSON
        self._experiment = experiment
        self._tables = {table.kind: table for table in experiment.tables}
        self._records: dict[str, list[Any]] = {table.key: [] for table in experiment.tables}
        self._bar = ProgressBar()

    def __getitem__(self, key: str) -> list[Any]:
        """The records under this key of the JSON; experiments that measure several at a time may sort them."""
        return self._records[key]

    def add(self, record: Any) -> None:
        """A record of one of the experiment's tables."""
        table = self._tables[type(record)]
        if table.late and not self._records[table.key]:
            self.line(*table.heading())
        self._records[table.key].append(record)
        self.line(*table.lines(record))

    def line(self, *texts: str) -> None:
        for text in texts if self.speaks else ():
            self._bar.line(text)

    def progress(self, text: str, share: float) -> None:
        self._bar.update(text, share)

    def save(self) -> None:
        """Write the JSON now, too: an experiment of hours may be killed."""
        if self._json_file is not None:
            write_json(self._json_file, self.json)

    @property
    def json(self) -> dict[str, Any]:
        summary = self._experiment.summary(self)
        return {"header": self.fields, "request": self.request, **self._records, **self.more, **summary}


def _nothing(report: BenchReport) -> Any:
    return {}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """`measure(request, report)` is a coroutine or a plain function.

    The others look at a report that is complete, or as complete as Ctrl-C left it: `summary` gives further entries of
    the JSON, `footer` the last lines, `good` whether the exit code is 0, `draw` writes the picture, if there is
    something to draw.
    """

    name: str
    request: type
    measure: Callable[[Any, BenchReport], Any]
    tables: Sequence[Table]
    csv: str = ""  # the key of the records that --csv writes
    summary: Callable[[BenchReport], dict[str, Any]] = _nothing
    heading: Callable[[Any], list[str]] = lambda request: []  # more lines under the header
    footer: Callable[[BenchReport], list[str]] = lambda report: []
    good: Callable[[BenchReport], bool] = lambda report: True
    draw: Callable[[BenchReport, Path], object] | None = None
    on_device: Callable[[Any], bool] = lambda request: False  # the header names the GPU
    speaks: Callable[[], bool] = lambda: True  # this process prints and writes files, and not another that measures too

    def command(self) -> click.Command:
        options = click_options(self.request)
        options.append(click.option("--json", "json_file", type=FILE, help="Write header and records to this file."))
        if self.csv:
            options.append(click.option("--csv", "csv_file", type=FILE, help="Write the rows to this file."))
        if self.draw is not None:
            options.append(click.option("--plot", "plot_file", type=FILE, help="Draw it, as PNG and as SVG."))
        if hasattr(self.request, "smoke"):
            help = inspect.getdoc(self.request.smoke)
            options.append(click.option("--smoke", is_flag=True, help=help))

        def body(
            json_file: Path | None,
            csv_file: Path | None = None,
            plot_file: Path | None = None,
            smoke: bool = False,
            **options: Any,
        ) -> None:
            request = self.request(**options)
            self.run(request.smoke() if smoke else request, json_file, csv_file, plot_file)

        body.__doc__ = inspect.getdoc(self.request)
        for each in reversed(options):
            body = each(body)
        return click.command(self.name)(body)

    def run(
        self, request: Any, json_file: Path | None = None, csv_file: Path | None = None, plot_file: Path | None = None
    ) -> None:
        request.check()
        check_plot(plot_file)
        speaks, on_device = self.speaks(), self.on_device(request)
        if not speaks:
            json_file = csv_file = plot_file = None
        report = BenchReport(self, request, {**header(), **(device_fields() if on_device else {})}, json_file, speaks)
        with (
            written_at_the_end("--json", json_file, lambda path: report.save()),
            written_at_the_end("--csv", csv_file, lambda path: write_csv(path, report[self.csv])),
            report._bar,
        ):
            report.line(*header_lines(report.fields), *(device_lines(report.fields) if on_device else ()))
            report.line(*self.heading(request))
            report.line(*(text for table in self.tables if not table.late for text in table.heading()))
            try:
                measured = self.measure(request, report)
                if inspect.isawaitable(measured):
                    asyncio.run(measured)
            except KeyboardInterrupt:  # all processes are gone by now
                raise click.exceptions.Exit(130) from None
            finally:
                if plot_file is not None and self.draw is not None:
                    self.draw(report, plot_file)
        for text in self.footer(report) if speaks else ():
            click.echo(text)
        if not self.good(report):
            raise click.exceptions.Exit(1)


# -- files -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def written_at_the_end(option: str, path: Path | None, write: Callable[[Path], None]) -> Iterator[None]:
    """Writes what was measured, however the block ends: what was measured before Ctrl-C or a crash is worth keeping. A
    path that cannot be written is found out before anything is measured."""
    if path is None:
        yield
        return
    try:
        path.touch()
    except OSError as error:
        raise SettingsError(f"{option} {path}: {error.strerror}; choose a file that you can write to.") from None
    try:
        yield
    finally:
        try:
            write(path)
        except OSError as error:
            raise SettingsError(
                f"{option} {path} is not complete: {error.strerror}; make room and measure again"
            ) from error


def write_json(path: Path, result: Any) -> None:
    """All of it, or, if that fails, what was there before."""
    written = msgspec.json.format(msgspec.json.encode(result, enc_hook=str)) + b"\n"
    if not path.is_file():  # a pipe, say
        path.write_bytes(written)
        return
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(written)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """The rows, structs of one kind, a line each."""
    names = rows[0].__struct_fields__ if rows else ()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def require(module: str, extra: str) -> None:
    """Raise `SettingsError`, with the mend, where a library of an extra is not installed."""
    if importlib.util.find_spec(module) is None:
        raise SettingsError(f"this needs {module}; install it with: pip install 'ftcomm[{extra}]'")
