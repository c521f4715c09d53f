"""Which transport reaches a peer: shared memory where its segment can be opened, else TCP."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping

from ftcomm.control.views import Address
from ftcomm.errors import TransportError
from ftcomm.kernels.wait import ORDERED
from ftcomm.transport.segment import HOST, Layout, OtherEngine, Peer
from ftcomm.transport.shm import ShmPeer
from ftcomm.transport.tcp import Lost, TcpPeer

log = logging.getLogger("ftcomm.transport")

Dial = Callable[[Address, str, Mapping[str, int]], socket.socket]  # (where, purpose, fields of the handshake)


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
) -> Peer:
    """Reach the segment of `replica`, which listens `there`, from replica `me`, for `epoch`. Blocks while dialling.

    `mode` is "auto", "shm" or "tcp". With "auto" shared memory is used if the peer's segment can be opened: the kernels
    are the same, and so are process ids, which they are not between two containers of one host. A TCP connection serves
    one epoch, shared memory any number. `dial(there, "data", {"replica": me, "epoch": epoch})` returns a blocking
    socket; at the other end `Exchange.attach` gets it. `on_lost` is described at `TcpPeer`.

    Raises `TransportError` if the mode is "shm" and the segment cannot be opened, `OtherEngine` if it has not this
    `layout`, or what `dial` raises.
    """
    if mode != "tcp":
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
    fields = {"replica": me, "epoch": epoch}
    return TcpPeer(replica, epoch, dial(there, "data", fields), on_lost)


def _not_shared(here: Address, there: Address) -> str | None:
    if not ORDERED:
        return "this processor does not keep the order of stores that the protocol needs"
    if here.boot != there.boot:
        return "it runs on another host"
    return None
