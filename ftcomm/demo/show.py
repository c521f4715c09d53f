"""`ftcomm demo`: train, kill a replica inside an all-reduce, watch the others go on and the killed one come back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import platform
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import ftcomm
from ftcomm.control.messages import Event
from ftcomm.demo.kill import Kill, kill_in_mid_op
from ftcomm.demo.story import Story, named
from ftcomm.errors import FtcommError
from ftcomm.launch import Launcher, RunOptions, run
from ftcomm.launch.listen import LOOPBACK, Listen
from ftcomm.recorder.files import folders
from ftcomm.recorder.reader import SUFFIX, RecordingError, read

STYLES = {
    "starting": "yellow",
    "waiting to join": "yellow",
    "catching up": "magenta",
    "training": "green",
    "killed": "bold red",
    "dead": "bold red",
    "finished": "cyan",
}
VALIDATE_EVERY = 20  # steps; the kill comes between two validations, whose all-reduce is of a single number
SPARKS = "▁▂▃▄▅▆▇█"


@click.command()
@click.option("--replicas", type=click.IntRange(2, 16), default=4, show_default=True, help="Replicas, a process each.")
@click.option("--steps", type=click.IntRange(60), default=400, show_default=True, help="Training steps.")
@click.option("--seed", type=int, default=None, help="Of weights, data and victim.  [default: drawn, and printed]")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Where the picture and the record of the run go.",
)
@click.option("--no-live", is_flag=True, help="Plain lines; also when the output is no terminal.")
def demo(replicas: int, steps: int, seed: int | None, out: Path, no_live: bool) -> None:
    """Train a small language model in several replicas on this machine and kill one of them.

    The model learns the source text of the Python standard library. At a third of the run a replica gets SIGKILL in
    the middle of an all-reduce; the others finish that all-reduce and train on; the killed one is started again and
    catches up. At the end all replicas must hold the same weights, to the last bit.

    Exit code: 0 if all of that happened, 1 if not, 3 after an interruption.
    """
    seed = secrets.randbelow(10_000) if seed is None else seed
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    try:
        code = asyncio.run(Demo(replicas, steps, seed, out, console).run(live=console.is_terminal and not no_live))
    except FtcommError as error:
        raise click.ClickException(str(error)) from None
    raise SystemExit(code)


class Demo:
    """One run, on one event loop."""

    def __init__(self, replicas: int, steps: int, seed: int, out: Path, console: Console) -> None:
        self.seed, self.out, self.console = seed, out, console
        self.story = Story(replicas, steps)
        self.victim = random.Random(seed).randrange(replicas)
        self.kill_at = steps // 3 // VALIDATE_EVERY * VALIDATE_EVERY + VALIDATE_EVERY // 2
        self.said = 0  # entries of the log, and tenths of the run, that have been printed
        self.printed = 0
        self.started = time.monotonic()
        self.killing: asyncio.Task[None] | None = None

    async def run(self, live: bool) -> int:
        """Run the job and report on it; returns the exit code of `ftcomm demo`."""
        self.out.mkdir(parents=True, exist_ok=True)
        arguments = {"steps": self.story.total, "seed": self.seed, "validate-every": VALIDATE_EVERY}
        options = RunOptions(
            replicas=len(self.story.replicas),
            script="ftcomm.demo.train",
            module=True,
            args=tuple(f"--{k}={v}" for k, v in arguments.items()),
            log_dir=self.out / "ranks",
            history=self.out / "history.sqlite",
            dashboard=Listen(LOOPBACK, 0),
            env={"OMP_NUM_THREADS": "1", "FTCOMM_LOG": "warning"},
        )
        self._lines: list[str] = []
        self._launcher = launcher = Launcher(options, self._on_event, self._on_line, self._on_log)
        with self._view(live):
            code = await launcher.run(handle_signals=True)
            if self.killing is not None:
                await self.killing
        if code in (run.DRAINED, run.KILLED):
            self.console.print(f"interrupted at step {self.story.step + 1} of {self.story.total}")
            return code
        if self.story.began is None:
            self.console.print(f"[bold red]no step was made[/]; all output of the replicas is in {self.out / 'ranks'}")
            self._print_last_lines()
            return 1
        story = self.story
        story.recorded = next((x for x in launcher.overview().newest if x.replica == story.victim), None)
        missing = self._missing(code)
        self.console.print(self._table())
        self._write(missing)
        for text in missing:
            self.console.print(f"[bold red]missing:[/] {text}")
        if missing:
            self._print_last_lines()
        return 1 if missing else 0

    # -- what happens ------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        self.story.event(event)
        if self.killing is None and event["kind"] == "report" and event.get("step", 0) >= self.kill_at:
            self.killing = asyncio.ensure_future(self._kill())

    def _on_line(self, replica: int, rank: int, line: str) -> None:
        self._lines = [*self._lines[-50:], f"[{replica}] {line}"]

    def _on_log(self, line: str) -> None:
        """Print the address of the live view; of the launcher's other lines the story tells in its words."""
        if line.startswith("live view: "):
            self.console.print(line, markup=False, soft_wrap=True)

    async def _kill(self) -> None:
        pids = {number: replica.pid for number, replica in self.story.replicas.items()}
        loop = asyncio.get_running_loop()

        def announce(kill: Kill) -> None:
            loop.call_soon_threadsafe(self.story.killed, self.victim, kill)

        victim = pids.pop(self.victim)
        await asyncio.to_thread(kill_in_mid_op, victim, pids.values(), announce)
        with contextlib.suppress(RecordingError, StopIteration):  # it lies there as long as the run does
            path = next(folders()[self._launcher.run_id].glob(f"*.pid-{victim}{SUFFIX}"))
            self.story.recorded_op(await asyncio.to_thread(read, path))

    def _print_last_lines(self) -> None:
        for line in self._lines[-15:]:
            self.console.print(line, markup=False, soft_wrap=True)

    # -- what is shown -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _view(self, live: bool) -> Iterator[None]:
        story = self.story
        self.console.print(
            f"[bold]ftcomm demo[/]: {len(story.replicas)} replicas, {story.total} steps, seed {self.seed}; replica "
            f"{self.victim} will be killed inside an all-reduce after step {self.kill_at}"
        )
        with contextlib.ExitStack() as stack:
            show = self._print_lines
            if live:
                screen = stack.enter_context(Live(self._screen(), console=self.console, auto_refresh=False))
                show = lambda: screen.update(self._screen(), refresh=True)  # noqa: E731
            task = asyncio.ensure_future(_repeat(show, 0.1 if live else 0.5))
            try:
                yield
            finally:
                task.cancel()
                show()

    def _print_lines(self) -> None:
        """New entries of the log, and how far the training is about every tenth of it."""
        story = self.story
        for at, text in story.log[self.said :]:
            self.console.print(f"{at:7.2f} s  {text}", markup=False, soft_wrap=True)
        self.said = len(story.log)
        tenth = (story.step + 1) * 10 // story.total
        if tenth > self.printed:
            self.printed = tenth
            self.console.print(self._progress(), markup=False, soft_wrap=True)

    def _progress(self) -> str:
        story, losses = self.story, self.story.losses()
        validation = f", validation {story.validation[max(story.validation)]:.3f}" if story.validation else ""
        now = story.seconds(time.monotonic())
        return (
            f"{now:7.2f} s  step {story.step + 1} of {story.total}, loss {losses[-1][1]:.3f}{validation}, "
            f"{story.rate(now):,.0f} tokens/s"
        )

    def _screen(self) -> RenderableType:
        story = self.story
        table = Table(box=None, padding=(0, 2), expand=False)
        for column in ("replica", "state", "step", "loss", "pid"):
            table.add_column(column, justify="left" if column == "state" else "right", style="", header_style="dim")
        for number, replica in story.replicas.items():
            loss = "" if math.isnan(replica.loss) else f"{replica.loss:.3f}"
            state = Text(f"● {replica.state}".ljust(17), STYLES[replica.state])
            table.add_row(str(number), state, str(replica.step + 1), loss, str(replica.pid or ""))
        losses = [value for _, value in story.losses()]
        over = story.step + 1 >= story.total
        elapsed = max(story.ended.values()) if over else story.seconds(time.monotonic())
        facts = Table.grid(padding=(0, 2))
        facts.add_row(
            "[dim]step[/]", f"{story.step + 1} of {story.total}", ProgressBar(story.total, story.step + 1, width=40)
        )
        facts.add_row("[dim]loss[/]", f"{losses[-1]:.3f}" if losses else "", Text(sparkline(losses, 40), "blue"))
        validation = [value for _, value in sorted(story.validation.items())]
        facts.add_row(
            "[dim]validation[/]",
            f"{validation[-1]:.3f}" if validation else "",
            Text(sparkline(validation, 40), "yellow"),
        )
        facts.add_row("[dim]tokens/s[/]", f"{story.rate(elapsed):,.0f}", f"[dim]view[/] {story.epoch}")
        room = max(3, self.console.height - len(story.replicas) - 12)
        lines = [f"{at:6.2f} s  {text}" for at, text in story.log[-room:]]
        log = Text("\n".join(lines) or "starting ...", no_wrap=True, overflow="ellipsis")
        return Group(
            Panel(Group(table, Text(), facts), title="ftcomm demo", title_align="left", border_style="dim"),
            Panel(log, title="what happens", title_align="left", border_style="dim"),
        )

    def _table(self) -> Table:
        table = Table(
            title="What the kill cost", title_justify="left", title_style="bold", show_header=False, min_width=60
        )
        table.add_column(style="dim")
        table.add_column()
        for name, value in self.results().items():
            table.add_row(name, value)
        return table

    def results(self) -> dict[str, str]:
        """The lines of the final table."""
        story = self.story
        unknown = "?"

        def ms(value: float | None) -> str:
            return unknown if value is None else f"{value:.1f} ms"

        stalls, kill, fetched, lost = story.stalls_ms(), story.kill, story.fetched, story.steps_lost()
        validation = [value for _, value in sorted(story.validation.items())]
        elapsed = max(story.ended.values(), default=0.0)
        return {
            "recorded as": self._recorded(),
            "killed": unknown
            if kill is None
            else f"replica {self.victim}, inside an all-reduce of step {self._step_of_kill()}",
            "detected after": ms(story.detect_ms()),
            "op resumed after": ms(story.resume_ms()),
            "stall of the survivors": ", ".join(f"{stall:.1f} ms" for stall in stalls.values()) or unknown,
            "steps lost": f"{lost} (each survivor reported all {story.total})" if lost == 0 else str(lost),
            "replica back": unknown if story.rejoined_at is None else self._back(),
            "fetched for catch-up": unknown
            if fetched is None
            else f"{fetched['bytes'] / 1e6:.2f} MB in {fetched['seconds']:.2f} s from {named(fetched['sources'])}",
            "stall of a source": ms(max((s["seconds"] * 1000 for s in story.snapshots), default=None)),
            "weights equal on all replicas": self._equal(),
            "validation loss": f"{validation[0]:.3f} -> {validation[-1]:.3f}" if validation else unknown,
            "tokens/s": f"{sum(n for _, n in story.tokens) / elapsed:,.0f}" if elapsed else unknown,
            "time in all": f"{time.monotonic() - self.started:.1f} s, training {elapsed:.1f} s",
        }

    def _step_of_kill(self) -> int:
        assert self.story.kill is not None
        before = self.story.seconds(self.story.kill.at)
        return sum(at <= before for at in self.story.ended.values())

    def _back(self) -> str:
        again = self.story.contributes_again
        text = f"joined at step {self.story.rejoined_at}"
        return text + (f", contributes from step {again} on" if again is not None else "")

    def _recorded(self) -> str:
        found = self.story.recorded
        if found is None:
            return "?"
        parts = ", ".join(f"{phase} {amount:.2f}" for phase, amount in found.price.items() if amount >= 0.005)
        return f"{found.cause.kind.value}, {found.cause.detail}; {found.gpu_seconds:.2f} GPU-s ({parts})"

    def _equal(self) -> str:
        hashes = self.story.hashes
        if self.story.equal():
            return f"yes ({next(iter(hashes.values()))})"
        return "no: " + (", ".join(f"replica {n}: {value}" for n, value in sorted(hashes.items())) or "none reported")

    def _missing(self, code: int) -> list[str]:
        """Returns what should have happened and did not."""
        story = self.story
        checks = {
            f"the job ended with exit code {code}": code != 0,
            "the interruption was not recorded": story.recorded is None,
            f"replica {self.victim} could not be killed inside an all-reduce": story.kill is None,
            "the loss was not detected": story.detected is None,
            "not every survivor reported that it resumed its all-reduce": story.resume_ms() is None,
            "the killed replica did not rejoin (was the run over too soon? try more --steps)": story.rejoined_at
            is None,
            "the killed replica fetched no state": story.fetched is None,
            "the killed replica did not contribute again": story.contributes_again is None,
            f"steps lost: {story.steps_lost()}": story.steps_lost() != 0,
            "the weights are not equal on all replicas": not story.equal(),
        }
        return [text for text, missing in checks.items() if missing]

    def _write(self, missing: list[str]) -> None:
        record, picture = self.out / "run.json", self.out / "run.png"
        record.write_text(json.dumps(self._record(missing), indent=1, default=str) + "\n")
        try:
            from ftcomm.demo.plot import draw

            draw(self.story, picture)
        except ImportError:
            self.console.print(
                f"the record is in {record}; for a picture install matplotlib: pip install 'ftcomm\\[plot]'"
            )
            return
        self.console.print(f"picture: {picture}   record: {record}   output of the replicas: {self.out / 'ranks'}")

    def _record(self, missing: list[str]) -> dict[str, Any]:
        story = self.story
        return {
            "ftcomm": ftcomm.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "replicas": len(story.replicas),
            "steps": story.total,
            "seed": self.seed,
            "victim": self.victim,
            "kill": dataclasses.asdict(story.kill) if story.kill else None,
            "results": self.results(),
            "victim_in": story.victim_in,
            "missing": missing,
            "log": [[round(at, 4), text] for at, text in story.log],
            "marks": [dataclasses.asdict(mark) for mark in story.marks],
            "resumed": story.resumed,
            "fetched": story.fetched,
            "snapshots": story.snapshots,
            "hashes": story.hashes,
            "train": [[step, round(story.ended[step], 4), round(loss, 5)] for step, loss in story.losses()],
            "validation": sorted(story.validation.items()),
        }


async def _repeat(action: Any, seconds: float) -> None:
    while True:
        action()
        await asyncio.sleep(seconds)


def sparkline(values: list[float], width: int) -> str:
    """Returns `values` as bars, averaged down to `width` of them."""
    if not values:
        return ""
    count = min(width, len(values))
    cells = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(cell) / len(cell) for cell in cells]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(int((mean - low) / span * len(SPARKS)), len(SPARKS) - 1)] for mean in means)
