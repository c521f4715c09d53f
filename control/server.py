"""Runs a `Coordinator` over real sockets and a real clock, in an asyncio loop (embedded in `ftcomm run`, or alone)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftcomm.control import coordinator as c
from ftcomm.control import messages as m
from ftcomm.control import wire
from ftcomm.control.dropped import drop
from ftcomm.control.links import Listener, listen, serve_messages
from ftcomm.control.store import StoreError, ViewStore
from ftcomm.control.timeouts import Timeouts

log = logging.getLogger("ftcomm.control")

Event = dict[str, Any]


class ServerError(RuntimeError):
    """The coordinator cannot start; the message says why and what to do."""


class CoordinatorServer:
    """All methods belong to one event loop. Events are handed to `on_event` as JSON-able dicts in that loop."""

    def __init__(
        self,
        replicas: int,
        ranks_per_replica: int,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        store: Path | None = None,
        timeouts: Timeouts,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._new = (replicas, ranks_per_replica, timeouts)
        self._token, self._host, self._port = token, host, port
        self._store = ViewStore(store)
        self._on_event = on_event
        self._beat = timeouts.beat
        self._machine: c.Coordinator | None = None
        self._writers: dict[c.Conn, asyncio.StreamWriter] = {}
        self._conns = 0
        self._listener: Listener | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self.failed = ""

    @property
    def endpoint(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    @property
    def steps(self) -> dict[int, int]:
        """Replica -> the last step that its heartbeats told; of those that are connected."""
        return {} if self._machine is None else {link.replica: link.step for link in self._machine.links.values()}

    async def start(self) -> None:
        """Raises `ServerError` if the port is taken or another coordinator holds the file of views."""
        try:
            self._store.open()
        except StoreError as error:
            raise ServerError(str(error)) from None
        ranks = {len(member.ranks) for view in self._store.views for member in view.members} - {self._new[1]}
        if ranks:
            self._store.close()
            raise ServerError(
                f"{self._store.path} is of a job with {ranks.pop()} ranks a replica, not {self._new[1]}; choose "
                "another --store, or the --ranks-per-replica of that job"
            )
        try:
            sock = listen(self._host, self._port)
        except OSError as error:
            self._store.close()
            raise ServerError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}; another coordinator may run "
                "there. Choose another --port, or 0 for any free one"
            ) from None
        self._port = sock.getsockname()[1]
        self._machine = c.Coordinator(
            *self._new, views=self._store.views, now=time.monotonic(), lifetime=secrets.randbits(32)
        )
        self._listener = Listener(sock, self._token, self._peer)
        self._ticker = asyncio.ensure_future(self._tick())

    def drain(self) -> None:
        """All replicas leave at one common step boundary."""
        if self._machine is not None:
            self._do(self._machine.drain())

    async def wait_done(self) -> None:
        """Until all members have finished, or the job has failed (then `failed` says why)."""
        await self._done.wait()

    async def stop(self) -> None:
        """Close every connection and the file of views; idempotent. The members do not notice until they need us."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._listener is not None:
            await self._listener.close()
        for writer in self._writers.values():
            writer.close()
        self._store.close()
        self._machine = None
        self._listener = self._ticker = None

    async def _peer(self, sock: socket.socket, opening: wire.Opening) -> None:
        if opening.purpose != "leader" or self._machine is None:
            drop("purpose", f"a connection for {opening.purpose!r}, which a coordinator does not serve")
            sock.close()
            return
        self._conns += 1
        conn = self._conns

        def ready(writer: asyncio.StreamWriter) -> None:
            self._writers[conn] = writer

        def received(message: m.AnyMessage) -> None:
            if self._machine is not None:
                self._do(self._machine.receive(conn, message, time.monotonic()))

        await serve_messages(sock, received, ready)
        self._writers.pop(conn, None)
        if self._machine is not None:
            self._do(self._machine.disconnected(conn, time.monotonic()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._beat / 2)
            if self._machine is not None:
                self._do(self._machine.tick(time.monotonic()))

    def _do(self, actions: list[c.Action]) -> None:
        for action in actions:
            if isinstance(action, c.Send):
                writer = self._writers.get(action.conn)
                if writer is not None:
                    wire.write_frame(writer, m.encode(action.message))
            elif isinstance(action, c.Persist):
                try:
                    self._store.append(action.view)
                except OSError as error:  # a view that is not on the disk must not be heard of
                    reason = f"the views cannot be stored in {self._store.path}: {error.strerror}; free space there"
                    self._log("failed", {"reason": reason})
                    self._over(reason)
                    return
            elif isinstance(action, c.Close):
                writer = self._writers.pop(action.conn, None)
                if writer is not None:
                    writer.close()
            elif isinstance(action, c.Log):
                self._log(action.kind, action.fields)
            else:
                self._over(action.failed)

    def _over(self, failed: str) -> None:
        self.failed = self.failed or failed
        self._done.set()

    def _log(self, kind: str, fields: dict[str, Any]) -> None:
        try:
            self._on_event({**fields, "time": time.time(), "mono": time.monotonic(), "kind": kind})
        except Exception:  # whoever listens must not keep a decision from those who wait for it
            log.exception("cannot tell of the event %s", kind)
