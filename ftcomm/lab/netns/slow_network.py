"""Hosts with a network between them that has a rate, a delay and losses, on one machine, for tests and benches.

    with SlowNetwork(4, rate=1e9, delay=0.005) as network:
        with network.inside(0):             # what this thread starts now runs on host 0
            subprocess.Popen(...)           # and reaches host 1 at network.address(1)
        network.change([0], network.places, up=False)       # what host 0 sends is lost from now on

A place is a host's number, or `HUB` for where a coordinator listens. `network.Network` makes the same hosts with the
kernel's cables, which are faster and have no delay. The hosts share all but their network, and with `settle` not even
what tells two processes that they are on one machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Collection
from typing import Any

import msgspec

from ftcomm.errors import SettingsError
from ftcomm.lab.netns import network
from ftcomm.lab.netns.relay import Change, Counts, LinkConditions, PortConditions
from ftcomm.launch.hosts import HUB

MTU = 9000
ANSWER = 10.0  # s for the relay to answer; it takes a millisecond
BURST = 2e-3  # s of its rate that a host may send at once: no less than one packet of 64 KB at a gigabit
QUEUE = "200ms"  # that what it has to send may wait
ETHERNET = 14

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # <linux/if_tun.h>
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNS = 0x00020000  # <sched.h>
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18  # <sys/mount.h>


_COUNTS = msgspec.json.Decoder(Counts)

ConditionsByLink = dict[tuple[int, int], LinkConditions]  # (sender, receiver)


class SlowNetwork(network.LabNetwork):
    """Hosts whose packets a process of ours carries; see `relay`. Goes away with the process that has made it.

    rate: bits a second, of what each host sends and of what it receives. None: no limit.
    delay: seconds from one to another, one way; a round trip takes two.
    loss: share of packets, drawn with `seed`.
    """

    def __init__(
        self,
        hosts: int,
        *,
        rate: float | None = None,
        delay: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Raises `SettingsError` if this user or kernel cannot do it."""
        self.places = (HUB, *range(hosts))
        self._rate, self._seed = rate, seed
        self._links = {(a, b): LinkConditions(delay, loss) for a in self.places for b in self.places}
        self._relay: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._counts = Counts()
        super().__init__(hosts)

    def __enter__(self) -> SlowNetwork:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def change(self, senders: Collection[int], receivers: Collection[int], **fields: Any) -> ConditionsByLink:
        """Set fields of `LinkConditions` from now on, for what each of `senders` sends to each of `receivers`; returns
        what these links were before, for `restore`."""
        before = {(a, b): self._links[a, b] for a in senders for b in receivers if a != b}
        self.restore({pair: msgspec.structs.replace(link, **fields) for pair, link in before.items()})
        return before

    def restore(self, links: ConditionsByLink) -> None:
        self._links.update(links)
        self._tell(Change(links=[(a + 1, b + 1, link) for (a, b), link in links.items()]))

    def slow(self, place: int, rate: float | None) -> None:
        """Set another rate of what `place` sends and receives; None: the one that it had at first."""
        rate = rate or self._rate
        self._shape(place, rate)
        self._tell(Change(ports=[(place + 1, PortConditions(rate or 0.0))]))

    def counts(self) -> Counts:
        """Returns what the relay has done so far, or had when it was last asked before the end."""
        return self._counts if self._control is None else self._tell(Change())

    def path(self, place: int) -> str:
        """Returns "" for the hub: cables of the relay are not cut by links and tables of neighbours."""
        return "" if place == HUB else super().path(place)

    def close(self) -> None:
        """The relay ends; the hosts go when the last process in them does. Idempotent."""
        if self._control is not None:
            self._control.close()
        if self._relay is not None:
            self._relay.wait()
        self._control = self._relay = None
        super().close()

    def _lay_cables(self) -> None:
        devices = []
        try:
            for place in self.places:
                name = network.BRIDGE if place == HUB else network.CABLE
                with self.inside(place):
                    devices.append(_tun(name))
                    with network.netlink() as ip:
                        loopback, cable = network.index(ip, "lo"), network.index(ip, name)
                        ip.link("set", index=loopback, state="up")
                        ip.link("set", index=cable, mtu=MTU)
                        ip.addr("add", index=cable, address=self.address(place), prefixlen=network.PREFIX)
                        ip.link("set", index=cable, state="up")
                if self._rate:
                    self._shape(place, self._rate)
            self._start(devices)
        finally:
            for fd in devices:
                os.close(fd)
        # A port is as fast as a host sends; what meets there from several waits.
        ports = [(place + 1, PortConditions(self._rate or 0.0)) for place in self.places]
        self._tell(Change([(a + 1, b + 1, link) for (a, b), link in self._links.items()], ports))

    def _shape(self, place: int, rate: float | None) -> None:
        """The host's own card sends no faster: who writes to a socket there waits, and nothing is lost."""
        with self.inside(place), network.netlink() as ip:
            cable = network.index(ip, network.BRIDGE if place == HUB else network.CABLE)
            with contextlib.suppress(_netlink_error()):  # there was none
                ip.tc("del", index=cable, parent=0xFFFFFFFF)
            if rate:
                burst = int(max(rate * BURST / 8, (1 << 16) + 64 * ETHERNET))
                ip.tc("add", "tbf", cable, rate=int(rate / 8), burst=burst, latency=QUEUE)

    def _start(self, devices: list[int]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(ANSWER)
        ports = [f"{fd}={self.address(place)}" for fd, place in zip(devices, self.places, strict=True)]
        command = [sys.executable, "-m", "ftcomm.lab.netns.relay", str(theirs.fileno()), str(self._seed), *ports]
        with theirs:
            self._relay = subprocess.Popen(command, pass_fds=[theirs.fileno(), *devices], start_new_session=True)

    def _tell(self, change: Change) -> Counts:
        assert self._control is not None
        self._control.sendall(msgspec.json.encode(change) + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._control.recv(4096)
            if not part:
                raise SettingsError("the relay of packets has ended; what it says is on stderr")
            answer += part
        self._counts = _COUNTS.decode(answer)
        return self._counts


def settle(name: str) -> None:
    """Let this process, which has one thread, look like one on the machine `name`: it sees another boot id, by which
    ftcomm tells whether memory can be shared. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    network.call("unshare", CLONE_NEWNS)
    with tempfile.NamedTemporaryFile("w", suffix=".boot") as boot:
        boot.write(f"{uuid.uuid5(uuid.NAMESPACE_DNS, name)}\n")
        boot.flush()
        for source, target, flags in (
            (None, b"/", MS_REC | MS_PRIVATE),
            (boot.name.encode(), b"/proc/sys/kernel/random/boot_id", MS_BIND),
        ):
            if libc.mount(source, target, None, flags, None) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), target.decode())


def _tun(name: str) -> int:
    """A TUN device in the network namespace of this thread, whose packets need no checksum and may be of 64 KB."""
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SettingsError("there is no /dev/net/tun, by which packets are delayed; modprobe tun") from None
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _netlink_error() -> type[Exception]:
    import pyroute2  # type: ignore[import-untyped]

    error: type[Exception] = pyroute2.NetlinkError
    return error
