"""`ftcomm chaos`: the command."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ftcomm.errors import SettingsError
from ftcomm.lab.chaos import report
from ftcomm.lab.chaos.plan import KINDS, LOCAL, TOLD
from ftcomm.lab.chaos.run import Chaos, ChaosOptions, ChaosOutcome
from ftcomm.launch.admin.client import AdminClient, find
from ftcomm.launch.commands.confirmation import confirm, yes_option
from ftcomm.launch.commands.option_types import Parsed, choices

PLAIN_WIDTH = 140  # columns of a report that goes into a file
UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds, from `5s`, `10m`, `1.5h`, `200ms` or a plain number. Raises `SettingsError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if match is None or float(match[1]) == 0:
        raise SettingsError(f"{text!r}: expected a time above 0, as in 5s, 10m or 1h")
    return float(match[1]) * UNITS[match[2]]


DURATION = Parsed("duration", parse_duration)


@click.command()
@click.option("--every", type=DURATION, default="5s", show_default=True, metavar="TIME", help="From fault to fault.")
@click.option(
    "--kinds",
    type=choices(*KINDS),
    default=",".join(LOCAL),
    show_default=True,
    metavar="K,K",
    help=f"Of {', '.join(KINDS)}; {', '.join(TOLD)} need -m ftcomm.lab.chaos.train, those after them --hosts netns.",
)
@click.option("--for", "duration", type=DURATION, default="1m", show_default=True, metavar="TIME", help="How long.")
@click.option(
    "--faults", type=click.IntRange(1), metavar="N", help="End after N faults, if the time is not over before."
)
@click.option("--seed", type=int, metavar="N", help="The same seed draws the same faults.  [default: random]")
@click.option("--job", metavar="RUN", help="Which job (ftcomm status); not needed if only one runs.")
@click.option(
    "--overlap",
    type=click.FloatRange(0, 1),
    default=0.3,
    show_default=True,
    metavar="SHARE",
    help="Share of faults that need not wait until the job is whole again. One contributing replica always stays.",
)
@click.option("--hang-after", type=DURATION, metavar="TIME", help="Without a step.  [default: from the job's timeouts]")
@yes_option
@click.option("--report", "report_path", type=click.Path(path_type=Path), metavar="FILE", help="Write all as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw a timeline (needs matplotlib).")
def chaos(
    every: float,
    kinds: tuple[str, ...],
    duration: float,
    faults: int | None,
    seed: int | None,
    job: str | None,
    overlap: float,
    hang_after: float | None,
    yes: bool,
    report_path: Path | None,
    plot: Path | None,
) -> None:
    """Hit a running job with faults, and tell what came of it.

    The job is one that `ftcomm run` has started here; it is named, and you are asked, before it is hit. Start it with
    a high --max-restarts and a short --heartbeat-timeout. A divergence is one that the job reports itself:
    FTCOMM_VERIFY=1 in its environment lets it compare all results, and `-m ftcomm.lab.chaos.train`, a training made
    for this, compares its weights.

    \b
    Faults:
        kill         SIGKILL to a rank
        stop         SIGSTOP to a rank or a replica, SIGCONT when it has been removed
        slow         a replica is stopped and let go many times a second
        coordinator  dies, and is back within 3 s knowing only what was stored
        coordinator-stop  SIGSTOP to the launcher, whose coordinator it is, for some heartbeats
        roll-back    the coordinator comes back with an older store, must refuse it, and gets the right one later
        hold         the interpreters of one replica or of all are held for longer than a heartbeat
        fork         a rank forks children of all kinds, which hold what it had open; one calls an all-reduce
        orphan       the same, and SIGKILL to the rank while they live
        partition    a replica is cut off from everybody, from one other, or from the coordinator
        oneway       the same in one direction only
        cut-off      the coordinator is cut off from everybody, both ways or one

    Exit codes: 0 all was well; 1 the job hung, diverged, leaked, ended, or lost a replica without need; 2 the command
    cannot work as given.
    """
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    options = ChaosOptions(every, duration, kinds, seed, overlap, faults, hang_after)
    path = find(job)
    with AdminClient(path) as remote:
        what = f"Hit it for {duration:g} s ({', '.join(kinds)})"
        confirm(remote.status(), what, "ftcomm chaos", named=job is not None, yes=yes)
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"chaos on job {path.parent.name}, seed {seed}")
    with Progress(
        TimeElapsedColumn(), BarColumn(), TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=duration)

        def shown(outcome: ChaosOutcome, seconds: float) -> None:
            ledger = outcome.ledger
            doing = f"{len(ledger.open)} open" if ledger.open else "whole" if ledger.whole else "waiting for the job"
            step = max(ledger.steps.values(), default=0)
            bar.update(task, completed=seconds, description=f"{len(ledger.records)} faults, {doing}, step {step}")

        outcome = Chaos(path, options, lambda text: console.print(text, highlight=False, markup=False), shown).run()
    report.show(outcome, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    if report_path is not None:
        report.write(outcome, report_path)
    if plot is not None:
        from ftcomm.lab.chaos.timeline import draw

        draw(outcome, plot)
    sys.exit(1 if outcome.failures else 0)
