"""`ftcomm bench kernels` as a command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ftcomm.bench.commands.options import (
    SIZE,
    ListType,
    csv_option,
    json_option,
    written,
    written_csv,
)
from ftcomm.bench.sizes import sweep


class CapType(click.ParamType):
    """A number, or all: None."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        return None if value == "all" else click.INT.convert(value, param, ctx)


@click.command()
@click.option("--kernels", "names", type=ListType(click.STRING, "NAME,..."), help="Only these.  [default: all]")
@click.option("-b", "--minbytes", type=SIZE, help="Smallest array.  [default: 64M; without a GPU 64K]")
@click.option("-e", "--maxbytes", type=SIZE, help="Largest array.  [default: 1G; without a GPU 64K]")
@click.option("-f", "--stepfactor", type=int, default=4, show_default=True, help="Factor between sizes.")
@click.option(
    "-d", "--datatypes", type=ListType(click.STRING, "TYPE,..."), default="bfloat16,float32", show_default=True
)
@click.option("-o", "--op", "redop", default="sum", show_default=True, help="sum, avg, min, max or product.")
@click.option("--sources", type=ListType(click.INT, "W,..."), default="2,4,8", show_default=True, help="Of reductions.")
@click.option("--sms", type=ListType(CapType(), "N,..."), default="all", show_default=True, help="Most blocks; all.")
@click.option("-n", "--iters", type=int, help="Timed calls of a point.  [default: 100 or 30, by size]")
@click.option("-w", "--warmup_iters", type=int, help="Calls before them.  [default: 20 or 10, by size]")
@click.option("--hot", is_flag=True, help="Do not flush the cache before each call.")
@csv_option
@json_option
def kernels(
    *,
    names: tuple[str, ...] | None,
    minbytes: int | None,
    maxbytes: int | None,
    stepfactor: int,
    datatypes: tuple[str, ...],
    redop: str,
    sources: tuple[int, ...],
    sms: tuple[int | None, ...],
    iters: int | None,
    warmup_iters: int | None,
    hot: bool,
    csv_file: Path | None,
    json_file: Path | None,
) -> None:
    """Copy, reduce and quantise on one GPU: time, bytes moved a second, and that beside a copy in the same run.

    "% copy" is of the best copy of that size, the CUDA runtime's (memcpy) included; "% same blocks" of the copy with
    the same --sms. What is written is compared with the host's, bit for bit, at both ends and in the middle; #wrong
    counts elements. Without a GPU Triton's interpreter runs the kernels, and there are no speeds: those would be its
    own.
    """
    import torch

    from ftcomm.bench.header import device_fields, device_lines, header, header_lines
    from ftcomm.bench.kernels import KERNELS, Request, Row, measure
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.table import footer, kernel_heading, kernel_line

    there = torch.cuda.is_available()
    if not there:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    first = minbytes or (64 << 20 if there else 64 << 10)
    sizes = sweep(first, maxbytes or max(first, 1 << 30 if there else 64 << 10), factor=stepfactor)
    request = Request(sizes, names or KERNELS, datatypes, redop, sources, sms, iters, warmup_iters, hot)
    request.check()
    fields = {**header(), **device_fields()}
    rows: list[Row] = []
    with written(json_file, {"header": fields, "rows": rows}), written_csv(csv_file, rows), Watch() as watch:
        for text in (*header_lines(fields), *device_lines(fields), *kernel_heading()):
            watch.line(text)

        def on_row(new: Row) -> None:
            rows.append(new)
            watch.line(kernel_line(new))

        try:
            measure(request, on_row, watch.update)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
    wrong = sum(row.wrong for row in rows)
    click.echo(footer(wrong))
    if wrong:
        raise click.exceptions.Exit(1)
