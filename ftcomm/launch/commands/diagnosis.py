"""`ftcomm why` and `ftcomm stragglers`: why a running job stands still, and who makes it slow."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import click
import msgspec
from rich.console import Console
from rich.table import Table

from ftcomm.diagnosis.facts import RankFacts
from ftcomm.diagnosis.slowdown import SlowdownOfGroup
from ftcomm.diagnosis.text import duration, ranks_named
from ftcomm.launch.admin.client import AdminClient, find
from ftcomm.launch.admin.protocol import Status
from ftcomm.launch.diagnose import Diagnosis, diagnose, slowdowns

job_argument = click.argument("job", required=False)


@click.command()
@job_argument
@click.option("--json", "as_json", is_flag=True, help="The verdict and the facts, in one line of JSON.")
@click.option("--stacks", is_flag=True, help="Also the stacks of all threads of all ranks.")
def why(job: str | None, as_json: bool, stacks: bool) -> None:
    """Say why a job stands still: who, since when, in which op, at which line, and what to do.

    JOB is the name of a run, or its beginning; not needed if only one of yours runs here.

    It looks for a third of a second, and for two more if a rank does not answer. It changes nothing. Stacks of
    ranks that are frozen, or have not come to ftcomm.init(), need py-spy: pip install 'ftcomm[stacks]'.
    """
    seen = _status(job)
    with _progress("looking at the ranks", as_json):
        found = diagnose(seen, everybody=stacks)
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    console = Console()
    for line in described(found, everybody=stacks):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def described(found: Diagnosis, *, everybody: bool = False) -> list[str]:
    """Returns a diagnosis in lines: the verdict, then the stacks of the culprits, or of all."""
    lines = found.verdict.sentences(found.facts.at)
    for rank in found.facts.ranks:
        if everybody or rank.rank in found.verdict.culprits:
            lines += _stacks(rank)
    return lines


def _stacks(rank: RankFacts) -> list[str]:
    lines = []
    for thread in rank.stacks.threads:
        lines += ["", f"{ranks_named([rank.rank])}, thread {thread.name or thread.id}:"]
        lines += [f"    {frame}" for frame in thread.frames]
    if rank.stacks.native:
        lines += ["", f"{ranks_named([rank.rank])}, by py-spy:", rank.stacks.native.rstrip()]
    return lines


@click.command()
@job_argument
@click.option("--json", "as_json", is_flag=True, help="A line of JSON.")
def stragglers(job: str | None, as_json: bool) -> None:
    """Show who makes the others wait, over the last minutes: by share of time, compute and network apart.

    JOB is the name of a run, or its beginning; not needed if only one of yours runs here.

    The slowdown of a rank is the time that it takes for a step without waiting for others, over the median of the
    others'. A rank is named only if chance hardly explains it, see docs/observability.md.
    """
    seen = _status(job)
    with _progress("reading what the ranks have recorded", as_json):
        groups = slowdowns(seen)
    if as_json:
        click.echo(msgspec.json.encode(groups))
        return
    console = Console()
    if not groups:
        console.print("No two ranks of a group have recorded steps yet.", highlight=False)
    for group in groups:
        show_slowdown(group, console)


def show_slowdown(group: SlowdownOfGroup, console: Console) -> None:
    named = [one for one in group.ranks if one.named]
    console.print(f"group {group.group!r}, {group.steps} steps in {duration(group.seconds)}", highlight=False)
    table = Table()
    for name in ("rank", "host", "rack", "slowdown", "waited for", "by the network", ""):
        table.add_column(name, justify="left" if name in ("rank", "host", "rack", "") else "right")
    for one in group.ranks[:20]:
        said = {"compute": "slow", "network": "slow network"}.get(one.named, "")
        shares = f"{one.share:.1%}", f"{one.network:.1%}"
        table.add_row(ranks_named([one.rank]), one.host, one.rack, f"{one.slowdown:.2f}", *shares, said)
    console.print(table)
    for what, shares_of in (("host", group.hosts), ("rack", group.racks)):
        if len(shares_of) > 1:
            console.print(f"by {what}: {', '.join(f'{n} {s:.1%}' for n, s in shares_of[:8])}", highlight=False)
    for one in named:
        how = "computes longer than the others" if one.named == "compute" else "has a slow network"
        since = f"since step {one.since}"
        console.print(f"{ranks_named([one.rank])} {how}, {since}: slowdown {one.slowdown:.2f}.", highlight=False)
    if not named and group.ranks:
        console.print("Nobody is slower than the others by more than chance explains.", highlight=False)


def _status(job: str | None) -> Status:
    with AdminClient(find(job)) as remote:
        return remote.status()


def _progress(text: str, quiet: bool) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if quiet else Console(stderr=True).status(text)
