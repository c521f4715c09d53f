"""`ftcomm bench gpu-check` as a command."""

from __future__ import annotations

from pathlib import Path

import click

from ftcomm.bench.commands.options import (
    json_option,
    write,
    written,
)
from ftcomm.errors import SettingsError


@click.command("gpu-check")
@json_option
def gpu_check(*, json_file: Path | None) -> None:
    """All that needs a GPU, in less than eight minutes: tests, sanitizer, benches, each with a deadline.

    Run it on a machine with a GPU, from the source tree, whose tests it runs. It goes on when a part fails; the exit
    code is 1 if any did, and the JSON, which is written after each part, says how.
    """
    import signal

    import torch

    from ftcomm.bench.gpu_check import IN_ALL, Outcome, check, failed, outcome_lines, stages
    from ftcomm.bench.header import device_fields, device_lines, header, header_lines
    from ftcomm.bench.progress import Watch

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
    with written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), *device_lines(fields)):
            watch.line(text)

        def on_outcome(outcome: Outcome) -> None:
            outcomes.append(outcome)
            for text in outcome_lines(outcome):
                watch.line(text)
            if json_file is not None:
                write(json_file, result)

        try:
            check(stages(torch.cuda.get_device_capability()), IN_ALL, on_outcome, watch.update)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
    if failed(outcomes):
        raise click.exceptions.Exit(1)
