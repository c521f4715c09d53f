"""Which group stands behind a process group that torch asks for.

ranks                                    group
all, of replicas with one rank           across replicas: survives a loss
all, of replicas with several            a grid of both kinds: survives a loss
the same place in all replicas           across replicas: survives a loss
any other                                a fixed group: a loss ends it
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import ftcomm.group
from ftcomm.errors import ArgumentError, SettingsError
from ftcomm.fixed.group import FixedGroup
from ftcomm.torch import meeting
from ftcomm.torch.grid import Grid
from ftcomm.torch.process_group import FtProcessGroup
from ftcomm.torch.replicas import Replicas


class Dimension(enum.Enum):
    """Of a mesh, for groups whose ranks alone do not tell: those of the only replica are also all ranks, today."""

    REPLICATE = "replicate"
    SHARD = "shard"


def create(options: Any, dimension: Any) -> FtProcessGroup:
    """`options` are torch's: store, rank, size, timeout, name, and the ranks of a group that is not the world."""
    if dimension is not None and not isinstance(dimension, Dimension):
        raise ArgumentError(f"pg_options={dimension!r}; ftcomm has none, leave it out.")
    seconds, name = options.timeout.total_seconds(), str(options.group_id)
    ranks = list(options.global_ranks_in_group)
    if getattr(options, "enable_reconfigure", False):  # of torch >= 2.14
        from ftcomm.torch.reconfigure import ReconfigurableGroup

        return ReconfigurableGroup(options.group_rank, options.group_size, seconds, name=name)
    if ranks:  # not the world, which is there then
        group = ftcomm.group.default_group()
    elif meeting.in_job():
        group = meeting.joined()
    else:
        group = meeting.join_by_store(options.store, options.group_rank, options.group_size, options.timeout)
    _check(seconds, group)
    calls, end = _beneath(group, ranks, dimension, f"torch {name}", seconds)
    return FtProcessGroup(calls, seconds, name=name, end=end if ranks else _leaving(end))


def _beneath(
    group: Any, ranks: list[int], dimension: Dimension | None, name: str, timeout: float
) -> tuple[Any, Callable[[], None]]:
    """The calls for the group of `ranks`, all of them if empty, and what to do at its end."""
    shards: int = group.settings.ranks_per_replica
    across = Replicas(group)
    everybody = list(range(len(group.roster) * shards))
    if dimension is Dimension.REPLICATE:
        return across, _nothing
    if dimension is None and (not ranks or ranks == everybody):
        if shards == 1:
            return across, _nothing
        inside = FixedGroup.in_job(group, name, [(group.replica, rank) for rank in range(shards)])
        return Grid(across, inside), inside.close
    if dimension is None and ranks == everybody[group.rank :: shards]:
        return across, _nothing
    members = [(group.roster[rank // shards], rank % shards) for rank in ranks]
    fixed = FixedGroup.in_job(group, name, members, op_timeout=timeout)
    return fixed, fixed.close


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


def _nothing() -> None:
    pass
