"""`ftcomm bench overhead` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftcomm.bench.commands.options import SIZE, ListType, csv_option, json_option, run, written, written_csv
from ftcomm.bench.sizes import parse_size

if TYPE_CHECKING:
    from ftcomm.bench.collective import Row
    from ftcomm.bench.overhead import Cost


@click.command()
@click.option("--sizes", type=ListType(SIZE, "SIZE,..."), default="1K,64K,1M,16M", show_default=True)
@click.option("--ranks", type=ListType(click.INT, "N,..."), default="2", show_default=True, help="Processes.")
@click.option("-n", "--iters", type=int, help="Timed ops in a round.  [default: 100 to 10, by size]")
@click.option("--rounds", type=int, default=9, show_default=True, help="So many times one level after the other.")
@json_option
@csv_option
@click.option("--smoke", is_flag=True, help="A few ops at 1K, to see that it runs.")
def overhead(
    *,
    sizes: tuple[int, ...],
    ranks: tuple[int, ...],
    iters: int | None,
    rounds: int,
    json_file: Path | None,
    csv_file: Path | None,
    smoke: bool,
) -> None:
    """Time all-reduces with fault tolerance taken out of the engine, and put back piece by piece.

    Levels: off; stability, an op returns when all are known to hold it; ftcomm, that and detection, which is the
    product; verify, and FTCOMM_VERIFY=1. They take turns within each round; the differences to `off` are of the same
    round, and their median is shown. What is taken out is taken out by the bench: ftcomm has no switch for it.
    """
    from ftcomm.bench.collective import measure
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.overhead import Overhead, costs, footer, heading, line
    from ftcomm.bench.progress import Watch
    from ftcomm.errors import FtcommError

    if smoke:
        sizes, rounds, iters = (parse_size("1K"),), 2, 5
    request = Overhead(sizes, ranks, rounds=rounds, iterations=iters, transports=("shm",))
    request.check()
    fields = header()
    found: list[Cost] = []
    with written(json_file, {"header": fields, "costs": found}), written_csv(csv_file, found), Watch() as watch:
        for text in (*header_lines(fields), *heading()):
            watch.line(text)

        def on_rows(rows: list[Row]) -> None:
            if rows[0].in_place:
                try:
                    new = costs(rows)
                except ValueError as error:
                    raise FtcommError(str(error)) from None
                found.extend(new)
                for cost in new:
                    watch.line(line(cost))

        run(measure(request, on_rows, watch.update, watch.line))
    click.echo(footer(found))
    if any(cost.wrong for cost in found):
        raise click.exceptions.Exit(1)
