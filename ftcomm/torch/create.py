"""Chooses the group behind a process group that torch asks for.

    ranks                                        group                                  a loss
    the world, of one rank a replica; this rank  that of the job                        is survived
    of all replicas, each a world of its own
    one place, in all or some replicas           a subgroup of the job                  is survived
    several places, in all or some replicas      a grid: one of these for each place,   is survived
                                                 and a static group in each replica
    in one replica, which lives and dies as      a static group                         ends it
    one, or in no such pattern

Each is a communicator of its own, also for ranks that have another one already: its calls have no order relative to
calls on others, messages are not mixed, and errors stay apart. So the group of the job is behind one process group at a
time. GPU kernels reduce only for that one. Where the world is a grid, it is behind the dimension across replicas of the
first mesh, which has the gradients.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ftcomm.groups.default_group
from ftcomm.control.timeouts import Timeouts
from ftcomm.errors import ArgumentError, SettingsError
from ftcomm.groups.static_group import StaticGroup
from ftcomm.settings import timeouts
from ftcomm.torch import rendezvous, world_ranks
from ftcomm.torch.grid import Grid
from ftcomm.torch.process_group import FtProcessGroup
from ftcomm.torch.reconfigure import ReconfigurableGroup
from ftcomm.torch.replicas import Replicas

log = logging.getLogger("ftcomm")

_meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # groups of jobs behind a dimension of a mesh


class Dimension(enum.Enum):
    """A dimension of a mesh. Ranks alone may not tell it: with one replica, its ranks are also all ranks."""

    REPLICATE = "replicate"
    SHARD = "shard"
    ACROSS = "across"  # the group of the job, where the world of torch is one replica


def create(options: Any, dimension: Any) -> FtProcessGroup:
    """Makes the group for torch's `options`: store, rank, size, timeout, name, and the ranks unless it is the world."""
    if dimension is not None and not isinstance(dimension, Dimension):
        raise ArgumentError(f"pg_options={dimension!r}; ftcomm has none, leave it out.")
    seconds, name = options.timeout.total_seconds(), str(options.group_id)
    ranks = list(options.global_ranks_in_group)
    if getattr(options, "enable_reconfigure", False):  # torch >= 2.14 has it
        return ReconfigurableGroup(options.group_rank, options.group_size, seconds, name=name)
    _check(seconds)  # all ranks raise it before one of them waits for another
    if ranks:  # not the world, which must exist then
        group = ftcomm.groups.default_group.default_group()
    elif rendezvous.in_job():
        group = rendezvous.joined()
    else:
        group = rendezvous.join_by_store(options.store, options.group_rank, options.group_size, options.timeout)
    calls, members, end = _beneath(group, ranks, dimension, f"torch {name}", seconds)
    made = FtProcessGroup(calls, seconds, name=name, end=end if ranks else _leaving(end), split=split)
    if not ranks or isinstance(dist.group.WORLD, FtProcessGroup):  # else the world is one replica, whose ranks stay
        _follow(made, members, group)
    return made


def split(parent: FtProcessGroup, ranks: Sequence[int], timeout: float, name: str | None) -> FtProcessGroup | None:
    """Makes the group of `ranks` of `parent`; None if this rank is not among them. All ranks of `parent` call it."""
    worlds = {rank: world for world, rank in c10d._world.pg_group_ranks.get(parent, {}).items()}
    unknown = [rank for rank in ranks if rank not in worlds]
    if unknown or not ranks:
        raise ArgumentError(
            f"split_group of the ranks {list(ranks)} of process group {parent.group_name!r}; expected at least one of "
            f"{sorted(worlds)}. dist.new_group(ranks) makes a group of ranks of the world."
        )
    parent.splits += 1  # all ranks of the parent have come
    wanted = [worlds[rank] for rank in ranks]
    if dist.get_rank() not in wanted:
        return None
    group = ftcomm.groups.default_group.default_group()
    _check(timeout)
    name = f"{parent.group_name} split {parent.splits} {wanted}" if name is None else name
    calls, members, end = _beneath(group, wanted, None, f"torch {name}", timeout)
    made = FtProcessGroup(calls, timeout, name=name, end=end, split=split)
    _follow(made, members, group)
    return made


def _follow(made: FtProcessGroup, members: world_ranks.MembersNow, group: Any) -> None:
    """Let torch know the ranks of the world that are in a group, whatever becomes of replicas."""
    world_ranks.remember(made, members)
    group.internals.on_roster = functools.partial(world_ranks.follow, group)


def _beneath(
    group: Any, ranks: list[int], dimension: Dimension | None, name: str, timeout: float
) -> tuple[Any, world_ranks.MembersNow, Callable[[], None]]:
    """Returns the calls for the group of `ranks`, all of them if empty, who is in it, and what to do at its end."""
    shards: int = group.shards
    first = shards > 1 and dimension is Dimension.REPLICATE and not _meshes
    if first:
        _meshes.add(group)
    if first or dimension is Dimension.ACROSS or (shards == 1 and not ranks):
        _warn_if_short(timeout, group.settings.timeouts)
        end = functools.partial(_meshes.discard, group)
        return Replicas(group, group.internals), _product(group, [group.shard]), end
    members = [(group.roster[rank // shards], rank % shards) for rank in ranks or range(len(group.roster) * shards)]
    replicas, places = sorted({replica for replica, _ in members}), sorted({place for _, place in members})
    product = [(replica, place) for replica in replicas for place in places]
    in_one = dimension is Dimension.SHARD or len(replicas) == 1 < len(group.roster)
    if in_one or members != product:
        static = StaticGroup.in_job(group, name, members, op_timeout=timeout)
        return static, lambda: members, static.close
    _warn_if_short(timeout, group.settings.timeouts)
    everybody = tuple(replicas) == group.roster
    # All possible replicas: one that is away now is in it again when it comes back.
    across = group.subgroup(name, range(group.replicas) if everybody else replicas)
    if len(places) == 1:
        return Replicas(across, group.internals), _product(across, places), across.close
    inside = StaticGroup.in_job(group, f"{name}, inside", [(group.replica, place) for place in places])
    grid = Grid(Replicas(across, group.internals), inside, group.internals.when)

    def end_both() -> None:
        inside.close()
        across.close()
        grid.close()

    return grid, _product(across, places), end_both


def _product(across: Any, places: Sequence[int]) -> world_ranks.MembersNow:
    """Returns what tells the members at these places of all replicas of a group that follows the job."""
    return lambda: itertools.product(across.roster, places)


def _leaving(end: Callable[[], None]) -> Callable[[], None]:
    def leave() -> None:
        end()
        rendezvous.leave()

    return leave


def _check(timeout: float) -> None:
    """Refuse a timeout after which a call would fail before a silent replica is removed: no op would survive."""
    group = ftcomm.groups.default_group.existing_group()
    heartbeat = (timeouts(os.environ) if group is None else group.settings.timeouts).heartbeat
    if timeout <= heartbeat:
        raise SettingsError(
            f"timeout={timeout:g} s of a process group whose job takes {heartbeat:g} s to give up a silent replica: "
            "its calls would fail before. Raise it, as in dist.init_process_group(timeout=...), or lower "
            "FTCOMM_HEARTBEAT_TIMEOUT."
        )


@functools.cache  # once for all groups that have the same
def _warn_if_short(timeout: float, of_job: Timeouts) -> None:
    """Warn of a timeout after which a call fails while the job may still wait for a replica that stands still."""
    if timeout < of_job.replaced:
        log.warning(
            "timeout=%g s of a process group, whose job may take %g s to remove a replica that stands still "
            "(FTCOMM_OP_TIMEOUT=%g): calls that wait for it may fail before. Raise the timeout above that, as in "
            "dist.init_process_group(timeout=...), or lower FTCOMM_OP_TIMEOUT.",
            *(timeout, of_job.replaced, of_job.op),
        )
