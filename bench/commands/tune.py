"""`ftcomm bench tune` as a command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftcomm.bench.commands.options import ListType, run, written_with

if TYPE_CHECKING:
    from ftcomm.bench.tune import Request
    from ftcomm.bench.tune_rank import Block


@click.command()
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default="ftcomm-tuning.json",
    show_default=True,
    help="Written, or brought up to date.",
)
@click.option("--ranks", type=ListType(click.INT, "N,..."), default="3,4", show_default=True, help="Members.")
@click.option(
    "--hosts",
    type=ListType(click.Choice(["shared", "netns"]), "[shared,netns]"),
    default="shared",
    show_default=True,
    help="Ranks of this host; hosts of their own on this machine, over TCP and by root.",
)
@click.option("--ranks-per-host", type=int, default=1, show_default=True, help="With netns: they share hosts.")
@click.option(
    "-n", "--iters", type=int, default=20, show_default=True, help="Timed ops in a turn; fewer of large ones."
)
@click.option("--rounds", type=int, default=7, show_default=True, help="Turns of each way at each size.")
@click.option("--smoke", is_flag=True, help="Two sizes and a few ops, to see that it runs.")
def tune(
    *,
    path: Path,
    ranks: tuple[int, ...],
    hosts: tuple[str, ...],
    ranks_per_host: int,
    iters: int,
    rounds: int,
    smoke: bool,
) -> None:
    """Find the switch points of all-reduces on this machine, or between the hosts of a job.

    Small ones are reduced by each member itself (one-shot), larger ones in shards (two-shot); still larger ones go
    around, with FTCOMM_ALGORITHM=ring, or by two levels, where members share hosts. The file that is written says up to
    which size; give it to all ranks with FTCOMM_TUNING. Of other numbers of members, and of what was not measured, it
    keeps what it said before.

    Started as a rank of a job (FTCOMM_COORDINATOR is set), as by `srun ftcomm bench tune`, it measures among the
    members of that job, where they are and by the transport that they have; the lowest replica writes the file. With
    four hosts and more it also measures what each two of them exchange a second, 8 MB at a time: the file then says in
    which order a ring goes through them, so that its slowest link is as fast as it can be.
    """
    from ftcomm.bench.tune import LARGE, SMALL, Request

    request = Request(ranks, hosts, ranks_per_host, iters, rounds)
    if smoke:
        request = Request(ranks[:1], hosts, ranks_per_host, 3, 2, SMALL[2:7:4], LARGE[:2])
    if "FTCOMM_COORDINATOR" in os.environ:
        _in_job(request, path)
    else:
        _here(request, path)


def _here(request: Request, path: Path) -> None:
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.tune import before, measure, points, to_file

    request.check()
    earlier, fields = before(path), header()
    blocks: list[Block] = []
    said = 0
    with (
        written_with("--file", path, lambda: to_file(points(blocks, request), None, earlier, fields)),
        Watch() as watch,
    ):
        for text in header_lines(fields):
            watch.line(text)

        def on_blocks(measured: list[Block]) -> None:
            nonlocal said
            blocks[:] = measured
            for point in points(blocks, request)[said:]:
                watch.line(str(point))
                said += 1

        run(measure(request, on_blocks, watch.update))
    click.echo(f"# {path}; use it with FTCOMM_TUNING={path} on all ranks")


def _in_job(request: Request, path: Path) -> None:
    import ftcomm
    from ftcomm.bench import neighbours
    from ftcomm.bench.header import header
    from ftcomm.bench.tune import before, points, to_file
    from ftcomm.bench.tune_rank import measure, ways

    group = ftcomm.init()
    speaks = group.rank == 0 and group.replica == group.roster[0]
    blocks: list[Any] = []
    measure(group, request.task(*ways(group)), blocks.append)
    found = points(blocks, request)
    links = neighbours.measure(group, lambda text: click.echo(f"# {text}") if speaks else None)
    if speaks:
        with written_with("--file", path, lambda: to_file(found, links, before(path), header())):
            for said in (*found, *([] if links is None else [links])):
                click.echo(str(said))
    ftcomm.shutdown()
