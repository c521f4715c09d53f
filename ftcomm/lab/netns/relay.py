"""A network with delay and loss in user space: one process forwards all packets between hosts.

    host 0: tun eth0 --.                              .--> host 0
    host 1: tun eth0 ---> link (sender, receiver) ----+--> host 1   each receiver: one port of a switch, with a rate
    hub:    tun hub  --'  cut? lost? too long? delay  '--> hub      and a queue, in the order in which packets come

The kernel does this with netem, which many kernels are built without. Packets are what the hosts' kernels would hand to
a network card that segments by itself: up to 64 KB at once, of which the first ten bytes say how they are cut into
packets of the MTU. They are passed on whole and counted as what they are cut into, which is why Python is fast enough
for gigabits. Only IPv4 goes through.

    python -m ftcomm.lab.netns.relay CONTROL SEED FD=ADDRESS...

Commands come as JSON lines on the socket CONTROL, one answer each; the relay ends when that socket does, so however the
one who has started it ends.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import os
import random
import select
import socket
import sys
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ftcomm.control.decode import decode_with
from ftcomm.sync.sched import request_short_slice

VNET = 10  # bytes of struct virtio_net_hdr before each packet
LARGEST = VNET + (1 << 16)
ETHERNET = 14  # bytes that a frame has beside the packet, as the kernel's own disciplines count them
BURST = 64  # packets of one host before the others have their turn
NICE = -10  # a network is not slower because its hosts compute


PlaceNumber = Annotated[int, Meta(ge=0, le=1 << 16)]
DelaySeconds = Annotated[float, Meta(ge=0.0, le=3600.0)]


class LinkConditions(msgspec.Struct, frozen=True):
    """The treatment of packets from one place to another: seconds, and bytes of an IP packet."""

    delay: DelaySeconds = 0.0
    loss: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0  # share of packets
    longest: Annotated[int, Meta(ge=0)] = (
        1 << 16
    )  # longer ones vanish without a word, as in a tunnel that nobody has told of its MTU
    up: bool = True


class PortConditions(msgspec.Struct, frozen=True):
    """The speed at which a place takes packets: bits a second, 0 for no limit; seconds that a packet waits for its
    turn."""

    rate: Annotated[float, Meta(ge=0.0)] = 0.0
    queue: DelaySeconds = 0.1


class Change(msgspec.Struct, frozen=True):
    """`links`: (sender, receiver, what it is from now on), by the places' numbers; `ports`: (receiver, the same)."""

    links: list[tuple[PlaceNumber, PlaceNumber, LinkConditions]] = []
    ports: list[tuple[PlaceNumber, PortConditions]] = []


class Counts(msgspec.Struct):
    """The answer to a `Change`: packets since the start, and the processor time of the relay in seconds."""

    forwarded: int = 0
    bytes: int = 0
    lost: int = 0  # by `loss`, by a link that is down or by its length
    crowded: int = 0  # at a full queue
    cpu: float = 0.0


_changes = msgspec.json.Decoder(Change)


class Relay:
    def __init__(self, control: socket.socket, ports: dict[int, str], seed: int) -> None:
        """`ports`: descriptor of a TUN device -> IPv4 address behind it; places are numbered in this order."""
        self._control = control
        self._lines = control.makefile("rb")
        self._fds = list(ports)
        self._places = {socket.inet_aton(address): place for place, address in enumerate(ports.values())}
        count = len(self._fds)
        self._links = [[LinkConditions() for _ in range(count)] for _ in range(count)]
        self._ports = [PortConditions() for _ in range(count)]
        self._free = [0.0] * count  # when the port has sent what it has
        # For each way of its own: how packets of both ways follow each other is a matter of who computes when.
        self._random = [[random.Random(f"{seed} {a} {b}") for b in range(count)] for a in range(count)]
        self._due: list[tuple[float, int, int, bytes]] = []  # (when, number, receiver, packet)
        self._counts = Counts()

    def run(self) -> None:
        """Forward packets until the control socket is closed at the other end."""
        numbers = {fd: place for place, fd in enumerate(self._fds)}
        watched: list[Any] = [self._control, *self._fds]
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, receiver, packet = heapq.heappop(self._due)
                with contextlib.suppress(OSError):  # its device is down
                    os.write(self._fds[receiver], packet)
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for ready in select.select(watched, (), (), wait)[0]:
                if ready is self._control:
                    if not self._obey():
                        return
                else:
                    self._take(ready, numbers[ready])

    def _obey(self) -> bool:
        """False at the end. Raises `msgspec.DecodeError`: with one who means something else nothing can be agreed."""
        line = self._lines.readline()
        if not line:
            return False
        change: Change = decode_with(_changes, line)
        places = {place for sender, receiver, _ in change.links for place in (sender, receiver)}
        places |= {receiver for receiver, _ in change.ports}
        if any(place >= len(self._fds) for place in places):
            raise msgspec.ValidationError(f"places {sorted(places)}, there are {len(self._fds)}")
        for sender, receiver, link in change.links:
            self._links[sender][receiver] = link
        for receiver, port in change.ports:
            self._ports[receiver] = port
        self._counts.cpu = time.process_time()
        self._control.sendall(msgspec.json.encode(self._counts) + b"\n")
        return True

    def _take(self, fd: int, sender: int) -> None:
        """Packets that a host sends now; each is forgotten, or has a time at which it arrives."""
        for _ in range(BURST):
            try:
                packet = os.read(fd, LARGEST)
            except OSError:  # no more, or its device is down
                return
            receiver = self._places.get(packet[VNET + 16 : VNET + 20])
            if receiver is None or packet[VNET] >> 4 != 4:
                continue
            link, port = self._links[sender][receiver], self._ports[receiver]
            count, longest, total = sizes(packet)
            # Each of the packets that it is cut into may be the one that is lost; those beside it go with it.
            lost = link.loss and self._random[sender][receiver].random() > (1 - link.loss) ** count
            if lost or not link.up or longest > link.longest:
                self._counts.lost += count
                continue
            due = time.monotonic() + link.delay
            if port.rate:
                begin = max(due, self._free[receiver])
                if begin - due > port.queue:
                    self._counts.crowded += count
                    continue
                due = self._free[receiver] = begin + 8 * (total + count * ETHERNET) / port.rate
            self._counts.forwarded += count
            self._counts.bytes += total
            heapq.heappush(self._due, (due, self._counts.forwarded, receiver, packet))


def sizes(packet: bytes) -> tuple[int, int, int]:
    """Count what a network card makes of a packet: how many, the longest of them, the bytes of all; without Ethernet.

    `packet` begins with its struct virtio_net_hdr: type of segmentation at 1, length of all headers at 2, of the data
    of a segment at 4."""
    whole = len(packet) - VNET
    segment = int.from_bytes(packet[4:6], sys.byteorder)
    if not packet[1] or not segment:
        return 1, whole, whole
    headers = int.from_bytes(packet[2:4], sys.byteorder)
    count = max(1, -(-(whole - headers) // segment))
    return count, min(whole, headers + segment), whole + (count - 1) * headers


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    ports = {int(fd): address for fd, _, address in (argument.partition("=") for argument in sys.argv[3:])}
    for fd in ports:
        os.set_blocking(fd, False)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    request_short_slice()
    gc.disable()  # nothing here makes cycles, and a collection is a hiccup of the network
    Relay(control, ports, int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
