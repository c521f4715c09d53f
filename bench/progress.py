"""A progress bar for people at a terminal; rows of the result go to standard output between two refreshes."""

from __future__ import annotations

from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressBar:
    """A bar on standard error while it is a terminal, nothing otherwise."""

    def __init__(self, first: str = "starting the ranks") -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,  # it runs on the cores that are measured
            redirect_stdout=False,  # rows belong to standard output, wherever that goes
            redirect_stderr=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(first, total=1.0)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, text: str, fraction: float) -> None:
        self._bar.update(self._task, description=text, completed=fraction)

    def line(self, text: str) -> None:
        """A line of the result: the bar makes room for it."""
        self._bar.stop()
        click.echo(text)
        self._bar.start()
