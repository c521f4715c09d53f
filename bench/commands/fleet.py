"""`ftcomm bench fleet` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftcomm.bench.commands.options import ListType, csv_option, json_option, plot_option, require, written, written_csv
from ftcomm.errors import SettingsError

if TYPE_CHECKING:
    from ftcomm.bench.fleet import Row

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--gpus",
    type=ListType(click.INT, "N,..."),
    default="1000,4000,16384,32768,65536,98304,131072",
    show_default=True,
    help="Sizes of the fleet.",
)
@click.option("--replicas", type=int, default=12, show_default=True, help="Into which it is divided.")
@click.option(
    "--failures",
    type=click.Choice(["paper", "paper-32k", "llama3"]),
    default="paper",
    show_default=True,
    help="How often a GPU fails.",
)
@click.option("--days", type=float, default=14.0, show_default=True, help="Of each history.")
@click.option("--seeds", type=int, default=20, show_default=True, help="Histories of each fleet.")
@click.option(
    "--checkpoint", type=float, default=0.0, help="Minutes between those of a restart.  [default: loses none]"
)
@click.option("--recovery", type=FILE, help="JSON of `bench recovery`.  [default: the newest in the bench's results]")
@click.option("--rejoin", type=FILE, help="JSON of `bench rejoin`.  [default: the newest in the bench's results]")
@json_option
@csv_option
@plot_option
def fleet(
    *,
    gpus: tuple[int, ...],
    replicas: int,
    failures: str,
    days: float,
    seeds: int,
    checkpoint: float,
    recovery: Path | None,
    rejoin: Path | None,
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Reckon the share of time that up to 100,000 GPUs and more train, by discrete events.

    First the two figures of the paper (FT-HSDP, arXiv 2602.00277) from its constants; exits with 1 if one is off by
    more than a point. Then, with failures at random: a restart of everything, the paper's FT-HSDP, the same without
    the defects that it names, ftcomm with what `bench recovery` and `bench rejoin` have measured, and ftcomm with all
    of its stalls tenfold. Every constant is printed with its source.
    """
    require("simpy", "bench")
    from ftcomm.bench.fleet import Request, check_lines, check_paper, constant_lines, heading, line, reckon
    from ftcomm.bench.fleet_measured import newest
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.plots import check_plot
    from ftcomm.bench.progress import Watch

    files = {"recovery": recovery or newest("recovery"), "rejoin": rejoin or newest("rejoin")}
    for name, path in files.items():
        if path is None:
            raise SettingsError(f"there is no result of `ftcomm bench {name}`; measure it, then --{name} FILE.")
    check_plot(plot_file)
    request = Request(files["recovery"], files["rejoin"], gpus, replicas, failures, days, seeds, checkpoint)
    request.check()
    pipelines = request.pipelines(max(gpus))
    fields = header()
    checks = check_paper()
    rows: list[Row] = []
    result: dict[str, Any] = {"header": fields, "checks": checks, "pipelines": pipelines, "rows": rows}
    with written(json_file, result), written_csv(csv_file, rows), Watch("reckoning") as watch:
        for text in (*header_lines(fields), *check_lines(checks)):
            watch.line(text)
        if not all(check.good for check in checks):
            raise click.exceptions.Exit(1)
        watch.line(f"# constants, at {max(gpus)} GPUs:")
        for text in (*constant_lines(pipelines), *heading()):
            watch.line(text)

        def on_row(row: Row) -> None:
            rows.append(row)
            watch.line(line(row))

        try:
            reckon(request, on_row, watch.update)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
    if plot_file is not None:
        from ftcomm.bench.fleet_plot import draw

        draw(rows, plot_file)
