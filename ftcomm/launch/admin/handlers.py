"""The answers of a running `Launcher` to the requests on its socket."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ftcomm.errors import FtcommError
from ftcomm.launch.admin import protocol
from ftcomm.launch.hosts import HUB

if TYPE_CHECKING:
    from ftcomm.launch.replica_processes import ReplicaProcesses
    from ftcomm.launch.run import Launcher


def answer(launcher: Launcher, request: protocol.AnyRequest) -> protocol.AnyAnswer:
    """Returns the answer to a request. Raises `FtcommError` if the request cannot be met."""
    if isinstance(request, protocol.GetStatus):
        return status(launcher)
    if isinstance(request, protocol.GetOverview):
        return protocol.OverviewAnswer(launcher.overview())
    if isinstance(request, protocol.RestartCoordinator):
        launcher.restart_coordinator(request.away)
    elif isinstance(request, protocol.RestartReplica):
        launcher.restart_replica(request.replica)
    elif isinstance(request, protocol.Resize):
        launcher.resize(request.replicas)
    elif isinstance(request, protocol.Drain):
        launcher.drain()
    else:
        raise FtcommError(f"{type(request).__name__} is not for the launcher")
    return protocol.Acknowledged()


def status(launcher: Launcher) -> protocol.Status:
    options = launcher.options
    return protocol.Status(
        run=launcher.run_id,
        pid=os.getpid(),
        script=options.script,
        epoch=launcher.view["epoch"] if launcher.view is not None else 0,
        draining=launcher.draining,
        coordinator=launcher.endpoint,
        away=launcher.away,
        ranks_per_replica=options.ranks_per_replica,
        transport=options.transport,
        heartbeat_timeout=options.timeouts.heartbeat,
        op_timeout=options.timeouts.op,
        replicas=[_replica(launcher, replica) for replica in launcher.replicas],
        last=launcher.last_said,
        network="" if launcher.network is None else launcher.network.path(HUB),
        op_timeout_floor=options.timeouts.op_floor,
    )


def _replica(launcher: Launcher, replica: ReplicaProcesses) -> protocol.ReplicaStatus:
    place, number = launcher.place(replica), replica.number
    return protocol.ReplicaStatus(
        replica=number,
        state=place.state.value,
        starts=replica.starts,
        pids={str(rank): pid for (_, rank), pid in replica.pids().items()},
        member=place.member,
        contributes=place.contributes,
        step=launcher.known_steps().get(number, -1),
        host=replica.host,
        network="" if launcher.network is None else launcher.network.path(replica.place),
        effective=launcher.effective.get(number),
        joining=place.joining,
        reason=replica.reason,
        since=launcher.since(replica),
    )
