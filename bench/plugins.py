"""`ftcomm bench plug-ins`: what the integrations of trainers add to a step, beside the plain libraries.

Both train the same tiny model under the same launcher, in turn, so that nearly all of a step is the library:

    plain     the library's own way between the ranks, over gloo: DDP, FSDP2, or the collectives of JAX
    plug-in   ftcomm's integration, each rank a replica; with FSDP2 all ranks are one
    step      forward, backward and update of a transformer that exchanges nothing, as in `ftcomm bench process-group`

The share is (plug-in - plain) / step. Times are of the processor, in all threads of a rank, so that what else the
machine does matters little; they contain what a rank spins while it waits for another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import click
import msgspec

from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import KEPT_LINES, ONE_THREAD, Job, job_options, rank_arguments, tail, written_task
from ftcomm.bench.plugin_rank import TRAINERS, WARM, PluginTask, Took, train
from ftcomm.bench.process_group import MOST_PCT, ProcessGroupRequest, reference_step
from ftcomm.bench.stats import median
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch.commands.option_types import Several

DRIVEN = 600.0  # s for a round whose ranks something else starts


@dataclasses.dataclass(frozen=True)
class PluginsRequest:
    """Time a step of each trainer, by the library alone and with ftcomm's integration, in turn.

    A trainer whose library is not installed is left out. Ray starts processes of its own, which must come up in time.
    """

    trainers: tuple[str, ...] = option(
        tuple(TRAINERS), kind=Several(click.Choice(list(TRAINERS)), "NAME,..."), help="Which ones."
    )
    ranks: int = option(2)
    steps: int = option(1000, "-n", "--steps", kind=click.INT, help=f"In a round; {WARM} more come first.")
    rounds: int = option(5, kind=click.INT, help="So many times plain and plug-in; medians over them.")
    width: int = option(512, help="Of the transformer whose step is the measure; with 8 layers 25 M parameters.")
    layers: int = option(8)

    def smoke(self) -> PluginsRequest:
        """A few steps of each, to see that they run."""
        return PluginsRequest(tuple(name for name in TRAINERS if _there(name)), 2, 10, 1, 16, 1)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        self._reference().check()
        if self.ranks < 2 or min(self.steps, self.rounds) < 1:
            raise SettingsError("--ranks has to be at least 2, -n and --rounds at least 1.")
        if not any(map(_there, self.trainers)):
            raise SettingsError(
                f"none of {', '.join(self.trainers)} is installed: pip install 'ftcomm[hf,jax,lightning,ray]'"
            )

    def _reference(self) -> ProcessGroupRequest:
        return ProcessGroupRequest(self.width, self.layers)

    def step_ms(self) -> float:
        return reference_step(self._reference())


class PluginCost(msgspec.Struct, frozen=True):
    """Medians over the rounds; microseconds of the processor for a step of one rank."""

    trainer: str
    plain_us: float
    plugin_us: float
    added_us: float
    step_ms: float
    share_pct: float  # of the step
    round_plain_us: list[float]
    round_plugin_us: list[float]

    @property
    def good(self) -> bool:
        return self.share_pct <= MOST_PCT


def _there(trainer: str) -> bool:
    return find_spec(TRAINERS[trainer].library) is not None


async def measure(request: PluginsRequest, report: BenchReport) -> None:
    step_ms = request.step_ms()
    names = [name for name in request.trainers if _there(name)]
    for place, name in enumerate(names):
        rounds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(request.rounds):
            for plugin, found in rounds.items():
                done = (place + (number + plugin / 2) / request.rounds) / len(names)
                report.progress(f"{name}, {'plug-in' if plugin else 'plain'}", done)
                found.append(await _round(PluginTask(name, plugin, WARM + request.steps, request.ranks)))
        added = median(rounds[True]) - median(rounds[False])
        report.add(
            PluginCost(
                trainer=name,
                plain_us=median(rounds[False]),
                plugin_us=median(rounds[True]),
                added_us=added,
                step_ms=step_ms,
                share_pct=100 * added / (1000 * step_ms),
                round_plain_us=rounds[False],
                round_plugin_us=rounds[True],
            )
        )


async def _round(task: PluginTask) -> float:
    """Microseconds of the processor for a step, the mean of the ranks."""
    trainer = TRAINERS[task.trainer]
    with written_task(task) as (task, path):
        if trainer.driver is not None:
            await _driven(rank_arguments(trainer.driver, path))
        else:
            replicas, ranks = (1, task.ranks) if task.plugin and trainer.one_replica else (task.ranks, 1)
            options = job_options(rank_arguments(train, path), replicas, ranks_per_replica=ranks, max_restarts=0)
            async with Job(options) as job:
                await job.finish()
                job.finished()
        took = tail(task.folder, task.ranks, Took).read()
    if len(took) != task.ranks:
        raise FtcommError(f"{len(took)} of {task.ranks} ranks have written down what a step of {task.trainer} took")
    return sum(each.step_us for each in took) / len(took)


async def _driven(arguments: Sequence[str]) -> None:
    """Run a process that starts the ranks. Raises `FtcommError`, with its last lines, if it fails or takes too long."""
    command = [sys.executable, "-m", "ftcomm.bench.rank", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, **ONE_THREAD}
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), DRIVEN)
    except asyncio.TimeoutError:
        process.terminate()
        await process.wait()
        raise FtcommError(f"{arguments[0]} has not ended after {DRIVEN:.0f} s") from None
    if process.returncode:
        lines = said.decode(errors="replace").splitlines()[-KEPT_LINES:]
        raise FtcommError(
            f"{arguments[0]} failed (exit code {process.returncode}); its last lines:\n  " + "\n  ".join(lines)
        )


COLUMNS = (
    Column("trainer", "", -13, lambda cost: cost.trainer),
    Column("plain", "(us)", 8, lambda cost: f"{cost.plain_us:.0f}"),
    Column("plug-in", "(us)", 8, lambda cost: f"{cost.plugin_us:.0f}"),
    Column("added", "(us)", 8, lambda cost: f"{cost.added_us:.0f}"),
    Column("step", "(ms)", 8, lambda cost: f"{cost.step_ms:.1f}"),
    Column("of a step", "(%)", 9, lambda cost: f"{cost.share_pct:.3f}"),
)


def footer(costs: Sequence[PluginCost]) -> str:
    missed = [cost.trainer for cost in costs if not cost.good]
    return f"# a plug-in adds {MOST_PCT:g}% of a step at most: {'missed by ' + ', '.join(missed) if missed else 'OK'}"


EXPERIMENT = Experiment(
    "plug-ins",
    PluginsRequest,
    measure,
    (Table("costs", PluginCost, COLUMNS),),
    csv="costs",
    footer=lambda report: [footer(report["costs"])],
)
