"""`ftcomm bench detection` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ftcomm.bench.commands.options import (
    SIZE,
    json_option,
    run,
    transport_option,
    written,
)


@click.command()
@click.option("--replicas", type=int, default=4, show_default=True, help="What is lost as one.")
@click.option("--ranks-per-replica", type=int, default=2, show_default=True, help="Processes of each.")
@click.option("--compute", type=float, default=50.0, show_default=True, help="Milliseconds of computing in a step.")
@click.option("--size", type=SIZE, default="4M", show_default=True, help="Array of the all-reduce of a step (fp32).")
@click.option("--memory", type=SIZE, default="256M", show_default=True, help="Of each rank's model, torch not counted.")
@click.option("--kills", type=int, default=100, show_default=True, help="SIGKILLs, one rank after the other.")
@transport_option
@click.option("--seed", type=int, default=0, show_default=True, help="Of the points in a step at which they come.")
@json_option
@click.option("--smoke", is_flag=True, help="Two kills of two replicas, to see that it runs.")
def detection(
    *,
    replicas: int,
    ranks_per_replica: int,
    compute: float,
    size: int,
    memory: int,
    kills: int,
    transport: str,
    seed: int,
    json_file: Path | None,
    smoke: bool,
) -> None:
    """Kill ranks of a training anywhere in its steps, and time until the coordinator knows.

    Counted from the call of kill(2): `detect` until the coordinator has heard of the loss, `view` until it has decided
    on the view without the replica and has that on the disk. Everything that lies between is counted: that the victim
    gets a core to die on, that the one who notices gets one to say so. The next kill comes when all train again.
    """
    from ftcomm.bench.detection import Event, Request, measure, summarize
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.table import detection_heading, detection_line, detection_summary

    request = Request(replicas, ranks_per_replica, size, compute, memory, kills, transport, seed)
    if smoke:
        request = Request(2, 2, 1 << 20, 5.0, 8 << 20, 2, transport, seed)
    request.check()
    fields = header()
    events: list[Event] = []
    result: dict[str, Any] = {"header": fields, "request": request, "events": events}
    with written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), *detection_heading()):
            watch.line(text)

        def on_event(event: Event) -> None:
            events.append(event)
            result["summary"] = summarize(events)
            watch.line(detection_line(event))

        run(measure(request, on_event, watch.update))
    for text in detection_summary(summarize(events)):
        click.echo(text)
