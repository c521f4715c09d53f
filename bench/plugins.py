"""`ftcomm bench plug-ins`: what the integrations of trainers add to a step, beside the plain libraries.

Both train the same tiny model under the same launcher, in turn, so that nearly all of a step is the library:

    plain     the library's own DDP between the ranks, over gloo
    plug-in   ftcomm's integration, each rank a replica
    step      forward, backward and update of a transformer that exchanges nothing, as in `ftcomm bench process-group`

The share is (plug-in - plain) / step. Times are of the processor, in all threads of a rank, so that what else the
machine does matters little; they contain what a rank spins while it waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec

import click
import msgspec

from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import Job, job_options, rank_arguments, tail, written_task
from ftcomm.bench.plugin_rank import TRAINERS, WARM, PluginTask, Took, train
from ftcomm.bench.process_group import MOST_PCT, ProcessGroupRequest, reference_step
from ftcomm.bench.stats import median
from ftcomm.errors import SettingsError
from ftcomm.launch.option_types import Several


@dataclasses.dataclass(frozen=True)
class PluginsRequest:
    """Time a step of each trainer, by the library alone and with ftcomm's integration, in turn.

    A trainer whose library is not installed is left out.
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
            raise SettingsError(f"none of {', '.join(self.trainers)} is installed: pip install 'ftcomm[hf,lightning]'")

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
    return trainer == "steps" or find_spec(trainer) is not None


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
    with written_task(task) as (task, path):
        async with Job(job_options(rank_arguments(train, path), task.ranks, max_restarts=0)) as job:
            await job.finish()
            job.finished()
        took = tail(task.folder, task.ranks, Took).read()
    return sum(each.step_us for each in took) / len(took)


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
