"""What the ranks of test trainings run."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import ftcomm
from ftcomm.hsdp import catchup
from ftcomm.hsdp.state import digest
from ftcomm.torch.buckets import GradientBuckets

from ..process.job import Notes


def slow_network(seconds: float) -> None:
    """Every block of a state takes that long to send."""
    send = catchup.send

    def slowly(sock: Any, frame: Any) -> None:
        if isinstance(frame, catchup.Block):
            time.sleep(seconds)
        send(sock, frame)

    catchup.send = slowly


def train(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A training whose every step writes down the digest of the state after it; about 3 MB of state."""
    torch.set_num_threads(1)
    slow_network(arguments.get("slow", 0.0))
    torch.manual_seed(group.replica if group.fresh else 0)  # a joiner starts with other weights
    width = arguments.get("fresh_width", 128) if group.fresh else 128
    model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 1500), nn.GELU(), nn.Linear(1500, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    buckets = GradientBuckets(model, group, bucket_bytes=200_000)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in ftcomm.steps(arguments["steps"], state):
        for settings in optimizer.param_groups:
            settings["weight_decay"] = 0.1 / (1 + step)
        generator = torch.Generator().manual_seed(1000 * step + group.replica)
        x = torch.randn(2, 16, generator=generator)
        model(x).square().mean().backward()
        buckets.wait()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
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
        time.sleep(0.005)


def train_by_hand(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Updates that nobody can replay: the state has no optimizer, so a joiner must have it before its first step."""
    slow_network(0.3)
    model = nn.Linear(300, 300)
    with torch.no_grad():
        model.weight.fill_(group.replica if group.fresh else 0.0)
        model.bias.zero_()
    for step in ftcomm.steps(arguments["steps"], {"model": model}):
        x = model.weight.detach().sin().add(step)
        group.allreduce(x, "avg")
        with torch.no_grad():
            model.weight.sub_(0.01 * x)
        notes.write(kind="step", step=step, digest=digest({"model": model}))
        time.sleep(0.005)


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
