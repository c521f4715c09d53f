"""`ftcomm report`: what interrupted jobs, what it cost, and which hosts to take out of service."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ftcomm.errors import SettingsError
from ftcomm.launch.event_text import counted
from ftcomm.monitoring.gpu_time import PRICED
from ftcomm.monitoring.history import HistoryFile, JobRecord
from ftcomm.monitoring.history_path import VARIABLE, default_path
from ftcomm.monitoring.interruptions import Interruption
from ftcomm.monitoring.statistics import Statistics, statistics

UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
BAR = 32  # characters


class ReportAnswer(msgspec.Struct, frozen=True):
    """The JSON of the command."""

    statistics: Statistics
    jobs: list[JobRecord]
    interruptions: list[tuple[str, Interruption]]


def seconds(text: str) -> float:
    """Returns the seconds of `90m`, `12h`, `7d` or `2w`. Raises `SettingsError`."""
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip())) is None:
        raise SettingsError(f"--since {text}: expected a time such as 90m, 12h, 7d or 2w.")
    return float(found.group(1)) * UNITS[found.group(2)]


@click.command()
@click.option(
    "--history", type=click.Path(path_type=Path), metavar="FILE", help="The history.  [default: FTCOMM_HISTORY]"
)
@click.option("--job", metavar="RUN", help="Only jobs whose name begins so.")
@click.option("--since", metavar="TIME", help="Only the last 90m, 12h, 7d or 2w.")
@click.option("--list", "listed", is_flag=True, help="Each interruption, too, with its price by phase.")
@click.option("--json", "as_json", is_flag=True, help="All of it as JSON.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw it (PNG, SVG, PDF)."
)
def report(
    history: Path | None, job: str | None, since: str | None, listed: bool, as_json: bool, plot: Path | None
) -> None:
    """Tell what interrupted jobs, what it cost, and which hosts to take out of service.

    Categories are those of table 5 of the Llama 3 report (arXiv 2407.21783). A rank counts as one GPU. The effective
    training time is the share of all GPU-seconds since the first view in which nobody waited for a failure, was away or
    caught up; what happens inside a step (data, stragglers) is not in it. A host is named if it failed more often
    than chance explains: an even fleet is wronged in at most one of a hundred reports.
    """
    path = history or default_path()
    if path is None:
        raise SettingsError(f"{VARIABLE}=off, so there is no history; name one: --history FILE.")
    opened = HistoryFile(path, write=False)
    try:
        after = 0.0 if since is None else time.time() - seconds(since)
        jobs = [each for each in opened.jobs(after) if each.run.startswith(job or "")]
        runs = {each.run for each in jobs}
        interruptions = [(run, each) for run, each in opened.interruptions(after) if run in runs]
    finally:
        opened.close()
    if job is not None and not jobs:
        raise SettingsError(f"--job {job}: no job in {path} has a name that begins so.")
    found = statistics(jobs, [each for _, each in interruptions])
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(ReportAnswer(found, jobs, interruptions))))
    else:
        show(found, interruptions if listed else (), Console())
    if plot is not None:
        draw(found, interruptions, plot)
        click.echo(f"drawn: {plot}", err=True)


def show(found: Statistics, interruptions: Sequence[tuple[str, Interruption]], console: Console) -> None:
    """Print the statistics."""
    effective = "-" if found.effective is None else f"{found.effective:.2%}"
    mtbf = "-" if found.mtbf is None else lasting(found.mtbf)
    console.print(
        f"{counted(found.jobs, 'job')}, {lasting(found.seconds)}, {found.gpu_seconds / 3600:,.2f} GPU-hours; "
        f"effective training time {effective}; {counted(found.unplanned, 'unplanned interruption')} (MTBF "
        f"{mtbf}), {found.planned} planned",
        soft_wrap=True,
    )
    if found.categories:
        console.print(_categories(found))
        console.print(_phases(found))
    if found.hosts:
        console.print(_hosts(found))
    for row in found.hosts:
        if row.suspect:
            often = f"{row.failures} failures in {lasting(row.seconds)}, by chance {row.chance:.1e}"
            console.print(Text(f"take {row.host} out of service: {often}", "bold red"))
    for run, each in interruptions:
        console.print(_line(run, each), markup=False, soft_wrap=True)


def _categories(found: Statistics) -> Table:
    table = Table(title="Interruptions", title_justify="left", title_style="bold")
    for name in ("component", "category", "count", "share", "", "GPU-s"):
        table.add_column(name, justify="right" if name in ("count", "share", "GPU-s") else "left")
    for row in found.categories:
        share = "planned" if row.planned else f"{row.share:.1%}"
        bar = "" if row.planned else "█" * max(1, round(row.share * BAR))
        table.add_row(row.component, row.category, str(row.count), share, Text(bar, "blue"), f"{row.gpu_seconds:,.2f}")
    return table


def _phases(found: Statistics) -> Table:
    table = Table(title="What they cost", title_justify="left", title_style="bold")
    for name in ("phase", "GPU-s", "share", ""):
        table.add_column(name, justify="right" if name in ("GPU-s", "share") else "left")
    for use in PRICED:
        amount = found.phases.get(use.value, 0.0)
        share = amount / found.lost if found.lost else 0.0
        table.add_row(use.value, f"{amount:,.2f}", f"{share:.1%}", Text("█" * round(share * BAR), "blue"))
    return table


def _hosts(found: Statistics) -> Table:
    table = Table(title="Hosts", title_justify="left", title_style="bold")
    for name in ("host", "observed", "failures", "interruptions", "MTBF"):
        table.add_column(name, justify="left" if name == "host" else "right")
    for row in found.hosts:
        mtbf = "-" if row.mtbf is None else lasting(row.mtbf)
        style = "bold red" if row.suspect else ""
        table.add_row(row.host, lasting(row.seconds), str(row.failures), str(row.interruptions), mtbf, style=style)
    return table


def _line(run: str, each: Interruption) -> str:
    at = datetime.datetime.fromtimestamp(each.at).isoformat(" ", "seconds")
    who = "a connection" if each.replica < 0 else f"replica {each.replica}"
    where = f" on {each.host}" if each.host else ""
    phases = ", ".join(f"{name} {amount:.2f}" for name, amount in each.price.items() if amount >= 0.005)
    out = lasting(each.absent) + ("" if each.back else ", and not back" if each.over else " so far")
    cost = f"{each.gpu_seconds:.2f} GPU-s" + (f" ({phases})" if phases else "")
    return f"{at}  job {run[:8]}, {who}{where}: {each.cause.kind.value}, {each.cause.detail}; out for {out}; {cost}"


def lasting(seconds: float) -> str:
    """Returns `0.42 s`, `3:05` or `2 d 01:00:00`."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    text = str(datetime.timedelta(seconds=round(seconds)))
    return text.removeprefix("0:") if seconds < 3600 else text


def draw(found: Statistics, interruptions: Sequence[tuple[str, Interruption]], path: Path) -> None:
    """Draw counts by component, costs by phase, and when they came. Raises `SettingsError` without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise SettingsError("--plot needs matplotlib: pip install 'ftcomm[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (counts, costs, times) = plt.subplots(1, 3, figsize=(13, 3.6), dpi=130, layout="constrained")
        rows = [row for row in reversed(found.categories) if not row.planned]
        counts.barh([row.component for row in rows], [row.count for row in rows], color="#2f6fb0", height=0.6)
        counts.set_title("unplanned interruptions", loc="left")
        costs.barh(
            [use.value for use in reversed(PRICED)],
            [found.phases.get(use.value, 0.0) for use in reversed(PRICED)],
            color="#e07b24",
            height=0.6,
        )
        costs.set_title("GPU-seconds by phase", loc="left")
        first = min((each.at for _, each in interruptions), default=0.0)
        times.scatter(
            [(each.at - first) / 60 for _, each in interruptions],
            [max(each.gpu_seconds, 1e-3) for _, each in interruptions],
            s=14,
            color="#c8323c",
        )
        times.set(yscale="log", xlabel="minutes since the first")
        times.set_title("GPU-seconds of each", loc="left")
        figure.savefig(path)
        plt.close(figure)
