"""What the ranks of the tests of replicas with groups of another backend inside run."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ftcomm
from ftcomm.errors import ArgumentError, InitError
from ftcomm.torch.mesh import init_device_mesh
from ftcomm.torch.own_world import own_world
from ftcomm.training import StepLoop
from ftcomm.training.state import digest

from ..process.job import Notes
from .bodies import outlast
from .fsdp_bodies import batch, loss_of


class Network(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clone()  # FSDP's hooks need no view


def two_dimensions_inside(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """FSDP2 x TP over gloo in each of two replicas, with activations that are computed anew and accumulated gradients,
    in a training that a replica may join."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", {"replica": 2, "shard": 2, "tp": 2}, inner="gloo")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (group.shard, 4, "gloo")
    assert mesh["shard", "tp"]._flatten("all").size() == 4
    with pytest.raises(ArgumentError, match="sizes whose product is 4"):
        init_device_mesh("cpu", {"replica": 2, "tp": 2}, inner="gloo")
    with pytest.raises(InitError, match="has a process group already"):
        init_device_mesh("cpu", inner="other")
    torch.manual_seed(0 if group.contributes else 1)  # who joins takes over the weights of the others
    block = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 2))
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = Network(checkpoint_wrapper(block))
    fully_shard(model, mesh=mesh["replica", "shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    for step in ftcomm.steps(arguments["steps"], state):
        optimizer.zero_grad()
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            loss_of(model, batch(2 * step + part, 2 * group.replica + mesh.get_local_rank("shard"))).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.full_tensor().isfinite()
        optimizer.step()
        notes.write(kind="step", step=step, digest=digest(state) if group.contributes else "")
        time.sleep(0.05)
    notes.write(kind="final", digest=digest(state), contributes=group.contributes)
    dist.destroy_process_group()


def pipeline_inside(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A pipeline of two compiled stages, each FSDP2 over two ranks, in each of two replicas; gloo inside. The loss is
    scaled, and every third step overflows. A replica that comes back does not know the scale."""
    torch.set_num_threads(1)
    outlast(3, Path(arguments["marks"]) / "go")  # so that updates with several scales are kept
    mesh = init_device_mesh("cpu", {"replica": 2, "pp": 2, "shard": 2}, inner="gloo")
    stage = mesh.get_local_rank("pp")
    torch.manual_seed(stage if group.contributes else 2)
    block: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    fully_shard(block, mesh=mesh["replica", "shard"])
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0 if group.contributes else 4.0, growth_interval=2)
    compiled = torch.compile(block, backend=arguments["backend"])

    def scaled_loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = scaler.scale((y - target).square().mean())
        return loss * (math.inf if step % 3 == 2 else 1.0)

    schedule = Schedule1F1B(
        PipelineStage(compiled, stage, 2, torch.device("cpu"), group=mesh.get_group("pp")), 2, loss_fn=scaled_loss
    )
    state = {"model": block, "optimizer": optimizer, "scaler": scaler}
    for step in ftcomm.steps(arguments["steps"], state):
        optimizer.zero_grad()
        scaler.scale(torch.zeros(()))  # makes the scale where there is no loss
        x = batch(step, 2 * group.replica + mesh.get_local_rank("shard"))
        schedule.step(*([x] if stage == 0 else []), **({"target": torch.zeros(4, 8)} if stage == 1 else {}))
        scaler.step(optimizer)
        scaler.update()
        scale = scaler.get_scale()
        notes.write(kind="step", step=step, digest=digest(state) if group.contributes else "", scale=scale)
        time.sleep(0.05)
    notes.write(kind="final", digest=digest(state), contributes=group.contributes)
    dist.destroy_process_group()


def three_dimensions_inside(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A pipeline of two stages, each tensor parallel and FSDP2 over two ranks of a dimension, in each of the replicas;
    gloo inside. Both micro-batches of a step go through all of it."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", {"replica": group.replicas, "pp": 2, "shard": 2, "tp": 2}, inner="gloo")
    stage, part = mesh.get_local_rank("pp"), mesh.get_local_rank("shard")
    # Who joins takes over the weights of the others.
    torch.manual_seed(stage if group.contributes else 2)
    block = Network(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(block, mesh=mesh["replica", "shard"])
    # Not AdamW: DTensor searches for a way to do each new kind of op, the longer the more dimensions a mesh has.
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01, momentum=0.9)
    schedule = Schedule1F1B(
        PipelineStage(block, stage, 2, torch.device("cpu"), group=mesh.get_group("pp")),
        2,
        loss_fn=nn.functional.mse_loss,
    )
    state = {"model": block, "optimizer": optimizer}
    for step in ftcomm.steps(arguments["steps"], state):
        optimizer.zero_grad()
        x = batch(step, 2 * group.replica + part)
        schedule.step(*([x] if stage == 0 else []), **({"target": torch.zeros(4, 8)} if stage == 1 else {}))
        assert all(parameter.grad is not None for parameter in block.parameters())
        optimizer.step()
        notes.write(kind="step", step=step, digest=digest(state) if group.contributes else "")
        time.sleep(0.05)
    notes.write(kind="final", digest=digest(state), contributes=group.contributes)
    dist.destroy_process_group()


class Stuck(dist.ProcessGroup):  # type: ignore[misc]
    """A backend whose collectives end by `abort` alone, as those of NCCL do when a member is lost."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._aborted = threading.Event()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self._aborted.wait()
        raise RuntimeError("the communicator was aborted")

    def abort(self) -> None:
        self._aborted.set()

    def getBackendName(self) -> str:
        return "stuck"


def stuck_inside(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Replica 0 stands in a collective of its own that does not end."""
    dist.Backend.register_backend("stuck", lambda opts, _: Stuck(opts.group_rank, opts.group_size), True, ["cpu"])
    own_world("stuck")
    loop = StepLoop(repeat_on=(RuntimeError,))
    for step in loop.steps(arguments["steps"]):
        if group.replica == 0 and step == 2:
            notes.write(kind="stuck")
            with loop.guard():
                dist.all_reduce(torch.ones(1))
        x = torch.ones(1)
        ftcomm.allreduce(x)
        notes.write(kind="step", step=step, sum=x.item())
