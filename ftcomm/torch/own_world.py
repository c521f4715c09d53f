"""The world of torch as one replica of the job: another backend inside, ftcomm across.

                      inside a replica                between replicas
    made by           `dist`, as without ftcomm       `own_world`, which makes one group
    who is in it      ranks 0 to shards - 1, the      this rank of every replica, as the roster says
                      same in each life
    a loss            ends all ranks of the replica   is survived

A group of NCCL or gloo cannot lose a member, so none spans replicas. The ranks of one life meet at a store in their
rank 0, and the next life has nothing of it. If the replica is out of the job, since a rank of it has died or stands
still, its groups are aborted: a rank that waits in them, maybe on a GPU, gets an error in place of that.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftcomm.control.rank_name import rank_name
from ftcomm.errors import InitError
from ftcomm.torch import rendezvous
from ftcomm.torch.create import Dimension
from ftcomm.torch.process_group import FtProcessGroup
from ftcomm.training.intra_replica import IntraReplicaExchange

if TYPE_CHECKING:
    from ftcomm.groups.group import Group

log = logging.getLogger("ftcomm")

_made: tuple[str, dist.ProcessGroup] | None = None  # the backend inside, and the group between replicas


def own_world(backend: str, timeout: timedelta | None = None) -> Group:
    """Join the job, and make the world of torch that of this replica alone, with `backend`; idempotent.

    timeout: of the ops inside; None: as long as an op of the job may take.

    Works under `ftcomm run`, torchrun, and wherever `dist.init_process_group("ftcomm")` does; call it instead of that.
    All ranks of the replica call it, and it blocks until they have. Raises `InitError` if the process has a process
    group of another kind already, and like `ftcomm.init`.
    """
    global _made
    if dist.is_initialized():
        if _made is not None and _made[0] == backend:
            return rendezvous.joined()
        raise InitError(
            "this process has a process group already, and the world of torch has to be one replica. Leave out "
            "dist.init_process_group, and make no mesh, TrainingArguments, Accelerator or Trainer of another kind "
            "before."
        )
    group = rendezvous.joined() if rendezvous.in_job() else rendezvous.join_by_environment(timeout)
    if timeout is None:
        timeout = timedelta(seconds=group.internals.op_timeout)
    dist.init_process_group(
        backend, store=_store(group, timeout), rank=group.shard, world_size=group.shards, timeout=timeout
    )
    if group.shards > 1:  # others wait inside
        group.internals.on_ended = functools.partial(_abort, group)
        group.internals.repeats = False
    between = dist.new_group(
        [group.shard],
        timeout,
        backend="ftcomm",
        pg_options=Dimension.ACROSS,
        group_desc="replicas",
        use_local_synchronization=True,
    )
    _made = backend, between
    return group


def across() -> dist.ProcessGroup:
    """Returns the process group of this rank of all replicas. A root is named by its place in the roster
    (`group_src=`, `group_dst=`), as torch's world does not have the ranks of others."""
    assert _made is not None, "call own_world before"
    return _made[1]


def usual_backend() -> str:
    """Returns the backends that torch has for the devices of this process."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _store(group: Group, timeout: timedelta) -> dist.Store:
    """The store of this life of the replica. It listens where its shard 0 does, at a port of its own."""
    if group.shards == 1:
        return dist.HashStore()
    host, port = group.internals.address_of(group.replica, 0, group.settings.timeouts.give_up).host, 0
    store: dist.Store | None = None
    if group.shard == 0:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        store = _tcp(host, port, timeout, listener.detach())
    meet = IntraReplicaExchange(group)
    with contextlib.closing(meet):
        port = int(meet.exchange(b"%05d" % port, lambda rows: rows[0]))
    return store or _tcp(host, port, timeout)


def _tcp(host: str, port: int, timeout: timedelta, listener: int | None = None) -> dist.Store:
    return dist.TCPStore(
        host,
        port,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _abort(group: Group, error: Exception) -> None:
    """Abort the groups inside, in a thread of its own, since a driver that is stuck may keep it."""

    def run() -> None:
        log.error("%s: aborts the groups inside its replica: %s", rank_name(group.replica, group.shard), error)
        inside = [pg for pg in list(c10d._world.pg_map) if not isinstance(pg, FtProcessGroup)]
        with _nccl_together():
            for pg in reversed(inside):
                with contextlib.suppress(RuntimeError):  # a backend that cannot be aborted
                    pg.abort()

    if dist.is_initialized():
        threading.Thread(target=run, name="ftcomm-abort", daemon=True).start()


@contextlib.contextmanager
def _nccl_together() -> Iterator[None]:
    """Aborts of several communicators of NCCL wait for each other, unless NCCL knows that they belong together."""
    try:
        backend = c10d._get_default_group()._get_backend(torch.device("cuda"))
    except (RuntimeError, ValueError):
        backend = None
    together = dist.is_nccl_available() and isinstance(backend, c10d.ProcessGroupNCCL)
    if together:
        backend._group_start()
    try:
        yield
    finally:
        if together:
            backend._group_end()
