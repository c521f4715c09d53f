"""A job whose replicas are on hosts of their own, and the faults of a network between them.

Each rank process goes to its host before it joins: the network namespace, and a boot id of its own, so that nothing but
the network tells it of the others. The coordinator is at the hub, in a thread of the test.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftcomm.control.server import CoordinatorServer
from ftcomm.lab.chaos.network_faults import Misrouted, Shaped, Unplugged
from ftcomm.lab.chaos.process_faults import ActiveFault
from ftcomm.lab.netns import network
from ftcomm.lab.netns.slow_network import SlowNetwork, settle
from ftcomm.launch.admin import protocol
from ftcomm.settings import Settings
from ftcomm.transport.nixl import network as nixl_network
from tests.process.job import Body, Job


class HostJob(Job):
    """`with HostJob(tmp_path, Network(4), body=...) as job:`; a replica a host, or `replicas` on them in turn. With
    several `ranks` all first ones are on the first host, all second ones on the second."""

    def __init__(
        self,
        folder: Path,
        hosts: network.LabNetwork,
        *,
        body: Body,
        transport: str = "auto",
        replicas: int | None = None,
        engine: str = "host",
        **settings: Any,
    ) -> None:
        self.network = hosts
        paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in hosts.hosts]
        super().__init__(
            folder,
            replicas=replicas or len(hosts.hosts),
            body=body,
            transport=transport,
            engine=engine,
            prepare=go_to_host,
            hosts=paths,
            **settings,
        )

    def host(self, replica: int, rank: int = 0) -> str:
        return network.address(rank if self.ranks > 1 else replica % len(self.network.hosts))

    def _listener(self, replica: int) -> socket.socket:
        with network.inside(self.network.hosts[0]):
            return super()._listener(replica)

    def _server(self, port: int, **other: Any) -> CoordinatorServer:
        async def go_to_hub() -> None:
            network.call("setns", self.network.hub, network.CLONE_NEWNET)

        self.do(go_to_hub())  # the thread that the coordinator runs in, for good
        return super()._server(port, host=network.HUB_ADDRESS, **other)

    # -- faults; each lasts until it is closed ---------------------------------------------------------------------

    def unplug(self, replica: int) -> ActiveFault:
        """The cable of its host is pulled: nobody hears of anybody's end."""
        if isinstance(self.network, SlowNetwork):
            return Both(
                Cut(self.network, [replica], self.network.places), Cut(self.network, self.network.places, [replica])
            )
        return Unplugged(self._status(), replica)

    def mislead(self, sender: int, receiver: int) -> ActiveFault:
        """What one host sends to the other gets lost; the way back is open."""
        if isinstance(self.network, SlowNetwork):
            return Cut(self.network, [sender], [receiver])
        return Misrouted(self._status(), [sender], [receiver])

    @contextlib.contextmanager
    def apart(self, here: int, there: int) -> Iterator[None]:
        """Nothing of what two hosts send to each other arrives."""
        faults = [Misrouted(self._status(), [here], [there]), Misrouted(self._status(), [there], [here])]
        try:
            yield
        finally:
            for fault in faults:
                fault.close()

    def slow(self, replica: int, rate: float) -> ActiveFault:
        """Bits a second that its host sends."""
        if isinstance(self.network, SlowNetwork):
            return Slow(self.network, replica, rate)
        return Shaped(self._status(), replica, "tbf", rate=int(rate / 8), burst=100_000, latency="300ms")

    def _status(self) -> protocol.Status:
        replicas = [
            protocol.ReplicaStatus(n, "running", 1, {}, True, True, 0, network.address(n), f"/proc/self/fd/{fd}")
            for n, fd in enumerate(self.network.hosts)
        ]
        hub = f"/proc/self/fd/{self.network.hub}"
        return protocol.Status("", 0, "", 1, False, "", False, 1, "tcp", 2.0, 24.0, replicas, network=hub)


def go_to_host(settings: Settings, arguments: dict[str, Any]) -> None:
    place = settings.shard if settings.ranks_per_replica > 1 else settings.replica % len(arguments["hosts"])
    fd = os.open(arguments["hosts"][place], os.O_RDONLY | os.O_CLOEXEC)
    network.call("setns", fd, network.CLONE_NEWNET)
    os.close(fd)
    settle(f"host-{place}")
    os.environ[nixl_network.TRUSTED] = "1"  # nobody else is in these networks


class Cut(ActiveFault):
    """Of a network that has a relay."""

    def __init__(self, hosts: SlowNetwork, senders: Any, receivers: Any) -> None:
        self._hosts = hosts
        self._before = hosts.change(senders, receivers, up=False)

    def close(self) -> None:
        self._hosts.restore(self._before)


class Slow(ActiveFault):
    def __init__(self, hosts: SlowNetwork, place: int, rate: float) -> None:
        self._hosts, self._place = hosts, place
        hosts.slow(place, rate)

    def close(self) -> None:
        self._hosts.slow(self._place, None)


class Both(ActiveFault):
    def __init__(self, *active: ActiveFault) -> None:
        self._active = active

    def close(self) -> None:
        for active in reversed(self._active):
            active.close()
