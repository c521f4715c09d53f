"""`ftcomm bench recovery` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ftcomm.bench.commands.options import (
    SIZE,
    ListType,
    csv_option,
    json_option,
    plot_option,
    run,
    transport_option,
    written,
    written_csv,
)


@click.command()
@click.option("--replicas", type=int, default=4, show_default=True, help="Processes; one of them is hit each time.")
@click.option("--size", type=SIZE, default="64M", show_default=True, help="Array of the all-reduce (fp32).")
@click.option(
    "--faults",
    type=ListType(click.Choice(["kill", "stop", "cut"]), "[kill,stop,cut]"),
    default="kill",
    show_default=True,
    help="SIGKILL; SIGSTOP; its cable, between network namespaces and by root.",
)
@click.option("--kills", type=int, default=20, show_default=True, help="Of each fault, a replica after the other.")
@transport_option
@click.option(
    "--compare",
    type=ListType(click.Choice(["gloo", "torchft"]), "[gloo,torchft]"),
    default=(),
    help="The same faults, but cuts, for these.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the points in an op at which they come.")
@json_option
@csv_option
@plot_option
@click.option("--smoke", is_flag=True, help="Two kills of three replicas at 4M, to see that it runs.")
def recovery(
    *,
    replicas: int,
    size: int,
    faults: tuple[str, ...],
    kills: int,
    transport: str,
    compare: tuple[str, ...],
    seed: int,
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
    smoke: bool,
) -> None:
    """Take a replica out of an all-reduce, and time what the others do.

    Replicas under the launcher run all-reduces back to back. One is stopped, seen to be in the middle of an op, and
    killed, left stopped, or cut off. Counted from there: `detect` until the coordinator has heard of it, `view` until
    it has decided on the view without it, `stall` until that very op has returned on the last survivor, with the time
    that the op usually takes beside it, `rejoin` until the replica contributes again; then the next is hit. `resume` is
    what the last survivor took from hearing of the view until it was in that op again, `resent` what survivors had
    posted and posted again. Results are compared by their SHA-256, and every element with the sums that there can be.
    Exits with 1 if ftcomm lost an op, if its bytes were not equal or wrong, or if more was sent again than was in
    flight: as much as the slots of each survivor hold. A peer that fails has a line that says so, and the rest goes on.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.peers import missing
    from ftcomm.bench.plots import check_plot
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.recovery import Event, Request, good, measure, summaries
    from ftcomm.bench.recovery_peers import measure_peer
    from ftcomm.bench.table import event_heading, event_line, summary_lines
    from ftcomm.errors import FtcommError

    if smoke:
        replicas, size, kills = 3, 4 << 20, 2
    request = Request(replicas, size, kills, transport, seed, faults, compare)
    request.check()
    check_plot(plot_file)
    fields = header()
    events: list[Event] = []
    errors: dict[str, str] = {}  # peer -> why it could not be measured to the end
    result: dict[str, Any] = {"header": fields, "request": request, "events": events, "errors": errors}
    with written(json_file, result), written_csv(csv_file, events), Watch() as watch:
        for text in (*header_lines(fields), *event_heading()):
            watch.line(text)

        def on_event(event: Event) -> None:
            events.append(event)
            result["summary"] = summaries(events)
            watch.line(event_line(event))

        async def all_of_them() -> None:
            await measure(request, on_event, watch.update)
            for peer in compare:
                if (why := missing(peer, "cpu", replicas)) is not None:
                    watch.line(f"# {why}")
                    continue
                try:
                    await measure_peer(peer, request, on_event, watch.update)
                except FtcommError as error:  # what was measured of it stays, and the rest goes on
                    errors[peer] = str(error)
                    watch.line(f"# {peer}: {error}")

        run(all_of_them())
    found = summaries(events)
    for text in (line for summary in found for line in summary_lines(summary)):
        click.echo(text)
    if plot_file is not None:
        from ftcomm.bench.recovery_plot import draw

        draw(events, request, fields, plot_file)
    if not all(good(summary) for summary in found):
        raise click.exceptions.Exit(1)
