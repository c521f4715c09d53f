"""NIXL in this process, for all its groups: loaded at the first use, and both ends of a connection."""

from __future__ import annotations

import atexit
import importlib.util
import os
import threading
from collections.abc import Sequence

from ftcomm.control import fork
from ftcomm.control.sealed import Connection
from ftcomm.errors import TransportError
from ftcomm.transport.base import Lost
from ftcomm.transport.nixl import handshake, mirror
from ftcomm.transport.nixl.agent import Endpoint
from ftcomm.transport.nixl.network import rdma_devices
from ftcomm.transport.nixl.writer import NixlMirrorWriter


class Nixl:
    """The NIXL of one process. Nothing is loaded, and no memory taken, before the first connection.

    `name` begins the names of its agents, as in "replica.rank". `devices` are those of each rail, as UCX_NET_DEVICES.
    """

    def __init__(self, name: str = "", devices: Sequence[str] = ("",)) -> None:
        self._name, self._devices = name or f"process.{os.getpid()}", tuple(devices)
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None

    def endpoint(self) -> Endpoint:
        """Blocks for half a second the first time. Raises `TransportError`."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = Endpoint(self._name, self._devices)
            return self._endpoint

    def close(self) -> None:
        """Blocks for two seconds at most; idempotent. Does nothing in a forked child."""
        if fork.is_child():
            return
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def connect(self, replica: int, epoch: int, nonce: str, sock: Connection, on_lost: Lost) -> mirror.NixlMirror:
        """The reader's side of a connection, which it owns from here on. Blocks until a put has come through.

        `nonce` is that of the segment of `replica`, `on_lost` as at `TcpMirror`. Raises `TransportError` or `OSError`.
        """
        try:
            endpoint = self.endpoint()
            while True:
                peer = mirror.NixlMirror(endpoint, endpoint.use_mirror(nonce), replica, epoch, sock, on_lost)
                try:
                    if peer.meet():
                        return peer
                    endpoint.renew_mirror(nonce, peer.mirror)
                except BaseException:
                    peer.close()
                    raise
        except BaseException:
            sock.close()
            raise

    def accept(self, replica: int, epoch: int, sock: Connection, on_lost: Lost) -> NixlMirrorWriter:
        """The writer's side. Raises `TransportError` or `OSError`, and tells the other side as well."""
        try:
            here = mirror.kind_of(None)
            try:
                endpoint = self.endpoint()
                here = mirror.kind_of(endpoint)
                while True:
                    wanted = handshake.receive(sock)
                    if not isinstance(wanted, handshake.Wanted):
                        raise ConnectionError("an answer, expected what the reader wants")
                    problem = handshake.differ(here, wanted.kind, f"replica {replica}")
                    if problem:
                        raise TransportError(problem)
                    remote = endpoint.know(wanted.token, wanted.address, wanted.agents)
                    handshake.send(sock, handshake.Answer(here, fresh=remote is None))
                    if remote is not None:
                        break
            except TransportError as error:
                handshake.send(sock, handshake.Answer(here, problem=str(error)[:2000]))
                raise
            reader = NixlMirrorWriter(endpoint, remote, wanted.channel, sock, replica, epoch, on_lost)
            reader.greet()
            return reader
        except BaseException:
            sock.close()
            raise


_lock = threading.Lock()
_nixl: Nixl | None = None


def get_nixl(name: str = "", devices: Sequence[str] | None = None) -> Nixl:
    """The NIXL of this process. The first call says what it is named and which devices it uses."""
    global _nixl
    with _lock:
        if _nixl is None:
            _nixl = Nixl(name, rails(os.environ.get("FTCOMM_NIXL_DEVICES", "")) if devices is None else devices)
            # Before the job is left, if this is called before: the last words to the others still have to go.
            atexit.register(_nixl.close)
        return _nixl


def rails(text: str) -> tuple[str, ...]:
    """The devices of each rail, as UCX_NET_DEVICES has them, out of FTCOMM_NIXL_DEVICES: "mlx5_0:1;mlx5_1:1"."""
    return tuple(part.strip() for part in text.split(";"))


def rdma_available() -> bool:
    """Whether there is a device for RDMA, and NIXL is installed. FTCOMM_TRANSPORT=auto uses NIXL only then."""
    return bool(rdma_devices()) and any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13"))
