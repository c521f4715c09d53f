"""NIXL in this process, for all its groups: it is loaded at the first use, and makes both ends of a connection."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from ftcomm.control import fork
from ftcomm.control.sealed import Connection
from ftcomm.errors import TransportError
from ftcomm.transport.base import OnLost
from ftcomm.transport.nixl import handshake, mirror
from ftcomm.transport.nixl.agent import NixlEndpoint
from ftcomm.transport.nixl.hearing import HearingProbe
from ftcomm.transport.nixl.writer import NixlMirrorWriter
from ftcomm.transport.segment import HOST, Layout

log = logging.getLogger("ftcomm.transport")

_AGAIN = 0.05  # s before a connection that was ended is dialled again
_DEAF = "this process hears nothing by NIXL any more: another died, or was stopped, while it told it something"


class Nixl:
    """The NIXL of one process. Nothing is loaded, and no memory taken, before the first connection.

    `name` begins the names of its agents, as in "replica.rank". `devices` are those of each rail, as UCX_NET_DEVICES.
    """

    def __init__(self, name: str = "", devices: Sequence[str] = ("",)) -> None:
        self._name, self._devices = name or f"process.{os.getpid()}", tuple(devices)
        self._lock = threading.Lock()
        self._endpoint: NixlEndpoint | None = None
        self._retired: list[NixlEndpoint] = []  # for ever: peers may still do something with their agents
        self._asking = threading.Lock()  # guards what follows; held while this process asks itself something
        self._probe: HearingProbe | None = None

    def endpoint(self) -> NixlEndpoint:
        """Returns the endpoint. Blocks for half a second the first time. Raises `TransportError`."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = NixlEndpoint(self._name, self._devices, self._doubt)
            return self._endpoint

    def close(self) -> None:
        """Close. Blocks for two seconds at most; idempotent. Does nothing in a forked child."""
        if fork.is_child():
            return
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
            retired, self._retired = self._retired, []
        for each in [endpoint, *retired]:
            if each is not None:
                each.close()

    def connect(
        self,
        replica: int,
        epoch: int,
        nonce: str,
        dial: Callable[[], Connection],
        on_lost: OnLost,
        layout: Layout = HOST,
    ) -> mirror.NixlMirror:
        """Make the reader's side of a connection, which `dial` opens. Blocks until a put has come through.

        `nonce` is that of the segment of `replica`; `on_lost` is as at `TcpMirror`. Raises `TransportError` or
        `OSError`.
        """
        end = time.monotonic() + handshake.HANDSHAKE_TIMEOUT
        doubt = False
        while True:
            try:
                return self._connect(replica, epoch, nonce, dial(), on_lost, layout, doubt)
            except handshake.NothingCame as error:
                if doubt and time.monotonic() > end:
                    raise
                log.info("replica %d is dialled again: %s", replica, error)
            self._ask(self.endpoint())
            doubt = True
            time.sleep(_AGAIN)

    def _connect(
        self, replica: int, epoch: int, nonce: str, sock: Connection, on_lost: OnLost, layout: Layout, doubt: bool
    ) -> mirror.NixlMirror:
        try:
            endpoint = self.endpoint()
            while True:
                peer = mirror.NixlMirror(endpoint, endpoint.use_mirror(nonce), replica, epoch, sock, on_lost, layout)
                try:
                    if peer.meet(doubt):
                        return peer
                    endpoint.renew_mirror(nonce, peer.mirror)
                except BaseException:
                    peer.close()
                    raise
        except BaseException:
            sock.close()
            raise

    def accept(self, replica: int, epoch: int, sock: Connection, on_lost: OnLost) -> NixlMirrorWriter:
        """Make the writer's side. Raises `TransportError` or `OSError`, and tells the other side as well."""
        try:
            here = mirror.kind_of(None)
            try:
                while True:
                    endpoint = self.endpoint()
                    here = mirror.kind_of(endpoint)
                    wanted = handshake.receive(sock)
                    if not isinstance(wanted, handshake.ReaderRequest):
                        raise ConnectionError("an answer, expected what the reader wants")
                    if wanted.doubt:
                        self._ask(endpoint)
                        endpoint = self.endpoint()
                    problem = handshake.differ(here, wanted.kind, f"replica {replica}")
                    if problem:
                        raise TransportError(problem)
                    remote = endpoint.know(wanted.token, wanted.address, wanted.agents)
                    handshake.send(sock, handshake.WriterAnswer(here, fresh=remote is None))
                    if remote is not None:
                        break
            except TransportError as error:
                handshake.send(sock, handshake.WriterAnswer(here, problem=str(error)[:2000]))
                raise
            reader = NixlMirrorWriter(endpoint, remote, wanted.channel, sock, replica, epoch, on_lost)
            try:
                reader.greet()
            except BaseException:
                reader.close()
                raise
            return reader
        except BaseException:
            sock.close()
            raise

    def _doubt(self, endpoint: NixlEndpoint) -> None:
        """Do as `_ask` does, in the thread of `endpoint`, while an op waits."""
        try:
            self._ask(endpoint)
        except (
            TransportError,
            OSError,
            RuntimeError,
        ) as error:  # no descriptor or thread can be had: asked again later
            log.warning("cannot ask, or mend, whether this process hears by NIXL: %s", error)

    def _ask(self, endpoint: NixlEndpoint) -> None:
        """Replace `endpoint` if it does not hear what it is told. Blocks for about a second then. Raises
        `TransportError` if it cannot be replaced."""
        with self._asking:
            if endpoint.retired:
                return
            try:
                if self._probe is None:
                    self._probe = HearingProbe(endpoint)
                if self._probe.reaches(endpoint):
                    return
            except TransportError as error:  # no proof that it does not hear
                log.warning("%s; its connections stay as they are", error)
                self._probe = None
                return
            log.warning("%s; its connections are made again, by new agents", _DEAF)
            fresh = NixlEndpoint(self._name, self._devices, self._doubt)
            with self._lock:
                closed = self._endpoint is not endpoint
                if not closed:
                    self._endpoint = fresh
                    self._retired.append(endpoint)
            if closed:
                fresh.close()
            endpoint.retire(_DEAF)


_lock = threading.Lock()
_nixl: Nixl | None = None


def get_nixl(name: str = "") -> Nixl:
    """Returns the NIXL of this process. The first call gives its name."""
    global _nixl
    with _lock:
        if _nixl is None:
            _nixl = Nixl(name, rails(os.environ.get("FTCOMM_NIXL_DEVICES", "")))
            # It is closed after the job was left, if `prepare` asked for it: the last messages still have to go.
            atexit.register(_nixl.close)
        return _nixl


def rails(text: str) -> tuple[str, ...]:
    """Returns the devices of each rail, as in UCX_NET_DEVICES, from FTCOMM_NIXL_DEVICES: "mlx5_0:1;mlx5_1:1"."""
    return tuple(part.strip() for part in text.split(";"))
