"""A device mesh of replicas x ranks of each, for HSDP: the first dimension survives losses, the second lives and dies
with its replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ftcomm.group
from ftcomm.errors import ArgumentError
from ftcomm.torch.create import Dimension


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int] | None = None,
    *,
    mesh_dim_names: Sequence[str] = ("replicate", "shard"),
) -> DeviceMesh:
    """Returns the mesh for `fully_shard(model, mesh=...)`; initialises the process group if there is none.

    mesh_shape: (replicas, ranks of each) of the job, or None for the shape of the job.

    The mesh keeps its shape (`mesh.shape`, `mesh.size(0)`), since torch fixes it, while the group of its first
    dimension follows the job: `mesh.get_group("replicate").size()` is the number of replicas in the step. FSDP asks for
    that at each step, and gradients are averaged over the contributors. (Gradients that FSDP reduces in float16 or
    float64 it divides by itself, by the number at the boundary, also in a step in which a replica is lost or catches
    up.) All ranks call this. It blocks until they have, except in a replica that joins a running job.

    Raises `ArgumentError` if the world is not replicas x ranks of that shape.
    """
    if not dist.is_initialized():
        dist.init_process_group("ftcomm")
    group = ftcomm.group.default_group()
    replicas, shards = len(group.roster), group.shards
    if len(mesh_dim_names) != 2:
        raise ArgumentError(f"mesh_dim_names={tuple(mesh_dim_names)}; expected two, of replicas and of their ranks.")
    if mesh_shape is not None:
        allowed = ((replicas, shards), (group.replicas, shards))
        if tuple(mesh_shape) not in allowed:
            raise ArgumentError(
                f"a mesh of {tuple(mesh_shape)} in a job of {group.replicas} replicas ({replicas} now) of "
                f"{shards} ranks each; expected {allowed[1]}. `ftcomm run --replicas R --ranks-per-replica S` makes a "
                "job for (R, S)."
            )
    rank = dist.get_rank()
    world = torch.arange(replicas * shards).view(replicas, shards)
    groups = [
        dist.new_group(ranks, pg_options=dimension, group_desc=f"mesh_{name}")
        for ranks, dimension, name in (
            (world[:, rank % shards].tolist(), Dimension.REPLICATE, mesh_dim_names[0]),
            (world[rank // shards].tolist(), Dimension.SHARD, mesh_dim_names[1]),
        )
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=world, mesh_dim_names=tuple(mesh_dim_names))
