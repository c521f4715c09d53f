"""What the ranks of test trainings run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ftcomm
from ftcomm.torch.buckets import GradientBuckets
from ftcomm.training import StepLoop, catchup
from ftcomm.training.entries import ValueEntry
from ftcomm.training.state import digest

from ..process.job import Notes


def slow_network(seconds: float) -> None:
    """Every block of a state takes that long to send."""
    send = catchup.send

    def slowly(sock: Any, frame: Any) -> None:
        if isinstance(frame, catchup.BlockHeader):
            time.sleep(seconds)
        send(sock, frame)

    catchup.send = slowly


def outlast(steps: float, go: Path) -> None:
    """No block of a state is sent before its source has done that many steps more, or has come to the end of its loop,
    or the test says `go`: however slow the steps are, the transfer is slower."""
    send, source, due = catchup.send, catchup.StateSource, threading.local()
    at_boundary, linger, answer = source.at_boundary, source.linger, source._answer
    here, ended = -1, False

    def pass_boundary(self: Any, step: int, view: Any) -> None:
        nonlocal here
        at_boundary(self, step, view)
        here = step

    def come_to_the_end(self: Any, seconds: float) -> None:
        nonlocal ended
        ended = True
        linger(self, seconds)

    def answer_from(self: Any, sock: Any, step: int, joiner: Any) -> None:
        due.step = step + steps
        answer(self, sock, step, joiner)

    def send_late(sock: Any, frame: Any) -> None:
        while isinstance(frame, catchup.BlockHeader) and here < due.step and not ended and not go.exists():
            send(sock, catchup.Wait())
            time.sleep(0.05)
        send(sock, frame)

    source.at_boundary, source.linger, source._answer = pass_boundary, come_to_the_end, answer_from
    catchup.send = send_late


def steps_until_told(
    group: ftcomm.Group, arguments: dict[str, Any], state: dict[str, Any], loop: StepLoop | None = None
) -> Iterator[int]:
    """As `ftcomm.steps`, or those of `loop`; they end for all after the step in which one sees the file `over`."""
    over, total = Path(arguments["marks"]) / "over", arguments["steps"]
    loop = StepLoop(state, group, vote=False) if loop is None else loop
    try:
        while (step := loop.begin(total)) is not None:
            told = torch.tensor([float(over.exists())])
            group.allreduce(told, "max")
            if told.item():
                total = min(total, step + 1)
            yield step
    finally:
        loop.close()


def train(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A training whose every step writes down the digest of the state after it; about 3 MB of state."""
    torch.set_num_threads(1)
    slow_network(arguments.get("slow", 0.0))
    outlast(arguments.get("outlast", 0), Path(arguments["marks"]) / "go")
    torch.manual_seed(group.replica if not group.contributes else 0)  # a joiner starts with other weights
    width = arguments.get("fresh_width", 128) if not group.contributes else 128
    model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 1500), nn.GELU(), nn.Linear(1500, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    buckets = GradientBuckets(model, group, bucket_bytes=200_000)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in steps_until_told(group, arguments, state):
        for settings in optimizer.param_groups:
            settings["weight_decay"] = 0.1 / (1 + step)
        generator = torch.Generator().manual_seed(1000 * step + group.replica)
        x = torch.randn(2, 16, generator=generator)
        model(x).square().mean().backward()
        buckets.wait()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if arguments.get("strays") and not group.contributes:
            optimizer.step()  # which the others do not
        scheduler.step()
        buckets.zero_grad()
        # the digest of a member that catches up may be behind, so it is no evidence
        notes.write(kind="step", step=step, digest=digest(state) if group.contributes else "")
        time.sleep(arguments.get("pace", 0.0))
    notes.write(kind="final", digest=digest(state), contributes=group.contributes)


def train_without_state(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Nothing to catch up with; a replica that joins counts as soon as it can."""
    x = torch.empty(1000)
    for step in ftcomm.steps(arguments["steps"]):
        x.fill_(2.0**group.replica)
        group.allreduce(x)
        notes.write(kind="step", step=step, digest=str(x[0].item()))
        time.sleep(0.02)


def train_by_hand(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Updates that nobody can replay: the state has no optimizer, so a joiner must have it before its first step."""
    slow_network(0.3)
    model = nn.Linear(300, 300)
    with torch.no_grad():
        model.weight.fill_(group.replica if not group.contributes else 0.0)
        model.bias.zero_()
    for step in ftcomm.steps(arguments["steps"], {"model": model}):
        x = model.weight.detach().sin().add(step)
        group.allreduce(x, "avg")
        with torch.no_grad():
            model.weight.sub_(0.01 * x)
        notes.write(kind="step", step=step, digest=digest({"model": model}))
        time.sleep(0.02)


def data_parallel(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Gradients of a batch that is split over the replicas, with a parameter that every third step leaves out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.ModuleDict({"in": nn.Linear(8, 32), "side": nn.Linear(8, 32), "out": nn.Linear(32, 1)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buckets = GradientBuckets(model, group, bucket_bytes=1000)
    for step in ftcomm.steps(arguments["steps"]):
        batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        parallel_loss(model, batch[group.replica :: 3], step).backward()
        buckets.wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    notes.write(kind="final", weights=[p.flatten().tolist() for p in model.parameters()])


def parallel_loss(model: nn.ModuleDict, batch: torch.Tensor, step: int) -> torch.Tensor:
    hidden = model["in"](batch) + (model["side"](batch) if step % 3 else 0)
    return model["out"](hidden.tanh()).square().mean()


class Codebook(nn.Module):
    """Keeps what no optimizer updates: averages over all replicas in buffers, as SyncBatchNorm and codebooks do, a slow
    copy of its weights in a frozen parameter, and what each replica has by itself, as BatchNorm does."""

    def __init__(self, group: ftcomm.Group) -> None:
        super().__init__()
        self._group = group
        self.into, self.out = nn.Linear(16, 64), nn.Linear(64, 4)
        self.slow = nn.Parameter(torch.zeros(64, 16), requires_grad=False)
        self.own = nn.BatchNorm1d(64, affine=False)
        self.register_buffer("means", torch.zeros(64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(1000.0))
        self.register_buffer("unsaved", torch.zeros(64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x)
        with torch.no_grad():
            mean = hidden.mean(0)
            self._group.allreduce(mean, "avg")
            self.means.lerp_(mean, 0.1)
            self.calls += 1
            self.unsaved += mean
            self.slow.lerp_(self.into.weight, 0.1)
        return self.out((self.own(hidden) - self.means + self.unsaved + x @ self.slow.T).tanh())


def train_what_no_optimizer_updates(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    outlast(arguments["outlast"], Path(arguments["marks"]) / "go")
    torch.manual_seed(0)
    model = Codebook(group)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    buckets = GradientBuckets(model, group)
    state = {"model": model, "optimizer": optimizer}

    def digest_of_all() -> str:
        whole = {**model.state_dict(), "unsaved": model.unsaved}
        held = {name: value for name, value in whole.items() if not name.startswith("own.running")}
        return digest({"model": ValueEntry(held), "optimizer": optimizer})

    for step in steps_until_told(group, arguments, state):
        generator = torch.Generator().manual_seed(1000 * step + group.replica)
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        buckets.wait()
        optimizer.step()
        buckets.zero_grad()
        notes.write(kind="step", step=step, digest=digest_of_all() if group.contributes else "")
    notes.write(kind="final", digest=digest_of_all(), contributes=group.contributes)
