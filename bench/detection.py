"""`ftcomm bench detection`: kill one rank after the other, anywhere in its step, and time until that is known.

A rank is a training as the kernel sees it: steps that compute on one thread, then wait for each other in an all-reduce,
in a process with torch and the memory of a model, which the kernel has to take apart when it is killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import click
import msgspec

import ftcomm
from ftcomm.bench.checks import check_at_least_one, check_memory, check_replicas
from ftcomm.bench.harness import SIZE, Column, Experiment, Report, Table, figure_text, option
from ftcomm.bench.job import FOREVER, observed
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, percentile
from ftcomm.errors import SettingsError
from ftcomm.settings import TRANSPORTS

RANK_MEMORY = 400 << 20  # bytes of a rank before any array
RUN_IN = 0.2  # s at least of training with all replicas before the next kill
WIDTH = 256  # of the matrices; a product takes a millisecond


@dataclasses.dataclass(frozen=True)
class Request:
    """Kill ranks of a training anywhere in its steps, and time until the coordinator knows.

    Counted from the call of kill(2): `detect` until the coordinator has heard of the loss, `view` until it has decided
    on the view without the replica and has that on the disk. Everything that lies between is counted: that the victim
    gets a core to die on, that the one who notices gets one to say so. The next kill comes when all train again.
    """

    replicas: int = option(4, help="What is lost as one.")
    ranks_per_replica: int = option(2, help="Processes of each.")
    size: int = option(4 << 20, kind=SIZE, help="Array of the all-reduce of a step (fp32).")
    compute_ms: float = option(50.0, "--compute", help="Milliseconds of computing in a step.")
    memory: int = option(256 << 20, kind=SIZE, help="Of each rank's model, torch not counted.")
    kills: int = option(100, help="SIGKILLs, one rank after the other.")
    transport: str = option("auto", kind=click.Choice(TRANSPORTS), help="Of ftcomm.")
    seed: int = option(0, help="Of the points in a step at which they come.")

    def smoke(self) -> Request:
        """One kill of two replicas, to see that it runs."""
        return Request(2, 2, 1 << 20, 5.0, 8 << 20, 1, self.transport, self.seed)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_replicas(self.replicas)
        check_at_least_one("--ranks-per-replica", self.ranks_per_replica)
        check_at_least_one("--kills", self.kills)
        if self.compute_ms < 0:
            raise SettingsError(f"--compute {self.compute_ms}: expected 0 (all-reduces back to back) or more.")
        if not 4 * WIDTH * WIDTH <= self.size <= self.memory:
            raise SettingsError(
                f"--size {format_size(self.size)}: expected at least {format_size(4 * WIDTH * WIDTH)}, and no more "
                f"than --memory {format_size(self.memory)}."
            )
        ranks = self.replicas * self.ranks_per_replica
        need = ranks * (RANK_MEMORY + self.memory + self.size)
        check_memory(f"{ranks} ranks of {format_size(self.memory)}", need, "--replicas or --memory")


class Event(msgspec.Struct, frozen=True):
    """One kill. Milliseconds since the SIGKILL was sent; None where that did not happen within the patience."""

    number: int
    replica: int
    rank: int
    detect_ms: float | None  # the coordinator has heard of it
    view_ms: float | None  # the coordinator has decided on the view without it, and that is on the disk
    how: str  # the reason that the coordinator heard first


class Summary(msgspec.Struct, frozen=True):
    kills: int
    detected: int
    detect_ms: dict[str, float]  # p50, p90, p99, max
    view_ms: dict[str, float]


def summarize(events: Sequence[Event]) -> Summary:
    def spread(values: list[float]) -> dict[str, float]:
        if not values:
            return {}
        return {
            "p50": median(values),
            "p90": percentile(values, 90),
            "p99": percentile(values, 99),
            "max": max(values),
        }

    detected = [event.detect_ms for event in events if event.detect_ms is not None]
    views = [event.view_ms for event in events if event.view_ms is not None]
    return Summary(len(events), len(detected), spread(detected), spread(views))


async def measure(request: Request, report: Report) -> None:
    """Kill a rank, and the next when all are back. Raises `FtcommError` when the job fails or a replica does not come
    back; no process is left, however this ends."""
    chance = random.Random(request.seed)
    task = Task(request.size // 4, request.compute_ms / 1e3, request.memory)
    shape: dict[str, Any] = dict(ranks_per_replica=request.ranks_per_replica, transport=request.transport)
    mark = 0
    async with observed(rank, task, Event, request.replicas, **shape) as job:
        for number in range(request.kills):
            report.progress(f"kill {number + 1} of {request.kills}", number / request.kills)
            await job.until("all replicas train together", lambda mark=mark: job.full_view(mark) is not None)  # type: ignore[misc]
            await asyncio.sleep(RUN_IN + chance.uniform(0, max(RUN_IN, 8 * request.compute_ms / 1e3)))
            replica, victim = number % request.replicas, number // request.replicas % request.ranks_per_replica
            mark = len(job.events)
            killed = job.kill(replica, victim)
            await job.until("its loss is known", lambda m=mark, r=replica: job.view_without(r, m) is not None)  # type: ignore[misc]
            view = job.view_without(replica, mark)
            suspects = [event for event in job.said("suspect", mark) if event["replica"] == replica]
            report.add(event_of(number, replica, victim, killed, view, suspects))
        await job.until("all replicas train together", lambda: job.full_view(mark) is not None)


def event_of(
    number: int,
    replica: int,
    rank: int,
    killed: float,
    view: dict[str, Any] | None,
    suspects: Sequence[dict[str, Any]],
) -> Event:
    first = suspects[0] if suspects else view
    return Event(
        number=number,
        replica=replica,
        rank=rank,
        detect_ms=None if first is None else (first["mono"] - killed) * 1e3,
        view_ms=None if view is None else (view["mono"] - killed) * 1e3,
        how="" if first is None else str(first.get("reason", first.get("why", ""))),
    )


COLUMNS = (
    Column("kill", "", 4, lambda event: str(event.number + 1)),
    Column("replica", "", 8, lambda event: str(event.replica)),
    Column("rank", "", 5, lambda event: str(event.rank)),
    Column("detect", "(ms)", 10, lambda event: figure_text(event.detect_ms)),
    Column("view", "(ms)", 10, lambda event: figure_text(event.view_ms)),
    Column("  how", "", -3, lambda event: f"  {event.how}"),
)


def footer(summary: Summary) -> list[str]:
    spreads = summary.detect_ms, summary.view_ms
    lines = [
        f"# {name:>4} {'':>14} " + " ".join(f"{figure_text(spread.get(name)):>10}" for spread in spreads)
        for name in ("p50", "p90", "p99", "max")
    ]
    return [*lines, f"# detected: {summary.detected} of {summary.kills}"]


EXPERIMENT = Experiment(
    "detection",
    Request,
    measure,
    [Table("events", Event, COLUMNS)],
    summary=lambda report: {"summary": summarize(report["events"])} if report["events"] else {},
    footer=lambda report: footer(summarize(report["events"])),
)


# -- in a rank ---------------------------------------------------------------------------------------------------------


class Task(msgspec.Struct, frozen=True):
    count: int  # fp32 elements of the gradient
    compute: float  # seconds of computing in a step
    memory: int  # bytes of the model and its optimizer
    folder: str = ""


def rank(task: Task) -> None:
    import torch

    torch.set_num_threads(1)
    ftcomm.init()
    gradient = torch.ones(task.count)
    model = torch.ones(task.memory // 4)
    left, right = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    for _ in ftcomm.steps(FOREVER):
        end = time.thread_time() + task.compute
        while time.thread_time() < end:
            torch.mm(left, right, out=gradient[: WIDTH * WIDTH].view(WIDTH, WIDTH))
        ftcomm.allreduce(gradient, "avg")
        model[: task.count] += gradient
    ftcomm.shutdown()
