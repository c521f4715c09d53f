"""`ftcomm top`: a running job in the terminal, as the live view shows it."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ftcomm.dashboard.report import lasting
from ftcomm.launch.admin.client import AdminClient, JobEnded, find
from ftcomm.launch.commands.job import job_option
from ftcomm.monitoring.gpu_time import PRICED
from ftcomm.monitoring.interruptions import Interruption
from ftcomm.monitoring.job import GONE, Overview, Point, RowView

STYLES = {"training": "blue", "catching up": "magenta", "starting": "yellow", "away": "bold red", "finished": "cyan"}
LEVELS = ((60_000, "█", "red"), (10_000, "▆", "red"), (1_000, "▄", "yellow"), (100, "▂", "yellow"))  # ms of a wait
BARS = "▁▂▃▄▅▆▇█"


@click.command()
@job_option
@click.option("--every", type=click.FloatRange(min=0.1), default=1.0, show_default=True, metavar="S", help="Seconds.")
@click.option("--once", is_flag=True, help="One look; also when the output is no terminal.")
def top(job: str | None, every: float, once: bool) -> None:
    """Watch a running job in the terminal: ranks and their waits, speed, interruptions and their cost.

    q or Ctrl-C ends it. `ftcomm dashboard` shows more, in a browser.
    """
    console = Console()
    with AdminClient(find(job)) as remote:
        if once or not console.is_terminal:
            console.print(screen(remote.overview(), console.height))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as quits:
            while True:
                try:
                    live.update(screen(remote.overview(), console.height), refresh=True)
                except JobEnded:
                    break
                if quits(every):
                    return
    console.print("the job has ended")


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits for so many seconds and says whether `q` was pressed."""

    def quits(seconds: float) -> bool:
        if not sys.stdin.isatty():
            time.sleep(seconds)
            return False
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(readable) and sys.stdin.read(1) in ("q", "")

    if not sys.stdin.isatty():
        yield quits
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield quits
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def screen(job: Overview, height: int) -> RenderableType:
    """Returns the whole picture, in `height` lines."""
    effective = "-" if job.effective is None else f"{job.effective:.2%}"
    lost = sum(job.uses.get(use.value, 0.0) for use in PRICED)
    facts = Text("   ").join(
        [
            _fact("step", f"{job.step}"),
            _fact("steps/s", f"{job.rate:.2f}"),
            _fact("contribute", f"{job.contributing} of {job.replicas}"),
            _fact("effective", effective),
            _fact("interruptions", str(job.interruptions)),
            _fact("lost", f"{lost:,.1f} GPU-s"),
            _fact("view", str(job.epoch)),
            _fact("up", lasting(job.now - job.began) if job.began else "-"),
        ]
    )
    ranks = Table(box=None, padding=(0, 1), header_style="dim")
    for name, side in (("replica", "right"), ("host", "left"), ("ranks", "left"), ("state", "left"), ("step", "right")):
        ranks.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in job.rows:
        step = str(row.step) if row.step >= 0 else "-"
        ranks.add_row(str(row.replica), Text(row.host, "dim"), cells(row), Text(row.state, STYLES[row.state]), step)
    stands = job.told is not None and not job.told.over
    why = (
        [Text(f"why: {job.told.verdict.who}", "red", no_wrap=True, overflow="ellipsis")]
        if job.told is not None and stands
        else []
    )
    room = max(4, height - len(job.rows) - 9 - len(why))
    interruptions = job.newest[-(room // 2) :][::-1]
    lines = job.events[-(room - len(interruptions)) :][::-1]
    happened = Text("\n".join(f"{_clock(line.at)}  {line.text}" for line in lines), no_wrap=True, overflow="ellipsis")
    heading = Text.assemble(("ftcomm ", "bold"), f"{job.script}, job {job.run}, {job.state}")
    curve = Text(speeds(job.points, 60), "blue")
    return Group(heading, facts, curve, *why, ranks, Text(), _interruptions(interruptions), Text(), happened)


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def _clock(at: float) -> str:
    return datetime.datetime.fromtimestamp(at).strftime("%H:%M:%S")


def cells(row: RowView) -> Text:
    """Returns a character for each cell: its longest wait, `·` if it has none, `x` if a process is missing."""
    text = Text()
    for wait in row.cells:
        if wait == GONE:
            text.append("x", "red")
            continue
        sign, style = next(((sign, style) for least, sign, style in LEVELS if wait >= least), ("·", STYLES[row.state]))
        text.append(sign, style)
    return text


def speeds(points: list[Point], width: int) -> str:
    """Returns the steps a second of the last `width` points as bars."""
    pairs = list(itertools.pairwise(points))[-width:]
    rates = [max(0.0, (b.step - a.step) / (b.at - a.at)) if b.at > a.at else 0.0 for a, b in pairs]
    most = max(rates, default=0.0) or 1.0
    return "".join(BARS[min(int(rate / most * len(BARS)), len(BARS) - 1)] for rate in rates)


def _interruptions(newest: list[Interruption]) -> RenderableType:
    if not newest:
        return Text("no interruption so far", "dim")
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("at", "replica", "cause", "what is known", "out for", "GPU-s"):
        table.add_column(name, justify="right" if name in ("replica", "out for", "GPU-s") else "left", no_wrap=True)
    for each in newest:
        who = str(each.replica) if each.replica >= 0 else "-"
        style = "" if each.over else "red"
        out = Text(lasting(each.absent), style)
        table.add_row(_clock(each.at), who, each.cause.kind.value, each.cause.detail, out, f"{each.gpu_seconds:.2f}")
    return table
