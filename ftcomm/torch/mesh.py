"""A device mesh whose first dimension is the replicas, which may be lost, and whose others lie within a replica, whose
ranks live and die together.

    inner        the world of torch          the first dimension
    "ftcomm"     all ranks of all replicas   as large as the job
    "nccl" ...   the ranks of this replica   1 in torch's eyes, since it does not know the others
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

import ftcomm.groups.default_group
from ftcomm.errors import ArgumentError
from ftcomm.groups.group import Group
from ftcomm.torch.create import Dimension
from ftcomm.torch.own_world import across, own_world, usual_backend


def init_device_mesh(
    device_type: str,
    mesh_shape: Mapping[str, int] | Sequence[int] | None = None,
    *,
    mesh_dim_names: Sequence[str] | None = None,
    inner: str = "ftcomm",
) -> DeviceMesh:
    """Returns the mesh for `fully_shard`, `parallelize_module` and so on; initialises torch's process group.

    mesh_shape: {"replica": R, "shard": S, "tp": T, ...}, or the sizes alone: the replicas of the job, and any number of
        dimensions of the ranks of each, whose product is `--ranks-per-replica`. None: (replicas, ranks of each).
    mesh_dim_names: the names of sizes; default ("replicate", "shard").
    inner: the backend of the groups within a replica: "ftcomm", or one of torch's own, "nccl" or "gloo". "nccl"
        includes gloo for tensors on the CPU; where torch sees no GPU it is gloo.

    With "nccl" or "gloo" the world of torch is this replica, ranks 0 to S*T - 1 (`dist.get_rank()`,
    `dist.get_world_size()`), and what the script makes of groups and meshes lies within it. Between replicas there is
    the group of the first dimension, and `ftcomm.allreduce` and so on. In the mesh the first dimension has size 1; so
    do not flatten it together with others. An error inside, or the loss of a rank, aborts the groups inside and takes
    this replica away, while others train on; `StepLoop.guard` repeats no step then.

    In any case `mesh.get_group("replica").size()` is the number of replicas in the step, which torch's FSDP asks for at
    each step, and gradients are averaged over the contributors. (Gradients that FSDP reduces in float16 or float64 it
    divides by itself, by the number at the boundary, also in a step in which a replica is lost or catches up.)

    All ranks call this. It blocks until they have, except in a replica that joins a running job. Raises `ArgumentError`
    if the job does not have that shape, and `InitError` if `inner` is another backend and the process has a process
    group already, that `dist.init_process_group` has made.
    """
    if isinstance(mesh_shape, Mapping):
        if mesh_dim_names is not None:
            raise ArgumentError("mesh_dim_names with a mesh_shape that names its dimensions; leave it out.")
        mesh_dim_names, mesh_shape = tuple(mesh_shape), tuple(mesh_shape.values())
    names = ("replicate", "shard") if mesh_dim_names is None else tuple(mesh_dim_names)
    if inner == "ftcomm":
        if not dist.is_initialized():
            dist.init_process_group("ftcomm")
        group = ftcomm.groups.default_group.default_group()
    else:
        group = own_world(usual_backend() if inner == "nccl" else inner)
    shape = _shape(group, mesh_shape, names)
    return _over_replicas(device_type, shape, names) if inner == "ftcomm" else _within(device_type, shape, names)


def _over_replicas(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    world = torch.arange(math.prod(shape)).view(shape)
    here = [int(place) for place in (world == dist.get_rank()).nonzero()[0]]
    groups = []
    for at, name in enumerate(names):
        ranks = world[(*here[:at], slice(None), *here[at + 1 :])].tolist()
        dimension = Dimension.SHARD if at else Dimension.REPLICATE
        groups.append(dist.new_group(ranks, pg_options=dimension, group_desc=f"mesh_{name}"))
    return DeviceMesh.from_group(groups, device_type, mesh=world, mesh_dim_names=names)


def _within(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    inside = shape[1:]
    world, groups = torch.arange(math.prod(inside)).view(1, *inside), [across()]
    if inside:
        mesh = device_mesh.init_device_mesh(device_type, inside, mesh_dim_names=names[1:])
        groups += mesh.get_all_groups()
    return DeviceMesh.from_group(groups, device_type, mesh=world, mesh_dim_names=names)


def _shape(group: Group, wanted: Sequence[int] | None, names: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of the mesh, in the replicas that are there now. Raises `ArgumentError`."""
    replicas = len(group.roster)
    shape = (replicas, group.shards) if wanted is None else tuple(wanted)
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise ArgumentError(
            f"mesh_dim_names={names} for a mesh of {shape}; expected a name for each of its dimensions."
        )
    if not shape or shape[0] not in (replicas, group.replicas) or math.prod(shape[1:]) != group.shards:
        raise ArgumentError(
            f"a mesh of {shape} in a job of {group.replicas} replicas ({replicas} now) of {group.shards} ranks each; "
            f"expected {group.replicas}, and sizes whose product is {group.shards}. `ftcomm run --replicas R "
            "--ranks-per-replica S*T` makes a job for (R, S, T)."
        )
    return (replicas, *shape[1:])
