"""`ftcomm simulate`: many histories of the protocol in virtual time, each from a seed that replays it."""

from __future__ import annotations

import collections
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ftcomm.control.limits import MEMBERS
from ftcomm.errors import SettingsError
from ftcomm.launch.commands.option_types import Parsed, choices
from ftcomm.simulation.history import History, run
from ftcomm.simulation.scenario import KINDS

_BATCH = 50  # seeds that a worker takes at a time
_SHOWN = 5  # failing seeds that are told in full


# First and last seed, least and most members, kinds, whether there are trees, and host agents.
_Batch = tuple[int, int, int, int, tuple[str, ...], bool, bool]


def _members(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    try:
        least, most = int(first), int(last if dots else first)
    except ValueError:
        raise SettingsError(f"{text!r} is no range; expected for example 2..16, or 3") from None
    if not 1 <= least <= most <= MEMBERS:
        raise SettingsError(f"{text!r}: expected 1 <= first <= last <= {MEMBERS}")
    return least, most


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=2000, metavar="N", show_default=True, help="Histories to run.")
@click.option("--first", type=click.IntRange(0), default=0, metavar="SEED", show_default=True, help="The first seed.")
@click.option(
    "--members",
    type=Parsed("range", _members),
    default="2..16",
    metavar="A..B",
    show_default=True,
    help="Replicas of a job; mostly few.",
)
@click.option(
    "--kinds",
    type=choices(*sorted(KINDS)),
    default=(),
    metavar="K,K",
    help=f"Only histories of these kinds: {', '.join(sorted(KINDS))}.  [default: all of them]",
)
@click.option("--trees", is_flag=True, help="Small all-reduces go through a tree, however few members there are.")
@click.option("--agents", is_flag=True, help="Replicas have three ranks on two hosts, with an agent on the second.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes.  [default: one for each core]")
@click.option("--replay", type=click.IntRange(0), metavar="SEED", help="Run one history, and print all that happens.")
def simulate(
    seeds: int,
    first: int,
    members: tuple[int, int],
    kinds: tuple[str, ...],
    trees: bool,
    agents: bool,
    jobs: int | None,
    replay: int | None,
) -> None:
    """Run the protocol in virtual time, with everything going wrong.

    The coordinator, the members, their exchange and their catch-up are those of the product; processes, clocks and the
    network are simulated. A seed is a whole history: members are killed, stopped, held, slowed down, cut off, restarted
    and survived by their children, the coordinator is all that and given an older store, and what users are promised is
    checked all the while. The seed of a history in which a promise does not hold is printed, and --replay with the same
    --members, --kinds, --trees and --agents shows it again, event for event. Exits with 1 then.
    """
    least, most = members
    if replay is not None:
        history = run(replay, least, most, *kinds, traced=True, trees=trees, agents=agents)
        for line in history.trace:
            click.echo(line)
        click.echo(history.broken or f"no promise is broken{f'; {history.ended}' if history.ended else ''}")
        sys.exit(1 if history.broken else 0)
    workers = jobs or len(os.sched_getaffinity(0))
    begins = range(first, first + seeds, _BATCH)
    batches = [(begin, min(begin + _BATCH, first + seeds), least, most, kinds, trees, agents) for begin in begins]
    sys.exit(1 if _report(_watched(_all(batches, workers), seeds), workers, members, kinds, trees, agents) else 0)


def _all(batches: list[_Batch], workers: int) -> Iterator[list[History]]:
    if workers == 1:
        yield from map(_batch, batches)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(_batch, batches)


def _batch(batch: _Batch) -> list[History]:
    begin, end, least, most, kinds, trees, agents = batch
    return [run(seed, least, most, *kinds, trees=trees, agents=agents) for seed in range(begin, end)]


def _watched(batches: Iterable[list[History]], seeds: int) -> Iterator[History]:
    console = Console(stderr=True)
    columns = (
        TextColumn("histories"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[broken]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=seeds, broken="")
        broken = 0
        for histories in batches:
            for history in histories:
                broken += bool(history.broken)
                yield history
            progress.update(task, advance=len(histories), broken=f"[red]{broken} broken" if broken else "")


def _report(
    histories: Iterator[History],
    workers: int,
    members: tuple[int, int],
    kinds: tuple[str, ...],
    trees: bool,
    agents: bool,
) -> int:
    """Print what came of them; returns in how many a promise was broken."""
    began = time.monotonic()
    broken: list[History] = []
    count: collections.Counter[str] = collections.Counter()
    cost: dict[str, float] = collections.defaultdict(float)
    lost = total = views = returns = copies = 0
    virtual = 0.0
    for history in histories:
        total += 1
        count[history.kind] += 1
        cost[history.kind] += history.seconds
        virtual += history.virtual
        views += history.views
        returns += history.returns
        copies += history.copies
        lost += bool(history.ended)
        if history.broken:
            broken.append(history)
    seconds = time.monotonic() - began
    flags = (" --trees" if trees else "") + (" --agents" if agents else "")
    only = (f" --kinds {','.join(kinds)}" if kinds else "") + flags
    for history in sorted(broken, key=lambda history: history.seed)[:_SHOWN]:
        click.echo(f"seed {history.seed} ({history.kind}, {history.members} members): {history.broken}")
        click.echo(f"  ftcomm simulate --replay {history.seed} --members {members[0]}..{members[1]}{only}\n")
    if len(broken) > _SHOWN:
        click.echo(f"and {len(broken) - _SHOWN} more: {', '.join(str(x.seed) for x in broken[_SHOWN:][:100])}\n")
    click.echo(f"{'kind':<12} {'histories':>9} {'ms each':>8}")
    for name in sorted(count):
        click.echo(f"{name:<12} {count[name]:>9} {1000 * cost[name] / count[name]:>8.2f}")
    click.echo(
        f"{total} histories of {virtual / 3600:.1f} hours of virtual time in {seconds:.0f} s, "
        f"{total / seconds:.0f} a second on {workers} {'process' if workers == 1 else 'processes'}: {views} views, "
        f"{returns} returns of ops, {copies} chunks copied from survivors, {lost} jobs lost with all who held the state"
    )
    click.echo(f"{len(broken)} with a broken promise")
    return len(broken)
