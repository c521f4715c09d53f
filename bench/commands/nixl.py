"""`ftcomm bench nixl` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ftcomm.bench.commands.options import SIZE, ListType, json_option, run, written


@click.command()
@click.option("--sizes", type=ListType(SIZE, "SIZE,..."), default="64M,256M", show_default=True, help="Arrays (fp32).")
@click.option("--ranks", type=int, default=2, show_default=True, help="Processes.")
@click.option("-n", "--iters", type=int, default=5, show_default=True, help="Timed ops in a round.")
@click.option("--rounds", type=int, default=5, show_default=True, help="So many times puts, ftcomm.")
@json_option
@click.option("--smoke", is_flag=True, help="Two ranks and 1 MB, to see that it runs.")
def nixl(*, sizes: tuple[int, ...], ranks: int, iters: int, rounds: int, json_file: Path | None, smoke: bool) -> None:
    """All-reduce over NIXL beside NIXL alone, which puts the same bytes.

    puts: every rank puts 2 (n - 1) / n of the array to the next one, out of an array of that size into one there, in
    puts as large as a chunk of ftcomm, both ways at once. large puts: of 8 MB. in cache: within the first MB. one way:
    every other rank puts, and the others receive. with sum: each also adds as many bytes as it puts, as an all-reduce
    has to. None agrees on anything. Shares are of rounds, in which all ran one after the other. UCX_NET_DEVICES and
    UCX_TLS choose the way, for both.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.nixl import COLUMNS, Request, Row, measure
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.yardstick import heading, line
    from ftcomm.transport.nixl_library import load

    request = Request((1 << 20,), 2, 2, 1) if smoke else Request(sizes, ranks, iters, rounds)
    request.check()
    library = load()
    fields = header()
    rows: list[Row] = []
    result: dict[str, Any] = {"header": fields, "nixl": library.version, "request": request, "rows": rows}
    with written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), f"# NIXL {library.version}", *heading(COLUMNS)):
            watch.line(text)

        def on_rows(measured: list[Row]) -> None:
            rows.extend(measured)
            for row in measured:
                watch.line(line(COLUMNS, row))

        run(measure(request, on_rows, watch.update))
