"""One rank of `ftcomm bench train`: python -m ftcomm.bench.train_rank TASK_FILE, under the launcher.

With rounds, DDP over each library in turn, A B A B, in the same process on the same weights: the time of whole steps,
forward to update. "none" is DDP that exchanges nothing (`no_sync`), the least that a step can take.

Without, one training under the step loop, which goes on until the job is drained, for the command to kill replicas of;
every step that is done is written down.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftcomm
from ftcomm.demo.model import Transformer
from ftcomm.hsdp import Replica
from ftcomm.hsdp.state import digest

FOREVER = 1 << 40  # steps
CONTEXT = 64  # bytes of a sequence


class Task(msgspec.Struct, frozen=True):
    width: int  # of the model
    layers: int
    batch: int  # sequences of a replica
    folder: str  # each replica appends its records to replica-N.jsonl here
    libraries: tuple[str, ...] = ()
    rounds: int = 0
    iterations: int = 0  # timed steps of a round


class Timed(msgspec.Struct, frozen=True):
    """Steps of one library on one rank, back to back; seconds."""

    replica: int
    library: str
    round: int
    times: list[float]


class Step(msgspec.Struct, frozen=True):
    """An attempt at a step, of a replica. `end` is of `time.monotonic()`, one clock for all processes of a host."""

    replica: int
    pid: int
    step: int
    end: float
    committed: bool
    contributes: bool


class Writer:
    """Appends records; one write a line, so that a reader, or the next process of this replica, sees no half of one."""

    def __init__(self, task: Task, replica: int) -> None:
        self._file = (Path(task.folder) / f"replica-{replica}.jsonl").open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def write(self, record: msgspec.Struct) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")


def read_task(argv: list[str]) -> Task:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)


def build(task: Task) -> Transformer:
    return Transformer(task.width, task.layers, 8, CONTEXT)


def batch(task: Task, step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(0, 256, (task.batch, CONTEXT + 1), generator=generator)


def main(argv: list[str]) -> None:
    task = read_task(argv)
    # What takes long comes first: from the moment at which a replica has joined, the others wait for its steps.
    model = build(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(batch(task, 0, 0)).backward()
    dist.init_process_group("ftcomm")
    group = ftcomm.default_group()
    writer = Writer(task, group.replica)
    if task.rounds:
        compare(task, group, writer, model, optimizer)
    else:
        train(task, group, writer, model, optimizer)
    dist.destroy_process_group()


def compare(
    task: Task, group: ftcomm.Group, writer: Writer, model: Transformer, optimizer: torch.optim.Optimizer
) -> None:
    wrapped = {"none": DistributedDataParallel(model), "ftcomm": DistributedDataParallel(model)}
    if "gloo" in task.libraries:
        wrapped["gloo"] = DistributedDataParallel(model, process_group=_gloo(task, group.replica, len(group.members)))
    for number in range(-1, task.rounds):  # the first is to warm up: DDP orders its buckets in it
        for library in task.libraries:
            times = []
            for iteration in range(task.iterations):
                x = batch(task, iteration, group.replica)
                group.allreduce(torch.zeros(1))  # all begin together
                started = time.perf_counter()
                _step(wrapped[library], optimizer, x, library != "none")
                times.append(time.perf_counter() - started)
            if number >= 0:
                writer.write(Timed(group.replica, library, number, times))


def _step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: torch.Tensor, reduce: bool = True
) -> None:
    optimizer.zero_grad()
    if reduce:
        model(x).backward()
    else:
        with model.no_sync():
            model(x).backward()
    optimizer.step()


def _gloo(task: Task, rank: int, ranks: int) -> dist.ProcessGroup:
    store = dist.FileStore(f"{task.folder}/rendezvous", ranks)
    group = dist.ProcessGroup(store, rank, ranks)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, ranks, timedelta(minutes=5))
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def train(
    task: Task, group: ftcomm.Group, writer: Writer, model: Transformer, optimizer: torch.optim.Optimizer
) -> None:
    state = {"model": model, "optimizer": optimizer}
    parallel = DistributedDataParallel(model)
    note = noting(writer, group.replica)
    replica = Replica(state)
    for step in replica.steps(FOREVER):
        optimizer.zero_grad()
        parallel(batch(task, step, group.replica)).backward()
        optimizer.step()
        note(step, replica.commit(), group.contributes)
    group.report(final_hash=digest(state), contributes=group.contributes)


def noting(writer: Writer, replica: int) -> Callable[[int, bool, bool], None]:
    return lambda step, committed, contributes: writer.write(
        Step(replica, os.getpid(), step, time.monotonic(), committed, contributes)
    )


if __name__ == "__main__":
    main(sys.argv)
