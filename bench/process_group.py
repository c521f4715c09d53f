"""`ftcomm bench process-group`: what torch's process group costs on top of ftcomm's own calls, as a share of a step.

One process, and no other rank: beneath the process group lies a group whose ops are over at once, so all that is
measured is the layer between torch and ftcomm.

    group     the calls of the group beneath, as a script without torch makes them
    plug-in   the same calls through the process group: as `dist.all_reduce` makes them and waits, and as DDP does,
              which takes a future; the thread that gives futures their values counts, too
    step      forward, backward and update of a model under DDP that exchanges nothing (`no_sync`), the least that a
              step takes

A step calls one all-reduce for each bucket of DDP; the share is (plug-in - group) * buckets / step. Times are those of
the processor in this process, of all its threads, so what else the machine does hardly matters. A step with one thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, option
from ftcomm.bench.stats import median
from ftcomm.bench.train import CONTEXT
from ftcomm.demo.model import Transformer
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.groups.calls import Span
from ftcomm.torch.process_group import FtProcessGroup

MOST_PCT = 1.0  # of a step


@dataclasses.dataclass(frozen=True)
class ProcessGroupRequest:
    """Time what the process group adds to each all-reduce of a step of DDP, against the whole step.

    In one process, over a group whose ops are over at once. Times are of the processor, so other work on the machine
    hardly matters.
    """

    width: int = option(512, help="Of the transformer; with 8 layers 25 M parameters.")
    layers: int = option(8)
    batch: int = option(2, help="Sequences of 64 bytes in a step.")
    iterations: int = option(2000, "-n", "--iters", kind=click.INT, help="Ops in a round.")
    rounds: int = option(9, help="So many times one after the other; medians over them.")

    def smoke(self) -> ProcessGroupRequest:
        """A tiny model and a few ops, to see that it runs."""
        return ProcessGroupRequest(16, 1, 1, 20, 2)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if self.width % 8 or self.width < 8 or min(self.layers, self.batch, self.iterations, self.rounds) < 1:
            raise SettingsError("--width has to be a multiple of 8, --layers, --batch, -n and --rounds at least 1.")


class LayerCost(msgspec.Struct, frozen=True):
    """The cost of one way to call an all-reduce. Medians over the rounds; microseconds of the processor for each op."""

    way: str
    group_us: float
    plugin_us: float
    added_us: float
    ops_per_step: int
    step_ms: float
    share_pct: float  # of the step
    round_added_us: list[float]

    @property
    def good(self) -> bool:
        return self.share_pct <= MOST_PCT


class _Over:
    """The result of an op that is over."""

    contributors = (Span(0, 1, (0, 1)),)

    def wait(self, timeout: float | None = None) -> None:
        pass

    def done(self) -> bool:
        return True


class _Beneath:
    """A group of two whose ops do nothing."""

    roster, rank, op_timeout = (0, 1), 0, 1.0
    _over = _Over()

    def __init__(self) -> None:
        self.ops = 0

    def allreduce(self, x: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        self.ops += 1
        return self._over if async_op else x

    def allgather(self, out: torch.Tensor, x: torch.Tensor, *, async_op: bool = False) -> Any:
        out.view(2, -1).copy_(x.view(1, -1).expand(2, -1))
        return self._over if async_op else out

    def broadcast(self, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        return self._over if async_op else x

    broadcast_state = broadcast


def measure(request: ProcessGroupRequest, report: BenchReport) -> None:
    torch.set_num_threads(1)
    beneath = _Beneath()
    group = FtProcessGroup(beneath, 10.0, name="bench")
    step_ms, buckets = _step(request, group, beneath)
    bucket = torch.zeros(1024)

    def alone() -> None:
        beneath.allreduce(bucket)

    def started() -> None:
        beneath.allreduce(bucket, async_op=True).wait()

    def waited() -> None:
        group.allreduce([bucket], options).wait()

    def future() -> None:
        futures.append(group.allreduce([bucket], asynchronous).get_future())

    options, asynchronous = dist.AllreduceOptions(), dist.AllreduceOptions()
    options.asyncOp, asynchronous.asyncOp = False, True
    futures: list[Any] = []

    def end() -> None:
        torch.futures.wait_all(futures)
        futures.clear()

    for number, (way, less, more) in enumerate((("waits", alone, waited), ("takes a future", started, future))):
        report.progress(way, (1 + number) / 3)
        rounds = []
        for _ in range(request.rounds):
            group_us = _times(request.iterations, less, end)
            rounds.append((group_us, _times(request.iterations, more, end)))
        added = [more - less for less, more in rounds]
        report.add(
            LayerCost(
                way=way,
                group_us=median([less for less, _ in rounds]),
                plugin_us=median([more for _, more in rounds]),
                added_us=median(added),
                ops_per_step=buckets,
                step_ms=step_ms,
                share_pct=100 * median(added) * buckets / (1000 * step_ms),
                round_added_us=added,
            )
        )
    group.shutdown()


def _times(count: int, call: Callable[[], None], end: Callable[[], None]) -> float:
    """Microseconds of the processor for each of so many calls."""
    started = time.process_time()
    for _ in range(count):
        call()
    end()
    return 1e6 * (time.process_time() - started) / count


class _Training:
    """A transformer that is trained on one batch."""

    def __init__(self, request: ProcessGroupRequest) -> None:
        torch.manual_seed(0)
        self.model = Transformer(request.width, request.layers, 8, CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randint(0, 256, (request.batch, CONTEXT + 1))

    def step(self, wrapped: Callable[..., torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        wrapped(self.batch).backward()
        self.optimizer.step()

    def times(self, rounds: int, wrapped: Callable[..., torch.Tensor]) -> float:
        """Milliseconds of the processor for a step."""
        times = []
        for _ in range(rounds):
            started = time.process_time()
            self.step(wrapped)
            times.append(1000 * (time.process_time() - started))
        return median(times)


def reference_step(request: ProcessGroupRequest) -> float:
    """Milliseconds of the processor for a step without DDP, with one thread."""
    torch.set_num_threads(1)
    training = _Training(request)
    training.step(training.model)
    return training.times(request.rounds, training.model)


def _step(request: ProcessGroupRequest, group: FtProcessGroup, beneath: _Beneath) -> tuple[float, int]:
    """Milliseconds of the processor for a step that exchanges nothing, and how often one that does calls the group."""
    training = _Training(request)
    parallel = DistributedDataParallel(training.model, process_group=group)
    training.step(parallel)
    before = beneath.ops
    training.step(parallel)
    buckets = beneath.ops - before
    if not buckets:
        raise FtcommError("DDP called no all-reduce in a step; is this another version of torch?")
    with parallel.no_sync():
        return training.times(request.rounds, parallel), buckets


COLUMNS = (
    Column("way", "", -15, lambda cost: cost.way),
    Column("group", "(us)", 8, lambda cost: f"{cost.group_us:.2f}"),
    Column("plug-in", "(us)", 8, lambda cost: f"{cost.plugin_us:.2f}"),
    Column("added", "(us)", 8, lambda cost: f"{cost.added_us:.2f}"),
    Column("ops", "/step", 6, lambda cost: str(cost.ops_per_step)),
    Column("step", "(ms)", 8, lambda cost: f"{cost.step_ms:.1f}"),
    Column("of a step", "(%)", 9, lambda cost: f"{cost.share_pct:.3f}"),
)


def footer(costs: Sequence[LayerCost]) -> str:
    missed = [cost.way for cost in costs if not cost.good]
    found = f"missed where it {', '.join(missed)}" if missed else "OK"
    return f"# the process group adds {MOST_PCT:g}% of a step at most: {found}"


EXPERIMENT = Experiment(
    "process-group",
    ProcessGroupRequest,
    measure,
    (Table("costs", LayerCost, COLUMNS),),
    csv="costs",
    footer=lambda report: [footer(report["costs"])],
)
