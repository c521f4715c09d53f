"""`ftcomm status`, `restart` and `resize`: look at a running job, and change its replicas while it trains on."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import time

import click
import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ftcomm.launch.admin import protocol
from ftcomm.launch.admin.client import AdminClient, JobEnded, find, running
from ftcomm.launch.commands import resizing, rolling_restart
from ftcomm.launch.commands.confirmation import confirm, yes_option
from ftcomm.launch.event_text import replicas as named
from ftcomm.monitoring.rank_waits import RecordedWaits
from ftcomm.recorder.files import FOLDER

WIDTH = 120  # columns of a table that goes to no terminal

job_option = click.option("--job", metavar="RUN", help="Which job; not needed if only one of yours runs here.")
_timeout_option = functools.partial(
    click.option, "--timeout", type=float, default=300.0, metavar="S", show_default=True
)


@click.command()
@job_option
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each job.")
@click.option("--watch", type=click.FloatRange(min=0.01), metavar="S", help="Every S seconds, until all have ended.")
def status(job: str | None, as_json: bool, watch: float | None) -> None:
    """Show a running job: who is in it, where, at which step, who waits for others, and what happened last.

    A job is found by the name of its run, or the beginning of it; without --job all of yours on this machine are shown.
    The fields of the JSON are those of `ftcomm.launch.admin.protocol.Status`.
    """
    console = Console()
    if not console.is_terminal:  # which has a width of its own
        console.width = WIDTH
    paths = [find(job)] if job is not None or not running() else list(running().values())
    waits = {path: RecordedWaits(path.parent / FOLDER) for path in paths}
    for again in itertools.count():
        for path in tuple(paths):
            try:
                with AdminClient(path) as remote:
                    seen = with_waits(remote.status(), waits[path])
            except JobEnded:
                if not again:
                    raise
                paths.remove(path)
                continue
            if as_json:
                click.echo(msgspec.json.encode(seen))
            else:
                show(seen, console)
        if watch is None or not paths:
            return
        time.sleep(watch)


def with_waits(seen: protocol.Status, waits: RecordedWaits) -> protocol.Status:
    """Returns the status with what the recordings on this host say, which the launcher does not read."""
    of: dict[int, dict[str, float]] = {}
    for (replica, rank), seconds in sorted(waits.now().items()):
        of.setdefault(replica, {})[str(rank)] = round(seconds, 3)
    replicas = [msgspec.structs.replace(each, waits=of.get(each.replica, {})) for each in seen.replicas]
    return msgspec.structs.replace(seen, replicas=replicas)


def show(seen: protocol.Status, console: Console) -> None:
    """Print a status. Hosts are a column if there are several, and waits if anybody waits."""
    doing = "the coordinator is being restarted" if seen.away else "draining" if seen.draining else "running"
    rows = [_row(replica) for replica in seen.replicas]
    hosts = {row["host"] for row in rows}
    left_out = {"host"} if len(hosts) == 1 else set()
    left_out |= {"waits"} if all(row["waits"] == "-" for row in rows) else set()
    shown = Table()
    for name in rows[0]:
        if name not in left_out:
            shown.add_column(name, justify="left" if name in ("host", "state", "in the job") else "right")
    for row in rows:
        shown.add_row(*(text for name, text in row.items() if name not in left_out))
    on = f" on {hosts.pop()}" if left_out >= {"host"} and hosts != {"-"} else ""
    console.print(f"job {seen.run} ({seen.script}){on}, {doing}, epoch {seen.epoch}", markup=False, soft_wrap=True)
    console.print(shown)
    for replica in seen.replicas:
        if replica.reason:
            console.print(f"replica {replica.replica} is out: {replica.reason}", markup=False, soft_wrap=True)
    console.print(f"last: {seen.last}", markup=False, soft_wrap=True)


def _row(replica: protocol.ReplicaStatus) -> dict[str, str]:
    """Returns the cells of a replica by their columns."""
    place = "contributes" if replica.contributes else "catches up" if replica.member else replica.joining or "-"
    pids = " ".join(str(pid) for _, pid in sorted(replica.pids.items(), key=lambda item: int(item[0])))
    return {
        "replica": str(replica.replica),
        "host": replica.host or "-",
        "state": replica.state,
        "in the job": place,
        "for": str(datetime.timedelta(seconds=round(max(0.0, time.time() - replica.since)))),
        "step": str(replica.step) if replica.step >= 0 else "-",
        "waits": _longest(replica.waits),
        "effective": "-" if replica.effective is None else f"{replica.effective:.0%}",
        "starts": str(replica.starts),
        "pids": pids or "-",
    }


def _longest(waits: dict[str, float]) -> str:
    """Returns for how long the rank that waits longest has done so, and which it is if there are several."""
    shard, seconds = max(waits.items(), key=lambda wait: wait[1], default=("", 0.0))
    if not seconds:
        return "-"
    return f"{seconds:.1f} s" if len(waits) == 1 else f"{seconds:.1f} s (shard {shard})"


@click.command()
@job_option
@click.option("--replica", "replicas", type=int, multiple=True, metavar="N", help="This one; may be given repeatedly.")
@click.option("--all", "all_of_them", is_flag=True, help="All of them, one after the other.")
@_timeout_option(
    help="Seconds within which a replica must contribute again; else this stops, and leaves the others alone."
)
@yes_option
def restart(job: str | None, replicas: tuple[int, ...], all_of_them: bool, timeout: float, yes: bool) -> None:
    """Restart replicas one by one while the others train on.

    Each leaves at a step boundary, so that no step is lost; its processes end and are started again, with the script as
    it is now; when it has caught up and contributes, the next one follows. A replica that has left (SIGTERM) or failed
    is started again by the same command.

    It refuses while no other replica contributes: the state of the training would be lost. With --all it names the job
    and asks first.
    """
    with AdminClient(find(job)) as remote, contextlib.ExitStack() as stack:
        seen = remote.status()
        wanted = rolling_restart.which(seen, replicas, all_of_them)
        if all_of_them:
            confirm(seen, "Restart all of its replicas", "ftcomm restart --all", named=job is not None, yes=yes)
        columns = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn()
        progress = stack.enter_context(Progress(*columns))
        bars = {number: progress.add_task(f"replica {number}", start=False, total=1) for number in wanted}
        for number in wanted:
            bar = bars[number]
            progress.start_task(bar)
            rolling_restart.restart(
                remote,
                number,
                timeout,
                functools.partial(_tell, progress, bar, number),
            )
            progress.update(bar, description=f"replica {number} contributes again", completed=1)


@click.command()
@click.argument("count", metavar="N", type=click.IntRange(min=1))
@job_option
@_timeout_option(
    help="Seconds within which N replicas must contribute and the others be gone; the job goes on in any case."
)
@yes_option
def resize(count: int, job: str | None, timeout: float, yes: bool) -> None:
    """Let N replicas of a running job train: fewer than now, or more again.

    With fewer, those with the highest numbers leave at a step boundary, so that no step is lost, and their processes
    end; the others train on. With more, those that are away are started again and catch up while the others train. At
    most as many as the job was started with (`ftcomm run --replicas`).

    Where replicas would leave, it names the job and asks first.
    """
    with AdminClient(find(job)) as remote:
        seen = remote.status()
        if leaving := resizing.who_leaves(seen, count):
            what = f"Let {named(leaving)} leave"
            confirm(seen, what, f"ftcomm resize {count}", named=job is not None, yes=yes)
        with Progress(SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn()) as shown:
            bar = shown.add_task(f"{count} replicas", total=1)
            resizing.resize(remote, count, timeout, lambda text: shown.update(bar, description=text))
            shown.update(bar, description=f"{named(range(count))} contribute", completed=1)


def _tell(progress: Progress, bar: TaskID, number: int, text: str) -> None:
    progress.update(bar, description=f"replica {number} {text}")
