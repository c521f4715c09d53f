"""What the ranks of the tests of FSDP2 and HSDP run."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ftcomm
from ftcomm.torch.mesh import init_device_mesh
from ftcomm.training.state import digest

from ..process.job import Notes
from .ddp_bodies import wait_for_go


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def alone(steps: int, ranks: Any) -> list[list[float]]:
    """The weights when one process trains with the batches of `ranks(step)` in one."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, batch(step, rank)) / len(ranks(step)) for rank in ranks(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def hsdp(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """`fully_shard` over replicas x shards; at one step a replica is not there any more."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (3, 2))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    replicate, shard = mesh.get_group("replicate"), mesh.get_group("shard")
    kept = dist.get_process_group_ranks(shard)  # ranks of the world, which are others when a replica is lost
    for step in ftcomm.steps(arguments["steps"]):
        if step == arguments["dies_at"] and group.replica == arguments["victim"]:
            os.kill(os.getpid(), signal.SIGKILL)
        notes.write(kind="size", step=step, replicate=replicate.size(), world=dist.get_world_size())
        knows_its_ranks(shard, group, kept)
        optimizer.zero_grad()
        loss_of(model, batch(step, 2 * group.replica + group.shard)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert isinstance(norm, DTensor)
        optimizer.step()
    weights = [p.full_tensor().flatten().tolist() for p in model.parameters()]
    notes.write(kind="final", weights=weights)


def knows_its_ranks(shard: dist.ProcessGroup, group: ftcomm.Group, kept: list[int]) -> None:
    """The group within this replica has the ranks of the world that it has now, and knows those `kept` from before."""
    first = dist.get_rank() - group.shard
    assert dist.get_process_group_ranks(shard) == [first, first + 1]
    assert dist.get_rank(shard) == group.shard
    assert [dist.get_global_rank(shard, rank) for rank in (0, 1)] == [first, first + 1]
    for root in (first, kept[0]):
        x = torch.tensor([float(group.replica if group.shard == 0 else -1)])
        dist.broadcast(x, src=root, group=shard)
        assert x.item() == group.replica
    told = [group.replica if group.shard == 1 else None]
    dist.broadcast_object_list(told, group=shard, group_src=1)
    assert told == [group.replica]


def fsdp(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """`fully_shard` over the ranks of one replica, as FSDP2 alone is used, without our mesh."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(arguments["steps"]):
        optimizer.zero_grad()
        loss_of(model, batch(step, group.shard)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    notes.write(kind="final", weights=[p.full_tensor().flatten().tolist() for p in model.parameters()])
    dist.destroy_process_group()


def hsdp_with_state(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A training that a replica may join: each rank takes its shards from its likes."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(group.replica)  # taken over from the others by who joins
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 2))
    if group.contributes:
        model.load_state_dict(nn.Sequential(*(m for i, m in enumerate(network()) if i not in (2, 3))).state_dict())
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    if not group.contributes:
        wait_for_go(notes, arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    shard = mesh.get_group("shard")
    kept = dist.get_process_group_ranks(shard)
    for step in ftcomm.steps(arguments["steps"], state):
        knows_its_ranks(shard, group, kept)
        optimizer.zero_grad()
        loss_of(model, batch(step, 2 * group.replica + group.shard)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        notes.write(kind="step", step=step, digest=digest(state) if group.contributes else "")
        time.sleep(0.05)
    notes.write(kind="final", digest=digest(state), contributes=group.contributes)
