"""`ftcomm bench allreduce` and the other collectives as commands: one body, a command for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftcomm.bench.commands.options import (
    SIZE,
    ListType,
    csv_option,
    json_option,
    plot_option,
    run,
    written,
    written_csv,
)
from ftcomm.bench.sizes import parse_size, sweep
from ftcomm.collective.wire import WIRES
from ftcomm.settings import TRANSPORTS

if TYPE_CHECKING:
    from ftcomm.bench.collective import Row

SMOKE_SIZES = ("1K", "1M")
# name -> what is said of it; not from `collectives.py`, which imports torch
SAID = {
    "allreduce": "All-reduce: the sum of all on all.",
    "all_gather": "All-gather: the parts of all on all.",
    "reduce_scatter": "Reduce-scatter: on each rank one part of the sum of all.",
    "all_to_all": "All-to-all: from each rank a part to each.",
    "broadcast": "Broadcast: what rank 0 has to all.",
    "reduce": "Reduce: the sum of all on rank 0.",
    "gather": "Gather: the parts of all on rank 0.",
    "scatter": "Scatter: from rank 0 a part to each.",
}
METHOD = """
    Flags and columns are those of nccl-tests, with a line for each library. Each library runs in processes of its own,
    which take turns within each round: so the ratio ("x": time over ftcomm's, the median of the rounds' ratios) is of
    what ran in the same second, and a machine that changes its speed for minutes does not change it. Time is of the
    slowest rank of each op; p50 is the median over rounds of the rounds' medians, p99 of all ops. "%limit": what the
    bytes that have to move, inputs read once and results written once, take at the rate at which as many ranks copy an
    array of this size in the same round. Results of every round are checked; #wrong counts elements, and makes the
    exit code 1. A library that is not installed is named and left out, one that fails has a line that says so.
"""


def command(name: str) -> click.Command:
    options: list[Callable[[Any], Any]] = [
        click.option(
            "-b", "--minbytes", type=SIZE, default="1K", show_default=True, help="Smallest array, in bytes, K, M, G."
        ),
        click.option("-e", "--maxbytes", type=SIZE, default="64M", show_default=True, help="Largest array."),
        click.option("-f", "--stepfactor", type=int, help="Factor between sizes.  [default: 4]"),
        click.option("-i", "--stepbytes", type=SIZE, help="Step between sizes, instead of a factor."),
        click.option("--sizes", type=ListType(SIZE, "SIZE,..."), help="These sizes, instead of -b -e -f -i."),
        click.option("-n", "--iters", type=int, help="Timed ops in a round.  [default: 100 to 10, by size]"),
        click.option("-w", "--warmup_iters", type=int, help="Ops before them.  [default: 5 to 1, by size]"),
        click.option("-d", "--datatype", default="float32", show_default=True, help="Type of the elements."),
        click.option("-o", "--op", "redop", default="sum", show_default=True, help="sum, avg, min, max or product."),
        click.option("-c", "--check", type=click.IntRange(0, 1), default=1, show_default=True, help="Check results."),
        click.option("-G", "--cudagraph", is_flag=True, help="Capture one op in a CUDA graph and replay it."),
        click.option("--ranks", type=ListType(click.INT, "N,..."), default="2", show_default=True, help="Processes."),
        click.option(
            "--transport",
            type=ListType(click.Choice(TRANSPORTS), f"[{','.join(TRANSPORTS)}],..."),
            default="auto",
            show_default=True,
            help="Of ftcomm; several are measured side by side.",
        ),
        click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
        click.option("--sms", type=ListType(click.INT, "N,..."), help="Multiprocessors that an op of ftcomm may use."),
        click.option(
            "--wire",
            type=ListType(click.Choice(WIRES), f"[{','.join(WIRES)}],..."),
            default=(),
            help="In which form elements cross, by allreduce(..., wire=); several are measured side by side.",
        ),
        click.option(
            "--compare",
            type=ListType(click.Choice(["gloo", "mpi", "torchft", "nccl", "atomic"]), "[gloo,mpi,...]"),
            default=(),
            help="Measure gloo, mpi, torchft, nccl in turn with it; atomic: ftcomm with atomic=True.",
        ),
        click.option("--rounds", type=int, default=5, show_default=True, help="So many times one after the other."),
        json_option,
        csv_option,
        plot_option,
        click.option("--smoke", is_flag=True, help=f"A few ops at {' and '.join(SMOKE_SIZES)}, to see that it runs."),
    ]

    def body(**options: Any) -> None:
        _measure(name, **options)

    body.__doc__ = f"{SAID[name]}\n{METHOD}"
    for option in reversed(options):
        body = option(body)
    return click.command(name)(body)


def _measure(
    collective: str,
    *,
    minbytes: int,
    maxbytes: int,
    stepfactor: int | None,
    stepbytes: int | None,
    sizes: tuple[int, ...] | None,
    iters: int | None,
    warmup_iters: int | None,
    datatype: str,
    redop: str,
    check: int,
    cudagraph: bool,
    ranks: tuple[int, ...],
    transport: tuple[str, ...],
    device: str,
    sms: tuple[int, ...] | None,
    wire: tuple[str, ...],
    compare: tuple[str, ...],
    rounds: int,
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
    smoke: bool,
) -> None:
    from ftcomm.bench.collective import Request, measure
    from ftcomm.bench.collectives import COLLECTIVES, IN
    from ftcomm.bench.header import device_fields, device_lines, header, header_lines
    from ftcomm.bench.plots import check_plot
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.table import footer, heading, lines

    if stepfactor is None and stepbytes is None:
        stepfactor = 4
    wanted = sizes or sweep(minbytes, maxbytes, factor=stepfactor, step=stepbytes)
    if smoke:
        wanted, rounds, iters = [parse_size(size) for size in SMOKE_SIZES], 1, 5
    request = Request(
        wanted,
        ranks,
        datatype,
        redop,
        rounds,
        iters,
        warmup_iters,
        transport,
        compare,
        collective,
        device,
        sms or (),
        bool(check),
        cudagraph,
        wire,
    )
    request.check()
    check_plot(plot_file)
    fields = {**header(), **(device_fields() if device == "cuda" else {})}
    places = [place == IN for place in COLLECTIVES[collective].places]
    rows: list[Row] = []
    held: list[Row] = []  # of one size, until all places have come
    with written(json_file, {"header": fields, "rows": rows}), written_csv(csv_file, rows), Watch() as watch:
        for text in (*header_lines(fields), *(device_lines(fields) if device == "cuda" else ()), *heading(places)):
            watch.line(text)

        def on_rows(new: list[Row]) -> None:
            rows.extend(new)
            held.extend(new)
            if {row.in_place for row in held} == set(places):
                for text in lines(held, places):
                    watch.line(text)
                held.clear()

        try:
            run(measure(request, on_rows, watch.update, watch.line))
        finally:
            if plot_file is not None and any(row.time_us_p50 is not None for row in rows):
                from ftcomm.bench.collective_plot import draw

                draw(rows, fields, plot_file)
    wrong = sum(row.wrong for row in rows)
    for why in dict.fromkeys(f"# {row.library}: {row.error}" for row in rows if row.error):
        click.echo(why)
    click.echo(footer(wrong))
    if wrong or any(row.error and row.library == "ftcomm" for row in rows):
        raise click.exceptions.Exit(1)


COMMANDS = [command(name) for name in SAID]
