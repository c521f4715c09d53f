"""`ftcomm bench train` as a command."""

from __future__ import annotations

from pathlib import Path

import click

from ftcomm.bench.commands.options import (
    ListType,
    json_option,
    run,
    written,
)


@click.command()
@click.option("--width", type=int, default=512, show_default=True, help="Of the transformer; with 8 layers 25 M.")
@click.option("--layers", type=int, default=8, show_default=True)
@click.option("--batch", type=int, default=2, show_default=True, help="Sequences of 64 bytes of a replica in a step.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Libraries take turns; 0: compare no steps.")
@click.option("-n", "--iters", type=int, default=4, show_default=True, help="Timed steps of a library in a round.")
@click.option("--replicas", type=int, default=4, show_default=True, help="Of the training that is disturbed.")
@click.option("--steps", type=int, default=40, show_default=True, help="Undisturbed, then killed; 0: no kills.")
@click.option("--kill-every", type=int, default=10, show_default=True, help="Steps between two SIGKILLs.")
@click.option(
    "--compare",
    type=ListType(click.STRING, "LIBRARY,..."),
    default="gloo",
    show_default=True,
    help="gloo, torchft, restart.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the points in a step at which kills come.")
@json_option
@click.option("--smoke", is_flag=True, help="A tiny model and one kill, to see that it runs.")
def train(
    *,
    width: int,
    layers: int,
    batch: int,
    rounds: int,
    iters: int,
    replicas: int,
    steps: int,
    kill_every: int,
    compare: tuple[str, ...],
    seed: int,
    json_file: Path | None,
    smoke: bool,
) -> None:
    """Time steps of DDP beside gloo, then kill replicas of a training and see what is left of its pace.

    First two ranks: whole steps, forward to update, of one model, each library in turn. "none" exchanges nothing. Then
    replicas under the step loop: so many steps undisturbed, and as many in which one of them gets SIGKILL every few
    steps, anywhere in a step, and is started again. With --compare torchft its lighthouse and gloo do the same; with
    restart plain gloo does, where one that dies ends all, and all begin again with the last of their checkpoints. Exits
    with 1 if the weights were not equal on all in the end.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.train import (
        KillRow,
        Request,
        StepRow,
        kill_heading,
        kill_line,
        measure,
        step_heading,
        step_line,
        torchft_missing,
    )

    request = Request(width, layers, batch, rounds, iters, replicas, steps, kill_every, compare, seed)
    if smoke:
        request = Request(16, 1, 1, 1, 2, 2, 20, 20, compare, seed)
    request.check()
    fields = header()
    step_rows: list[StepRow] = []
    kill_rows: list[KillRow] = []
    result = {"header": fields, "request": request, "steps": step_rows, "kills": kill_rows}
    with written(json_file, result), Watch() as watch:
        for text in header_lines(fields):
            watch.line(text)
        if "torchft" in compare and (missing := torchft_missing()) is not None:
            watch.line(f"# {missing}")

        def on_step(row: StepRow) -> None:
            if not step_rows:
                watch.line(step_heading())
            step_rows.append(row)
            watch.line(step_line(row))

        def on_kills(row: KillRow) -> None:
            if not kill_rows:
                watch.line(kill_heading())
            kill_rows.append(row)
            watch.line(kill_line(row))

        run(measure(request, on_step, on_kills, watch.update))
    if any(row.equal is False for row in kill_rows):
        raise click.exceptions.Exit(1)
