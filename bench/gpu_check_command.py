"""`ftcomm bench gpu-check` as a command, apart from its stages, which need neither click nor rich."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from ftcomm.bench.gpu_check import IN_ALL, TIMED_OUT, Outcome, Stage, check, failed, outcome_lines, stages
from ftcomm.bench.harness import FILE, write_json, written_at_the_end
from ftcomm.bench.header import device_fields, device_lines, header, header_lines
from ftcomm.bench.progress import ProgressBar
from ftcomm.errors import SettingsError


@click.command("gpu-check")
@click.option("--json", "json_file", type=FILE, help="Write header and outcomes to this file.")
@click.option("--stages", "names", metavar="NAME,...", help="These alone, in this order; --stages list names all.")
@click.option(
    "--for", "seconds", type=click.FloatRange(1), default=IN_ALL, show_default=True, help="Seconds that it may take."
)
def gpu_check(*, json_file: Path | None, names: str | None, seconds: float) -> None:
    """All that needs a GPU, in stages: tests, sanitizer, benches, each with a deadline.

    Run it on a machine with a GPU, from the source tree, whose tests it runs. It goes on when a stage fails; the exit
    code is 1 if any did, and the JSON, which is written after each stage, says how. Stages for which no time is left
    are named at the end, to be given to --stages.
    """
    import torch

    known = {stage.name: stage for stage in stages()}
    if names == "list":
        for stage in known.values():
            click.echo(f"{stage.name:>20}  at most {stage.seconds:g} s")
        return
    chosen: list[Stage] = []
    for name in known if names is None else (each.strip() for each in names.split(",")):
        if name not in known:
            raise SettingsError(f"--stages: there is no stage {name!r}; they are {', '.join(known)}")
        chosen.append(known[name])
    if not torch.cuda.is_available():
        raise SettingsError(
            f"gpu-check needs a GPU that torch can use, and torch {torch.__version__} finds none. Run it on a machine "
            "with an NVIDIA GPU and driver and a torch for CUDA; without one, pytest tests/kernels runs the same "
            "kernels in Triton's interpreter."
        )
    fields = {**header(), **device_fields()}
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who is told to end writes what there is, too
    result = {"header": fields, "stages": outcomes}
    with written_at_the_end("--json", json_file, lambda path: write_json(path, result)), ProgressBar() as bar:
        for text in (*header_lines(fields), *device_lines(fields)):
            bar.line(text)

        def on_outcome(outcome: Outcome) -> None:
            outcomes.append(outcome)
            for text in outcome_lines(outcome):
                bar.line(text)
            if json_file is not None:
                write_json(json_file, result)

        try:
            check(chosen, seconds, on_outcome, bar.update)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
    unbegun = [outcome.stage for outcome in outcomes if outcome.outcome == TIMED_OUT and outcome.seconds == 0]
    if unbegun:
        click.echo(f"No time was left for some. Run them by: ftcomm bench gpu-check --stages '{','.join(unbegun)}'")
    if failed(outcomes):
        raise click.exceptions.Exit(1)
