"""Lets the members of a group find each other without a job: by a port that listens, and the handle that tells it.

In a job the control thread of a rank listens already. `Endpoint` does so without a coordinator, and its `handle` is all
that others need to call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from ftcomm.control import fork, handshake, wire
from ftcomm.control.dropped import drop
from ftcomm.control.incoming import Handler
from ftcomm.control.links import Listener, event_loop, hand_over, listen
from ftcomm.control.sealed import Channel
from ftcomm.control.tls import Tls
from ftcomm.errors import ArgumentError, TransportError
from ftcomm.process.joining import join
from ftcomm.process.own import own_process
from ftcomm.settings.credentials import from_env
from ftcomm.transport.address import resolved
from ftcomm.transport.router import ConnectionRouter

DialPurpose = Callable[[str, handshake.Fields, float], Channel]  # (purpose, fields, timeout) -> authenticated, blocking

_HANDLE = re.compile(r"ftcomm://(?P<host>[^/]{1,200}):(?P<port>[0-9]{1,5})/(?P<token>[0-9A-Za-z_-]{1,128})")


_PUBLIC = re.compile(r"(ftcomm://)?[^/]{1,200}:[0-9]{1,5}(?=/|$)")


def shown(handle: object) -> str:
    """Returns what of it may stand in a message: all but the token."""
    if not isinstance(handle, str):
        return f"a {type(handle).__name__}"
    found = _PUBLIC.match(handle)
    return f"{found[0]}/..." if found else f"a text of {len(handle)} characters"


class HandleAddress(NamedTuple):
    """The contents of a handle."""

    host: str
    port: int
    token: str

    def __repr__(self) -> str:
        return f"HandleAddress({self.host}:{self.port})"

    def dial(self, purpose: str, fields: handshake.Fields, timeout: float, tls: Tls | None = None) -> Channel:
        """An authenticated blocking connection. Raises `OSError`."""
        credentials = handshake.Credentials(self.token, tls=tls)
        return wire.connect((self.host, self.port), credentials, purpose, fields, timeout)


def parse(handle: str) -> HandleAddress:
    """Raises `ArgumentError` on what is no handle."""
    found = _HANDLE.fullmatch(handle) if isinstance(handle, str) else None
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ArgumentError(
            f"{shown(handle)} is no handle of ftcomm; pass what Endpoint.handle gives on each member, "
            "ftcomm://host:port/token"
        )
    return HandleAddress(found["host"].strip("[]"), int(found["port"]), found["token"])


class Endpoint:
    """A listening port of this rank without a coordinator. Thread-safe.

    host: an address of this host that the other members can reach; None: FTCOMM_HOST, or the loopback.
    token: what callers have to prove that they hold; None: a random one, which the handle carries. Any holder of the
        handle may call, so keep it among the members.

    Several may live in one process, one for each rank. Raises `TransportError` if it cannot listen, and
    `SettingsError` if `host` is nothing that this host knows, or FTCOMM_TLS_* name files of no use.
    """

    def __init__(self, host: str | None = None, token: str | None = None) -> None:
        own_process()
        self.host = host = resolved(os.environ.get("FTCOMM_HOST", "127.0.0.1") if host is None else host)
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.tls = from_env(self.token).tls
        try:
            sock = listen(host, 0)
        except OSError as error:
            raise TransportError(
                f"cannot listen on {host}: {error.strerror or error}; FTCOMM_HOST has to be an address of this host"
            ) from None
        self.port: int = sock.getsockname()[1]
        self._handlers: dict[str, Handler] = {}
        self.router = ConnectionRouter(self)
        self._loop = event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(sock,), name="ftcomm-endpoint", daemon=True)
        self._thread.start()
        fork.take_part(self, f"the endpoint {host}:{self.port}")
        self._ready.wait()
        if self._loop.is_closed():
            fork.part(self)
            raise TransportError(f"the port {self.port} on {host} cannot be served; see the error above")

    @property
    def handle(self) -> str:
        """The text by which others call this endpoint. It stays the same while the endpoint is open."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ftcomm://{host}:{self.port}/{self.token}"

    def serve(self, purpose: str, handler: Handler) -> None:
        """Hand every incoming connection of `purpose` (blocking) to `handler`, which owns it and must not block."""
        self._handlers[purpose] = handler

    def close(self) -> None:
        """Listen no more, and end the thread; idempotent. Groups that were made with it go on."""
        if fork.is_child():
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        join(self._thread, f"the endpoint {self.host}:{self.port}")
        self.router.close()
        fork.part(self)

    def _run(self, sock: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with sock:
                self._loop.run_until_complete(self._listen(sock))
                self._loop.call_soon(self._ready.set)  # from now on `close` stops what runs forever
                self._loop.run_forever()
                self._loop.run_until_complete(self._listener.close())
        finally:
            self._loop.close()
            self._ready.set()  # also if it could not listen, so that no wait for it lasts for ever

    async def _listen(self, sock: socket.socket) -> None:
        self._listener = Listener(sock, handshake.Credentials(self.token, tls=self.tls), self._called)

    async def _called(self, sock: Channel, opening: handshake.Opening) -> None:
        handler = self._handlers.get(opening.purpose)
        if handler is None:
            drop("purpose", f"a connection for {opening.purpose!r}, which an endpoint does not serve")
            sock.close()
            return
        sock.setblocking(True)
        hand_over(handler, sock, opening.fields)
