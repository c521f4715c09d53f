"""Chooses the transport that reaches a peer: shared memory where its segment can be opened, else NIXL if there is RDMA,
else TCP.

`connect` and `accept` are the two ends of a connection; `poller_for` is what a driver then receives with.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from ftcomm.control.liveness import boot, network, pids
from ftcomm.control.sealed import Connection
from ftcomm.control.views import Address
from ftcomm.errors import TransportError
from ftcomm.kernels.host.arithmetic import own
from ftcomm.settings.tuning import BUILT_IN, Tuning, differ
from ftcomm.sync.futex import TOTAL_STORE_ORDER, Waiter
from ftcomm.transport.base import MirrorWriter, OnLost, Peer, Poller
from ftcomm.transport.nixl import network as nixl_network
from ftcomm.transport.nixl.network import rdma_available
from ftcomm.transport.secure import plane
from ftcomm.transport.segment import HOST, Layout, OtherEngine, Segment
from ftcomm.transport.shm import ShmPeer
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.poller import TcpPoller
from ftcomm.transport.tcp.writer import TcpMirrorWriter

if TYPE_CHECKING:
    from ftcomm.transport.nixl.context import Nixl

log = logging.getLogger("ftcomm.transport")

Dial = Callable[[str], Connection]  # what the connection is for


TCP, NIXL = CONNECTIONS = "data", "nixl"  # the purpose of a connection

_nixl_name = ""  # how the names of its agents begin


class AdmitsWriters(Protocol):
    """The part of `ftcomm.collective.exchange.Exchange` that is needed here."""

    def admit(self, writer: MirrorWriter) -> None: ...


def prepare(mode: str, name: str) -> None:
    """Name the NIXL of this process, and load it if FTCOMM_TRANSPORT=`mode` asks for it, so that a lack of it is an
    error before the job is joined. Raises `TransportError`."""
    global _nixl_name
    _nixl_name = name
    if mode == "nixl":
        own_nixl().endpoint()
    elif rdma_available():
        own_nixl()  # so that it is closed after the job was left, as what was begun first is closed last


def own_nixl() -> Nixl:
    """Returns the NIXL of this process. Its modules are imported here: who shares memory or uses TCP needs none."""
    from ftcomm.transport.nixl.context import get_nixl

    return get_nixl(_nixl_name)


def all_by_tcp(mode: str, here: Address, others: Iterable[Address]) -> bool:
    """Whether FTCOMM_TRANSPORT=`mode` reaches all `others` from `here` by TCP; "auto" uses shared memory within a host,
    and NIXL where there is RDMA."""
    if mode != "auto":
        return mode == "tcp"
    return not rdma_available() and all(there.boot != here.boot for there in others)


def connect(
    me: int,
    here: Address,
    replica: int,
    there: Address,
    *,
    epoch: int,
    mode: str,
    dial: Dial,
    on_lost: OnLost,
    layout: Layout = HOST,
    data: str = "none",
    lazy: bool = False,
) -> Peer:
    """Reach the segment of `replica`, which listens `there`, from replica `me`, for `epoch`. Blocks while it dials.

    `mode` is "auto", "shm", "nixl" or "tcp". "auto" uses shared memory if the peer's segment can be opened. The same
    kernel is not enough: two containers of one host have different process ids. Otherwise it uses NIXL if this host and
    the peer have RDMA. `Peer.serves` tells in which epochs the peer can be used.

    `dial(what)` returns a blocking connection to the peer; `what` is one of `CONNECTIONS`, and `accept` takes the other
    end, with `me`, `epoch` and the nonce of the segment here. `on_lost` is described at `TcpMirror`.
    `data` is FTCOMM_DATA; with any value but "none" NIXL is not used.

    With `lazy` a peer by TCP is dialled only when it is wanted, see `Peer.want`.

    Raises `TransportError` if the mode is "shm" and the segment cannot be opened, or "nixl" and nothing comes through,
    `OtherEngine` if the peer has not this `layout` or other switch points, or what `dial` raises.
    """
    ours = _staging_text(layout, data)
    if there.layout and there.layout != ours:
        raise OtherEngine(
            f"replica {replica} cannot take part: its staging is that of {there.layout}; here it is that of {ours}. "
            "Set FTCOMM_ENGINE, FTCOMM_TRANSPORT and FTCOMM_DATA to the same on all ranks, and install one version of "
            "ftcomm on all"
        )
    if there.tuning and differ(here.tuning, there.tuning):
        raise OtherEngine(
            f"replica {replica} cannot take part: its switch points are {there.tuning}; here they are {here.tuning}. "
            "Set FTCOMM_TUNING to the same file on all ranks, or unset it everywhere, and FTCOMM_ALGORITHM to the same"
        )
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
                "and in one container, or set FTCOMM_TRANSPORT=auto, and if FTCOMM_ENGINE is gpu-kernel gpu-reduce."
            )
        log.debug("replica %d is not reachable through shared memory: %s", replica, reason)
    if mode == "nixl" or (mode == "auto" and data == "none" and rdma_available()):
        try:
            network = nixl_network.here()
            if here.boot != there.boot and not network.between_hosts:
                raise TransportError(f"it runs on another host, and UCX may use {network.name}. {nixl_network.MEND}")
            peer = own_nixl().connect(replica, epoch, there.nonce, lambda: dial(NIXL), on_lost, layout)
            peer.nonce = there.nonce
            return peer
        except (TransportError, OSError) as error:
            if mode == "nixl":
                raise TransportError(f"replica {replica} cannot be reached by NIXL: {error}") from error
            log.warning("replica %d is not reached by NIXL, so by TCP: %s", replica, error)
    mirror = TcpMirror(replica, epoch, None if lazy else plane(dial(TCP), data), on_lost, layout)
    mirror.dial = lambda: plane(dial(TCP), data)
    mirror.nonce = there.nonce
    return mirror


def accept(
    exchange: AdmitsWriters,
    what: str,
    connection: Connection,
    replica: int,
    epoch: int,
    nonce: str,
    on_lost: OnLost = lambda *lost: None,
    *,
    data: str = "none",
) -> None:
    """Take the other end of a connection of `connect`: `replica` reads the segment of this member from `epoch` on.
    `nonce` is the one with which it has dialled. Blocks while the two agree. `on_lost` is called if a put fails."""
    if what == TCP:
        exchange.admit(TcpMirrorWriter(plane(connection, data), replica, epoch, nonce))
        return
    try:
        writer = own_nixl().accept(replica, epoch, connection, on_lost)
        writer.nonce = nonce
        exchange.admit(writer)
    except (TransportError, OSError) as error:
        log.warning("replica %d cannot read this one by NIXL: %s", replica, error)


def poller_for(peers: Iterable[Peer], waiter: Waiter) -> Poller | None:
    """Returns the poller for the driver of a stream with these peers; None if all of them share its memory.

    It serves the connections of TCP, or those of NIXL if there are no others. If NIXL is mixed with others, the threads
    of the peers receive, and wake the driver.
    """
    peers = list(peers)
    by_tcp = [peer for peer in peers if isinstance(peer, TcpMirror)]
    nixl = any(peer.transport == "nixl" for peer in peers)
    for peer in by_tcp:
        peer.drive(not nixl)
    if not nixl:
        return TcpPoller(by_tcp, waiter) if by_tcp else None
    from ftcomm.transport.nixl.mirror import NixlMirror
    from ftcomm.transport.nixl.poller import NixlPoller

    by_nixl = [peer for peer in peers if isinstance(peer, NixlMirror)]
    return NixlPoller(by_nixl, waiter) if len(by_nixl) == len(peers) else TcpPoller((), waiter)


def here_is(
    host: str,
    port: int,
    segment: Segment,
    tuning: Tuning = BUILT_IN,
    rack: str = "",
    arithmetic: str | None = None,
    data: str = "none",
) -> Address:
    """Returns the address by which others reach this process and `segment`. It listens at `port` of `host`, in `rack`,
    and reduces with `arithmetic` (None: that of the host, see `ftcomm.kernels.host.arithmetic`). `data` is FTCOMM_DATA.
    """
    return Address(
        host,
        port,
        boot(),
        os.getpid(),
        segment.fd,
        segment.nonce,
        _staging_text(segment.layout, data),
        rack,
        str(tuning),
        own() if arithmetic is None else arithmetic,
        network(),
        pids(),
    )


def common_traits(addresses: Iterable[Address]) -> dict[str, bool]:
    """Returns what `GroupView` needs of all members of a group: whether they are on `one_host`, and `alike`."""
    boots, sums = zip(*((address.boot, address.arithmetic) for address in addresses), strict=True)
    return {"one_host": len(set(boots)) == 1, "alike": len(set(sums)) == 1 and sums[0] != ""}


def _staging_text(layout: Layout, data: str) -> str:
    """Returns a text that is equal for members which can read each other's staging."""
    return str(layout) if data == "none" else f"{layout}, FTCOMM_DATA={data}"


def _not_shared(here: Address, there: Address) -> str | None:
    if not TOTAL_STORE_ORDER:
        return "this processor does not keep the order of stores that the protocol needs"
    if here.boot != there.boot:
        return "it runs on another host"
    return None
