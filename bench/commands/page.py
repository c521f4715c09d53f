"""`ftcomm bench page` as a command."""

from __future__ import annotations

from pathlib import Path

import click

from ftcomm.errors import SettingsError

FOLDER = click.Path(file_okay=False, exists=True, path_type=Path)


@click.command()
@click.option("--results", type=FOLDER, help="Of JSON files named DATE-KIND-cpu.json.  [default: the bench's own]")
@click.option("--docs", type=FOLDER, default=Path("docs"), show_default=True, help="Where performance.md goes.")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is not what the results say.")
def page(*, results: Path | None, docs: Path, check: bool) -> None:
    """Make docs/performance.md, and its pictures, from the results that are kept."""
    from ftcomm.bench.commands.options import require
    from ftcomm.bench.page import RESULTS, load, pictures, render

    found = load(results or RESULTS)
    text = render(found)
    path = docs / "performance.md"
    if check:
        if not path.exists() or path.read_text() != text:
            raise SettingsError(f"{path} is not what the results say; make it again with: ftcomm bench page")
        return
    require("matplotlib", "bench")
    path.write_text(text)
    for file in (path, *pictures(found, docs)):
        click.echo(file)
