"""`ftcomm bench wire` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ftcomm.bench.commands.options import SIZE, ListType, json_option, run, written
from ftcomm.settings import ALGORITHMS


@click.command()
@click.option("--sizes", type=ListType(SIZE, "SIZE,..."), default="64M,256M", show_default=True, help="Arrays (fp32).")
@click.option("--ranks", type=ListType(click.INT, "N,..."), default="2,4", show_default=True, help="Processes.")
@click.option("-n", "--iters", type=int, default=5, show_default=True, help="Timed ops in a round.")
@click.option("--rounds", type=int, default=5, show_default=True, help="So many times sockets, ftcomm, gloo.")
@click.option(
    "--algorithm", type=click.Choice(ALGORITHMS), default="direct", show_default=True, help="FTCOMM_ALGORITHM."
)
@json_option
@click.option("--smoke", is_flag=True, help="Two ranks and 1 MB, without gloo, to see that it runs.")
def wire(
    *,
    sizes: tuple[int, ...],
    ranks: tuple[int, ...],
    iters: int,
    rounds: int,
    algorithm: str,
    json_file: Path | None,
    smoke: bool,
) -> None:
    """All-reduce over loopback TCP beside plain sockets that carry the same bytes, and gloo.

    The sockets have the pattern of a ring: every rank sends 2 (n - 1) / n of the array to the next one out of an array,
    and receives as much into another. They add nothing and agree on nothing. Shares are of rounds, in which all ran one
    after the other.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.wire import Request, Row, heading, line, measure

    request = Request(sizes, ranks, iters, rounds, algorithm)
    if smoke:
        request = Request((1 << 20,), (2,), 2, 1, algorithm, gloo=False)
    request.check()
    fields = header()
    rows: list[Row] = []
    result: dict[str, Any] = {"header": fields, "request": request, "rows": rows}
    with written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), *heading()):
            watch.line(text)

        def on_rows(measured: list[Row]) -> None:
            rows.extend(measured)
            for row in measured:
                watch.line(line(row))

        run(measure(request, on_rows, watch.update))
