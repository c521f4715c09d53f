"""`ftcomm bench profile` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ftcomm.bench.commands.options import SIZE, ListType, json_option, run, written


@click.command()
@click.option("--sizes", type=ListType(SIZE, "SIZE,..."), default="1K,64K,1M,16M", show_default=True, help="(fp32)")
@click.option("--ranks", type=ListType(click.INT, "N,..."), default="2,4", show_default=True, help="Processes.")
@click.option("-n", "--iters", type=int, default=300, show_default=True, help="Timed ops in a round; fewer above 1M.")
@click.option("--rounds", type=int, default=5, show_default=True)
@json_option
@click.option("--smoke", is_flag=True, help="Two ranks, one round at 1K, to see that it runs.")
def profile(
    *, sizes: tuple[int, ...], ranks: tuple[int, ...], iters: int, rounds: int, json_file: Path | None, smoke: bool
) -> None:
    """Say where the time of an all-reduce through shared memory goes.

    Of each op: for how long it waits for other ranks, how long it reduces, and the rest, which is copies into the
    staging and the interpreter; what its bytes would take at the rate of a copy; and what can be counted where times
    are noisy: instructions of the interpreter (without those of waits, as many as they last), calls of functions,
    wake-ups, sleeps, times that another process was given the core, page faults.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.profile import COLUMNS, Request, Row, measure
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.yardstick import heading, line

    request = Request((1 << 10,), (2,), 20, 1) if smoke else Request(sizes, ranks, iters, rounds)
    request.check()
    fields = header()
    rows: list[Row] = []
    result: dict[str, Any] = {"header": fields, "request": request, "rows": rows}
    with written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), *heading(COLUMNS)):
            watch.line(text)

        def on_row(row: Row) -> None:
            rows.append(row)
            watch.line(line(COLUMNS, row))

        run(measure(request, on_row, watch.update))
