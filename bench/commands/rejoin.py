"""`ftcomm bench rejoin` as a command."""

from __future__ import annotations

from pathlib import Path

import click

from ftcomm.bench.commands.options import (
    SIZE,
    json_option,
    run,
    written,
)


@click.command()
@click.option("--replicas", type=int, default=3, show_default=True, help="Processes; one is killed and comes back.")
@click.option("--size", type=SIZE, default=400_000_000, help="Of weights and moments, in bytes.  [default: 400 MB]")
@click.option("--batch", type=int, default=256, show_default=True, help="Samples of a step: how long it takes.")
@click.option("--rejoins", type=int, default=3, show_default=True, help="One replica after the other.")
@click.option("--mbps", type=float, help="Throttle of the sources.  [default: none]")
@json_option
@click.option("--smoke", is_flag=True, help="One return of one of two replicas with 40 MB, to see that it runs.")
def rejoin(
    *, replicas: int, size: int, batch: int, rejoins: int, mbps: float | None, json_file: Path | None, smoke: bool
) -> None:
    """Kill a training replica, and see what the others notice of its return.

    `transfer` is what its state took to arrive, of weights and AdamW's moments, while all trained on; `stall` for how
    long the loop of a healthy replica stood still for the copy that it serves, the worst of them, and that beside one
    of its steps. The steps are those of the healthy replicas: with all, without the one, and while it catches up; it
    computes then as they do, so on few cores they share those with it; the longest of all these. Exits with 1 above a
    tenth of a step.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.rejoin import TARGET, Rejoin, Request, footer, heading, line, measure

    request = Request(2, 40_000_000, 32, 1, mbps) if smoke else Request(replicas, size, batch, rejoins, mbps)
    request.check()
    fields = header()
    found: list[Rejoin] = []
    with written(json_file, {"header": fields, "request": request, "rejoins": found}), Watch() as watch:
        for text in (*header_lines(fields), *heading()):
            watch.line(text)

        def on_rejoin(new: Rejoin) -> None:
            found.append(new)
            watch.line(line(new))

        run(measure(request, on_rejoin, watch.update))
    click.echo(footer(found))
    if not smoke and max(one.share for one in found) > TARGET:
        raise click.exceptions.Exit(1)
