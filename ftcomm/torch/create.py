"""Which group stands behind a process group that torch asks for.

ranks                                      group                                   a loss
the world, of one rank a replica           that of the job                         is survived
one place, in all or some replicas         a subgroup of the job                   is survived
several places, in all or some replicas    a grid: one of these for each place,    is survived
                                           and a fixed group in each replica
in one replica, which lives and dies as    a fixed group                           ends it
one, or in no such pattern

Each is a communicator of its own, also of ranks of which there is another one: what is called on it stands in no order
to what is called on others, messages are not mixed, and an error is of one alone. So the group of the job is behind one
process group at a time. It is the one for which kernels of a GPU reduce: where the world is a grid, it is behind the
dimension across replicas of the first mesh, which has the gradients.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ftcomm.group
from ftcomm.errors import ArgumentError, SettingsError
from ftcomm.fixed.group import FixedGroup
from ftcomm.torch import meeting
from ftcomm.torch.grid import Grid
from ftcomm.torch.process_group import FtProcessGroup
from ftcomm.torch.reconfigure import ReconfigurableGroup
from ftcomm.torch.replicas import Replicas

_meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # groups of jobs that are behind a dimension of a mesh


class Dimension(enum.Enum):
    """A dimension of a mesh, for groups whose ranks do not tell which: those of the only replica are also all ranks."""

    REPLICATE = "replicate"
    SHARD = "shard"


def create(options: Any, dimension: Any) -> FtProcessGroup:
    """`options` are torch's: store, rank, size, timeout, name, and the ranks of a group that is not the world."""
    if dimension is not None and not isinstance(dimension, Dimension):
        raise ArgumentError(f"pg_options={dimension!r}; ftcomm has none, leave it out.")
    seconds, name = options.timeout.total_seconds(), str(options.group_id)
    ranks = list(options.global_ranks_in_group)
    if getattr(options, "enable_reconfigure", False):  # of torch >= 2.14
        return ReconfigurableGroup(options.group_rank, options.group_size, seconds, name=name)
    if ranks:  # not the world, which is there then
        group = ftcomm.group.default_group()
    elif meeting.in_job():
        group = meeting.joined()
    else:
        group = meeting.join_by_store(options.store, options.group_rank, options.group_size, options.timeout)
    _check(seconds, group)
    calls, end = _beneath(group, ranks, dimension, f"torch {name}", seconds)
    return FtProcessGroup(calls, seconds, name=name, end=end if ranks else _leaving(end), split=split)


def split(parent: FtProcessGroup, ranks: Sequence[int], timeout: float, name: str | None) -> FtProcessGroup | None:
    """The group of `ranks` of `parent`; None if this is none of them. All of them call it."""
    worlds = {rank: world for world, rank in c10d._world.pg_group_ranks.get(parent, {}).items()}
    unknown = [rank for rank in ranks if rank not in worlds]
    if unknown or not ranks:
        raise ArgumentError(
            f"split_group of the ranks {list(ranks)} of process group {parent.group_name!r}; expected at least one of "
            f"{sorted(worlds)}. dist.new_group(ranks) makes a group of ranks of the world."
        )
    parent.splits += 1  # all of its ranks have come
    wanted = [worlds[rank] for rank in ranks]
    if dist.get_rank() not in wanted:
        return None
    group = ftcomm.group.default_group()
    _check(timeout, group)
    name = f"{parent.group_name} split {parent.splits} {wanted}" if name is None else name
    calls, end = _beneath(group, wanted, None, f"torch {name}", timeout)
    return FtProcessGroup(calls, timeout, name=name, end=end, split=split)


def _beneath(
    group: Any, ranks: list[int], dimension: Dimension | None, name: str, timeout: float
) -> tuple[Any, Callable[[], None]]:
    """The calls for the group of `ranks`, all of them if empty, and what to do at its end."""
    shards: int = group.shards
    first = shards > 1 and dimension is Dimension.REPLICATE and not _meshes
    if first:
        _meshes.add(group)
    if first or (shards == 1 and not ranks):
        return Replicas(group), functools.partial(_meshes.discard, group)
    members = [(group.roster[rank // shards], rank % shards) for rank in ranks or range(len(group.roster) * shards)]
    replicas, places = sorted({replica for replica, _ in members}), sorted({place for _, place in members})
    product = [(replica, place) for replica in replicas for place in places]
    in_one = dimension is Dimension.SHARD or len(replicas) == 1 < len(group.roster)
    if in_one or members != product:
        fixed = FixedGroup.in_job(group, name, members, op_timeout=timeout)
        return fixed, fixed.close
    everybody = tuple(replicas) == group.roster
    # All that there may ever be: a replica that is away now, and comes back, is in it again.
    across = group.subgroup(name, range(group.replicas) if everybody else replicas)
    if len(places) == 1:
        return Replicas(across), across.close
    inside = FixedGroup.in_job(group, f"{name}, inside", [(group.replica, place) for place in places])
    grid = Grid(Replicas(across), inside, group._when)

    def end() -> None:
        inside.close()
        across.close()
        grid.close()

    return grid, end


def _leaving(end: Callable[[], None]) -> Callable[[], None]:
    def leave() -> None:
        end()
        meeting.leave()

    return leave


def _check(timeout: float, group: Any) -> None:
    """A call that gives up before a silent replica is given up for lost fails with it, and nothing survives."""
    heartbeat = group.settings.timeouts.heartbeat
    if timeout <= heartbeat:
        raise SettingsError(
            f"timeout={timeout:g} s of a process group whose job takes {heartbeat:g} s to give up a silent replica: "
            "its calls would fail before. Raise it, as in dist.init_process_group(timeout=...), or lower "
            "FTCOMM_HEARTBEAT_TIMEOUT."
        )
