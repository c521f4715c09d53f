"""Faults of the network, by the kernel: between the namespaces of a job that was started with `--hosts netns`.

partition from everybody    the cable is pulled at the hub
from one other, one way     the sender's table of neighbours names a machine that does not exist: the bridge carries
                            the frames and nobody takes them, silently, as in a switch that has lost its way
slow                        a token bucket on the replica's cable
delay, loss                 netem there, where the kernel has it
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ftcomm.lab.chaos.plan import COORDINATOR, Fault
from ftcomm.lab.chaos.process_faults import ActiveFault
from ftcomm.lab.netns import network
from ftcomm.launch.admin import protocol

NOBODY = "02:00:00:00:00:99"  # a locally administered address that no cable has
PERMANENT = 0x80  # NUD_PERMANENT, <linux/neighbour.h>
ROOT = 0xFFFFFFFF  # TC_H_ROOT, <linux/pkt_sched.h>
RATE = "20mbit"
BURST = 32_000  # bytes
QUEUE = "300ms"  # of data that wait in the bucket; what is above is lost, as in a switch
NETEM = {"delay": {"delay": 100_000, "jitter": 50_000}, "loss": {"loss": 5}}  # microseconds, per cent


@contextlib.contextmanager
def netlink(namespace: str) -> Iterator[Any]:
    """An IPRoute of the namespace at that path."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with network.inside(fd), network.netlink() as ip:
            yield ip
    finally:
        os.close(fd)


def has_netem(status: protocol.Status) -> bool:
    """Whether this kernel can delay and lose packets; tried at the hub's own loopback."""
    import pyroute2  # type: ignore[import-untyped]

    with netlink(status.network) as ip:
        loopback = network.index(ip, "lo")
        try:
            ip.tc("add", "netem", loopback, delay=1)
        except pyroute2.NetlinkError:
            return False
        ip.tc("del", index=loopback, parent=ROOT)
    return True


class Unplugged(ActiveFault):
    def __init__(self, status: protocol.Status, replica: int) -> None:
        self._status, self._replica = status, replica
        self._set("down")

    def close(self) -> None:
        self._set("up")

    def _set(self, state: str) -> None:
        with netlink(self._status.network) as ip:
            ip.link("set", index=network.index(ip, network.port(self._replica)), state=state)


class Misrouted(ActiveFault):
    """Loses what `senders` send to each of `receivers`; `COORDINATOR` may be among both."""

    def __init__(self, status: protocol.Status, senders: Sequence[int], receivers: Sequence[int]) -> None:
        self._status = status
        self._pairs = [(a, b) for a in senders for b in receivers if a != b]
        for sender, receiver in self._pairs:
            with self._table(sender) as (ip, cable):
                ip.neigh("replace", dst=self._address(receiver), lladdr=NOBODY, ifindex=cable, state=PERMANENT)

    def close(self) -> None:
        for sender, receiver in self._pairs:
            with self._table(sender) as (ip, cable):
                ip.neigh("del", dst=self._address(receiver), ifindex=cable)
        self._pairs = []

    @contextlib.contextmanager
    def _table(self, place: int) -> Iterator[tuple[Any, int]]:
        where = self._status.network if place == COORDINATOR else self._status.replicas[place].network
        name = network.BRIDGE if place == COORDINATOR else network.CABLE
        with netlink(where) as ip:
            yield ip, network.index(ip, name)

    def _address(self, place: int) -> str:
        return network.HUB_ADDRESS if place == COORDINATOR else self._status.replicas[place].host


class Both(ActiveFault):
    def __init__(self, *active: ActiveFault) -> None:
        self._active = active

    def close(self) -> None:
        for active in self._active:
            active.close()


class Shaped(ActiveFault):
    """A queueing discipline on the replica's cable."""

    def __init__(self, status: protocol.Status, replica: int, kind: str, **options: Any) -> None:
        self._where = status.replicas[replica].network
        with netlink(self._where) as ip:
            ip.tc("add", kind, network.index(ip, network.CABLE), **options)

    def close(self) -> None:
        with netlink(self._where) as ip:
            ip.tc("del", index=network.index(ip, network.CABLE), parent=ROOT)


def cut(fault: Fault, status: protocol.Status) -> ActiveFault:
    """Do a fault of the network."""
    everybody = [COORDINATOR, *(replica.replica for replica in status.replicas)]
    if fault.kind == "cut-off":
        here, both = [COORDINATOR], fault.other is None
        ways = ([(here, everybody)] if both or fault.outgoing else []) + (
            [(everybody, here)] if both or not fault.outgoing else []
        )
        return Both(*(Misrouted(status, senders, receivers) for senders, receivers in ways))
    hit = fault.replicas[0]
    if fault.kind == "slow":
        return Shaped(status, hit, "tbf", rate=RATE, burst=BURST, latency=QUEUE)
    if fault.kind in NETEM:
        return Shaped(status, hit, "netem", **NETEM[fault.kind])
    if fault.kind == "partition" and fault.other is None:
        return Unplugged(status, hit)
    far = everybody if fault.other is None else [fault.other]
    if fault.kind == "partition":
        return Both(Misrouted(status, [hit], far), Misrouted(status, far, [hit]))
    return Misrouted(status, [hit], far) if fault.outgoing else Misrouted(status, far, [hit])
