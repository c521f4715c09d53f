"""`ftcomm bench accuracy` and `ftcomm bench hsdp` as commands: what a training comes to when replicas go and come."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftcomm.bench.commands.options import ListType, json_option, run, write, written

if TYPE_CHECKING:
    from ftcomm.bench import accuracy as accuracy_bench
    from ftcomm.bench import hsdp as hsdp_bench
    from ftcomm.bench.convergence import Run

seeds_option = click.option(
    "--seeds", type=ListType(click.INT, "N,..."), default="1,2,3", show_default=True, help="Of weights, data and kills."
)
jobs_option = click.option(
    "--jobs", type=int, default=1, show_default=True, help="Trainings at a time; steps are counted, not seconds."
)
plot_option = click.option(
    "--plot",
    "plots",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="Draw the curves into this file, .png or .svg; may be given twice.",
)


@click.command()
@click.option("--replicas", type=int, default=4, show_default=True, help="Processes.")
@click.option("--width", type=int, default=32, show_default=True, help="Of the demo's model, which has 128 there.")
@click.option("--layers", type=int, default=2, show_default=True)
@click.option("--batch", type=int, default=12, show_default=True, help="Sequences of 64 bytes of a replica in a step.")
@click.option("--steps", type=int, default=2000, show_default=True)
@click.option("--down", type=float, default=0.2, show_default=True, help="Share of the steps that a replica is away.")
@click.option("--times", type=int, default=3, show_default=True, help="Kills of each replica in a run.")
@click.option(
    "--policies",
    type=ListType(click.STRING, "POLICY,..."),
    default="none,linear,sqrt",
    show_default=True,
    help="Of the learning rate while replicas are away, see `lr` of Replica.",
)
@seeds_option
@jobs_option
@json_option
@plot_option
@click.option("--smoke", is_flag=True, help="Two replicas for a few steps, one kill each, to see that it runs.")
def accuracy(
    *,
    replicas: int,
    width: int,
    layers: int,
    batch: int,
    steps: int,
    down: float,
    times: int,
    policies: tuple[str, ...],
    seeds: tuple[int, ...],
    jobs: int,
    json_file: Path | None,
    plots: tuple[Path, ...],
    smoke: bool,
) -> None:
    """Train with replicas away for a part of the steps and with all there, and compare what is learned.

    Each replica gets SIGKILL at random steps and is started again; it joins, catches up and contributes after as many
    steps as were drawn for it, the others waiting for its process if that takes longer. The loss is of text that was
    held out, after the last step. Fewer replicas train on fewer samples, which alone makes it higher: in the runs "left
    out" nobody is killed, and only the same samples are not used. Exits with 1 if the final weights of the replicas
    differ, if a step was lost, or if the means of the losses with and without kills, of equal samples and learning
    rates, differ by more than those of different seeds do.
    """
    from ftcomm.bench.accuracy import Request, measure

    request = Request(replicas, width, layers, batch, steps, down, times, policies, seeds, jobs)
    if smoke:
        request = Request(2, 16, 1, 1, 100, down, 1, ("linear",), seeds[:1], jobs, validate_every=25, windows=8)
    _measured(request, measure, json_file, plots)


@click.command()
@click.option("--width", type=int, default=64, show_default=True, help="Of a model in the shape of Llama.")
@click.option("--layers", type=int, default=2, show_default=True)
@click.option("--batch", type=int, default=4, show_default=True, help="Sequences of 64 bytes of a rank in a step.")
@click.option("--steps", type=int, default=2000, show_default=True)
@click.option("--kills", type=int, default=50, show_default=True, help="In a run.")
@seeds_option
@jobs_option
@json_option
@plot_option
@click.option("--smoke", is_flag=True, help="A few steps with one kill, to see that it runs.")
def hsdp(
    *,
    width: int,
    layers: int,
    batch: int,
    steps: int,
    kills: int,
    seeds: tuple[int, ...],
    jobs: int,
    json_file: Path | None,
    plots: tuple[Path, ...],
    smoke: bool,
) -> None:
    """Kill ranks of an FSDP2 training of two replicas of two shards, and compare it with the same undisturbed.

    A random rank gets SIGKILL at a random moment of a step, the other of its replica goes with it, both are started
    again and catch up; the next kill comes when all contribute. Those that are left do a step alone, and then wait
    until the new processes are about to join. Exits with 1 if the final weights or the optimizers of the replicas
    differ in a bit, if a step was lost, or if the means of the final losses differ by more than those of different
    seeds do.
    """
    from ftcomm.bench.hsdp import Request, measure

    request = Request(width, layers, batch, steps, kills, seeds, jobs)
    if smoke:
        request = Request(16, 1, 1, 40, 1, seeds[:1], jobs, validate_every=20, windows=8)
    _measured(request, measure, json_file, plots)


def _measured(
    request: accuracy_bench.Request | hsdp_bench.Request,
    measure: Callable[[Any, Callable[[Run], None], Callable[[str, float], None]], Coroutine[Any, Any, None]],
    json_file: Path | None,
    plots: tuple[Path, ...],
) -> None:
    from ftcomm.bench.convergence import Comparison, comparison_line, faults, run_heading, run_line
    from ftcomm.bench.curves import check_plots, draw
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch

    request.check()
    check_plots(plots)
    fields = header()
    runs: list[Run] = []
    comparisons: list[Comparison] = []
    judged: list[Comparison] = []
    result = {"header": fields, "request": request, "comparisons": comparisons, "runs": runs}
    with written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), run_heading()):
            watch.line(text)

        def on_run(new: Run) -> None:
            runs.append(new)
            # Whichever came first: equal results look equal.
            runs.sort(key=lambda one: (request.seeds.index(one.seed), request.kinds.index(one.kind)))
            judged[:], others = request.compare(runs)
            comparisons[:] = [*judged, *others]
            watch.line(run_line(new))
            if json_file is not None:
                write(json_file, result)  # it takes long, and what is there is worth keeping

        run(measure(request, on_run, watch.update))
    for text in (*map(comparison_line, comparisons), *faults(runs)):
        click.echo(text)
    for path in plots:
        draw(runs, path)
    if not all(one.kept for one in runs) or not all(one.within for one in judged):
        raise click.exceptions.Exit(1)
