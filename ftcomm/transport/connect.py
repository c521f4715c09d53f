"""Which transport reaches a peer: shared memory where its segment can be opened, else NIXL if there is RDMA, else TCP.

The rules, and both ends of a connection.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ftcomm.control.views import Address
from ftcomm.errors import TransportError
from ftcomm.kernels.host.arithmetic import own
from ftcomm.kernels.wait import ORDERED
from ftcomm.transport import nixl
from ftcomm.transport.segment import HOST, Layout, OtherEngine, Peer, Segment
from ftcomm.transport.shm import ShmPeer
from ftcomm.transport.tcp import Lost, Reader, TcpPeer
from ftcomm.tuning import BUILT_IN, Tuning, differ

log = logging.getLogger("ftcomm.transport")

Fields = Mapping[str, int | str]  # of a handshake
Dial = Callable[[Address, str, Fields], socket.socket]  # (where, purpose, fields)


TCP, NIXL = CONNECTIONS = "data", "nixl"  # what a connection is for


class Exchange(Protocol):
    """See `ftcomm.collective.exchange.Exchange`."""

    def attach(self, sock: socket.socket, replica: int, epoch: int, life: str) -> None: ...

    def admit(self, reader: Reader) -> None: ...


def connect(
    me: int,
    here: Address,
    replica: int,
    there: Address,
    *,
    epoch: int,
    mode: str,
    dial: Dial,
    on_lost: Lost,
    layout: Layout = HOST,
    lazy: bool = False,
) -> Peer:
    """Reach the segment of `replica`, which listens `there`, from replica `me`, for `epoch`. Blocks while dialling.

    `mode` is "auto", "shm", "nixl" or "tcp". With "auto" shared memory is used if the peer's segment can be opened: the
    kernels are the same, and so are process ids, which they are not between two containers of one host. Else NIXL where
    this host has RDMA and the peer can do it, too. For how long a peer serves, `Peer.serves` tells.
    `dial(there, what, {"replica": me, "epoch": epoch, "nonce": that of the segment here})` returns a blocking socket,
    `what` is one of `CONNECTIONS`; at the other end `accept` gets it. `on_lost` is described at `TcpPeer`.

    `lazy`: whom TCP reaches is dialled when that is wanted, see `TcpPeer.want`.

    Raises `TransportError` if the mode is "shm" and the segment cannot be opened, or "nixl" and nothing comes through,
    `OtherEngine` if it has not this `layout` or other switch points, or what `dial` raises.
    """
    if there.layout and there.layout != str(layout):
        raise OtherEngine(
            f"replica {replica} cannot take part: its staging is that of {there.layout}; here it is that of {layout}. "
            "Set FTCOMM_ENGINE and FTCOMM_TRANSPORT to the same on all ranks, and install one version of ftcomm on all"
        )
    if there.tuning and differ(here.tuning, there.tuning):
        raise OtherEngine(
            f"replica {replica} cannot take part: its switch points are {there.tuning}; here they are {here.tuning}. "
            "Set FTCOMM_TUNING to the same file on all ranks, or unset it everywhere"
        )
    peer: Peer
    if mode in ("auto", "shm"):
        reason = _not_shared(here, there)
        if reason is None:
            try:
                return ShmPeer(replica, there.pid, there.segment, there.nonce, layout)
            except OtherEngine as error:
                raise OtherEngine(f"replica {replica} cannot take part: {error}.") from None
            except TransportError as error:
                reason = str(error)
        if mode == "shm":
            raise TransportError(
                f"replica {replica} cannot be reached through shared memory: {reason}. Run the replicas on one host "
                "and in one container, or set FTCOMM_TRANSPORT=auto."
            )
        log.debug("replica %d is not reachable through shared memory: %s", replica, reason)
    fields: Fields = {"replica": me, "epoch": epoch, "nonce": here.nonce}
    if mode == "nixl" or (mode == "auto" and nixl.pays()):
        try:
            peer = nixl.way().connect(replica, epoch, there.nonce, dial(there, NIXL, fields), on_lost)
            peer.nonce = there.nonce
            return peer
        except (TransportError, OSError) as error:
            if mode == "nixl":
                raise TransportError(f"replica {replica} cannot be reached by NIXL: {error}") from error
            log.warning("replica %d is not reached by NIXL, so by TCP: %s", replica, error)
    peer = TcpPeer(replica, epoch, None if lazy else dial(there, TCP, fields), on_lost)
    peer.dial = lambda: dial(there, TCP, fields)
    peer.nonce = there.nonce
    return peer


def accept(
    exchange: Exchange,
    what: str,
    sock: socket.socket,
    replica: int,
    epoch: int,
    life: str,
    on_lost: Lost = lambda *lost: None,
) -> None:
    """The other end of a connection of `connect`: `replica` reads the segment of this one; `life` is the nonce that it
    has dialled with. Blocks while the two say what they are. `on_lost` hears if a put fails; what `Exchange.attach`
    says holds."""
    if what == TCP:
        exchange.attach(sock, replica, epoch, life)
        return
    try:
        reader = nixl.way().accept(replica, epoch, sock, on_lost)
        reader.life = life
        exchange.admit(reader)  # type: ignore[arg-type]  # a stream treats the two alike
    except (TransportError, OSError) as error:
        log.warning("replica %d cannot read this one by NIXL: %s", replica, error)


def here_is(
    host: str,
    port: int,
    segment: Segment,
    tuning: Tuning = BUILT_IN,
    rack: str = "",
    arithmetic: str | None = None,
) -> Address:
    """What others have to know of this process to reach `segment`; it listens at `port` of `host`, in `rack`, and
    reduces with this `arithmetic` (None: that of the host, see `ftcomm.kernels.host.arithmetic`)."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return Address(
        host,
        port,
        boot,
        os.getpid(),
        segment.fd,
        segment.nonce,
        str(segment.layout),
        rack,
        str(tuning),
        own() if arithmetic is None else arithmetic,
    )


def likeness(addresses: Iterable[Address]) -> dict[str, bool]:
    """Of all members of a group, what `GroupView` asks: whether they are on `one_host`, and `alike`."""
    boots, sums = zip(*((address.boot, address.arithmetic) for address in addresses), strict=True)
    return {"one_host": len(set(boots)) == 1, "alike": len(set(sums)) == 1 and sums[0] != ""}


def _not_shared(here: Address, there: Address) -> str | None:
    if not ORDERED:
        return "this processor does not keep the order of stores that the protocol needs"
    if here.boot != there.boot:
        return "it runs on another host"
    return None
