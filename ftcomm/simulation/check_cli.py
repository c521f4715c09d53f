"""`ftcomm check`: the exhaustive check of a small group, with its progress on the terminal."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ftcomm.simulation.exhaustive import CheckReport, ExhaustiveCheck
from ftcomm.simulation.live import MOST_CHUNKS, MOST_MEMBERS, CheckedGroup
from ftcomm.simulation.mutations import MUTATIONS


@click.command()
@click.option("--members", type=click.IntRange(1, MOST_MEMBERS), default=3, show_default=True, metavar="N")
@click.option("--faults", type=click.IntRange(0), default=2, show_default=True, metavar="F")
@click.option("--resets", type=click.IntRange(0), default=0, show_default=True, metavar="R", help="Of connections.")
@click.option("--ops", type=click.IntRange(1), default=2, show_default=True, metavar="K", help="Ops of each member.")
@click.option("--chunks", type=click.IntRange(1), default=1, show_default=True, metavar="C", help="Chunks of each op.")
@click.option("--two-shot", is_flag=True, help="Members on several hosts: each reduces a slice, all copy the slices.")
@click.option("--atomic", is_flag=True, help="Ops that end with one set of contributors in all their chunks.")
@click.option("--verify", is_flag=True, help="As with FTCOMM_VERIFY=1: a false alarm is a violation.")
@click.option(
    "--tree",
    type=click.IntRange(0),
    default=0,
    metavar="FAN",
    help="Ops of one chunk go through a tree.  [default: none]",
)
@click.option("--forming", is_flag=True, help="Begin when the first view is decided, not when all run in it.")
@click.option("--unreduced", is_flag=True, help="Explore also those orders of steps that are known not to matter.")
@click.option("--seconds", type=float, metavar="S", help="Give up after that time.  [default: never]")
@click.option(
    "--mutation",
    type=click.Choice(list(MUTATIONS)),
    help="Take a rule of the protocol out, and see that the check finds what goes wrong.",
)
def check(
    members: int,
    faults: int,
    resets: int,
    ops: int,
    chunks: int,
    two_shot: bool,
    atomic: bool,
    verify: bool,
    tree: int,
    forming: bool,
    unreduced: bool,
    seconds: float | None,
    mutation: str | None,
) -> None:
    """Explore every interleaving of a small group.

    N members that call K ops of C chunks, with up to F faults, each a crash of a member or a false suspicion of a live
    one, and up to R resets of connections for data, at any point: the state machines of the product in every order of
    their steps. A violation of a promise is printed with one of the shortest histories that lead to it.

    \b
    Exit codes:
        0  all was explored, and nothing was violated; with --mutation: a violation was found
        1  a violation was found; with --mutation: none was
        4  the time was over before all was explored
    """
    console = Console(highlight=False)
    if ops * chunks >= MOST_CHUNKS:
        raise click.UsageError(f"{ops} ops of {chunks} chunks: at most {MOST_CHUNKS - 1} chunks can be told apart")
    try:
        group = CheckedGroup(members, ops, chunks, one_host=not two_shot, atomic=atomic, verify=verify, tree=tree)
        known = MUTATIONS[mutation] if mutation is not None else None
        checked = ExhaustiveCheck(group, faults, known, resets=resets, reduced=not unreduced, forming=forming)
        if known is not None:
            console.print(f"without a rule: {known.what}")
        report = _run(checked, seconds, console)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(_conclude(report, mutation, console))


def _run(checked: ExhaustiveCheck, seconds: float | None, console: Console) -> CheckReport:
    bars = Progress(
        SpinnerColumn(),
        *([BarColumn(bar_width=20)] if seconds is not None else []),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bars:
        task = bars.add_task("", total=seconds)

        def show(report: CheckReport) -> None:
            rate = report.states / report.seconds if report.seconds else 0.0
            text = (
                f"{report.states:,} states, {rate:,.0f}/s, depth {report.depth}, frontier {report.frontier:,}, "
                f"{report.local:,} states of a member"
            )
            bars.update(task, description=text, completed=min(report.seconds, seconds or report.seconds))

        return checked.run(float("inf") if seconds is None else seconds, show)


def _conclude(report: CheckReport, mutation: str | None, console: Console) -> int:
    rate = report.states / report.seconds if report.seconds else 0.0
    console.print(
        f"{report.states:,} states, {report.steps:,} steps, {report.local:,} different states of a member with its "
        f"memory, depth {report.depth}, {report.ends:,} ends, {report.seconds:.1f} s, {rate:,.0f} states/s",
        soft_wrap=True,
    )
    if report.broken:
        console.print("\nA violation, and one of the shortest histories that lead to it:")
        for number, line in enumerate(report.history, start=1):
            console.print(f"{number:4}  {line}", soft_wrap=True)
        console.print(f"\n{report.broken}", soft_wrap=True)
        return 1 if mutation is None else 0
    if not report.complete:
        console.print(f"the time is over, with {report.frontier:,} states yet to be looked at; no violation so far")
        return 4
    console.print("all was explored; nothing was violated")
    return 0 if mutation is None else 1
