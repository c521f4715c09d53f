"""The store in which the ranks of a job meet for what torch does by one: groups of other backends, and a script's keys.

It serves torch's own `TCPStore` clients, so MASTER_ADDR and MASTER_PORT are true for every library, and it needs no
torch. It lives in the launcher: it outlives each rank, and a coordinator that is restarted.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from typing import Any

from ftcomm.control.connection_limit import ConnectionLimit
from ftcomm.control.dropped import Lines
from ftcomm.errors import InitError
from ftcomm.launch.torchrun.store_contents import LIFE_PREFIX, MOST, Parser, QueryError, StoreContents, shown

SLOW = 10.0  # s after which somebody who waits for a key is told of
DEADLINE = 60.0  # s in which a query has to come to its end
SILENT = 10.0  # s in which the first query has to come
SLICE = 0.005  # s after which the queries of one connection wait for what else the event loop has to do


class TorchStore:
    """The server, on one event loop, at any free port if `port` is 0. `tell` gets a line when a client waits long, or
    sends something else than a query. Connections take half of the descriptors that the process may open, at most."""

    def __init__(self, host: str, tell: Callable[[str], None], port: int = 0) -> None:
        self.host, self.port = host, port
        self._tell = tell
        self._limit = ConnectionLimit[int](max(2, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._keys = StoreContents()
        self._links: dict[int, _Client] = {}  # the oldest first
        self._last = 0  # the number of the newest
        self._held = 0  # bytes of queries that have not come to their end, of all connections
        self._lines = {"refused": Lines(), "slow": Lines()}
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def start(self) -> None:
        """Raises `InitError`."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Client(self), self.host, self.port)
        except OSError as error:
            raise InitError(
                f"torch's store cannot listen on {self.host}:{self.port}: {error.strerror or error}; choose another"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Close all connections; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self._links.values()):
            link.cut()

    def opened(self, link: _Client) -> int:
        number = self._last = self._last + 1
        self._links[number] = link
        if (excess := self._limit.come(number, link.source)) is not None:
            self._links[excess.key].refuse(
                f"a query or none, beside {self._limit.most} others; ulimit -n has no room for more"
            )
            self.closed(excess.key)
        return number

    def closed(self, number: int) -> None:
        if self._links.pop(number, None) is not None:
            self._limit.gone(number)
            self._keys.gone(number)

    def holds(self, more: int) -> None:
        """Note that queries that have not come to their end take `more` bytes. Cuts off who holds most of too many."""
        self._held += more
        while self._held > MOST:
            link = max(self._links.values(), key=lambda link: link.held)
            link.refuse("more than there is room for until it has come to its end")

    def answered(self) -> None:
        """Note that a client does not read what it has asked for. Cuts off who leaves most of too much unread."""
        while sum(link.unread for link in self._links.values()) > MOST:
            link = max(self._links.values(), key=lambda link: link.unread)
            link.refuse("queries for more than there is room for until it has read it")

    def asked(self, number: int, name: str, fields: list[Any]) -> None:
        """Raises `QueryError`."""
        self._limit.spoke(number)
        for connection, answer in self._keys.ask(number, name, fields):
            self._links[connection].answer(answer)
        if name == "wait" and self._keys.waits_for(number):
            self._links[number].waits(asyncio.get_running_loop().call_later(SLOW, self._slow, number))

    def refused(self, peer: tuple[Any, ...], why: str) -> None:
        self._say("refused", f"torch's store has closed a connection from {peer[0]}:{peer[1]}, which sent {why}")

    def _slow(self, number: int) -> None:
        keys = self._keys.waits_for(number)
        if not keys:
            return
        text = f"for {SLOW:g} s somebody has waited in torch's store for {shown(keys[0])}, which nobody has set"
        if keys[0].startswith(LIFE_PREFIX):
            text += (
                ". A replica that came back makes groups of other backends (gloo, nccl) only with ranks of its own: "
                'those of several replicas have to be of the backend "ftcomm"'
            )
        self._say("slow", text)

    def _say(self, kind: str, text: str) -> None:
        if (more := self._lines[kind].admit()) is not None:
            self._tell(text + more)


class _Client(asyncio.Protocol):
    """One client. While it does not read its replies, its queries are neither read nor parsed."""

    def __init__(self, store: TorchStore) -> None:
        self._store = store
        self._number = 0
        self.source = ""
        self._parser = Parser()
        self.held = 0  # bytes of queries that have not come to their end
        self._full = False  # as many replies are unread as the transport likes to hold
        self._transport: asyncio.Transport | None = None
        self._next: asyncio.Handle | None = None  # goes on with queries that have come
        self._deadline: asyncio.TimerHandle | None = None  # of the query that has not come to its end
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unread(self) -> int:
        """Bytes of replies that it has not read."""
        assert self._transport is not None
        return self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.source = str(transport.get_extra_info("peername")[0])
        self._deadline = asyncio.get_running_loop().call_later(SILENT, self.refuse, f"nothing for {SILENT:g} s")
        self._number = self._store.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        self._store.closed(self._number)

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        self._go_on()

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._full = False
        self._soon()

    def _soon(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Handle the queries that have come, for `SLICE` seconds."""
        assert self._transport is not None
        if self._next is not None:
            self._next.cancel()
            self._next = None
        end = time.monotonic() + SLICE
        try:
            while not self._full and (query := self._parser.next()) is not None:
                self._no_deadline()
                self._store.asked(self._number, *query)
                if time.monotonic() >= end:
                    self._soon()
                    break
        except QueryError as error:
            self.refuse(str(error))
        self._hold(self._parser.held)
        if self._transport.is_closing():
            self._forget()
        elif self._full or self._next is not None:
            self._no_deadline()
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
            if self.held and self._deadline is None:
                late = f"a query that has not come to its end in {DEADLINE:g} s"
                self._deadline = asyncio.get_running_loop().call_later(DEADLINE, self.refuse, late)

    def answer(self, data: bytes) -> None:
        assert self._transport is not None
        self.waits(None)
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._full:
            self._store.answered()

    def waits(self, timer: asyncio.TimerHandle | None) -> None:
        """Note what to do when it has waited for long; None: it waits no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def refuse(self, why: str) -> None:
        """Cut it off, and tell of it."""
        assert self._transport is not None
        self._store.refused(self._transport.get_extra_info("peername"), why)
        self.cut()

    def cut(self) -> None:
        assert self._transport is not None
        self._transport.abort()
        self._forget()

    def _forget(self) -> None:
        self.waits(None)
        self._no_deadline()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._parser = Parser()
        self._hold(0)

    def _hold(self, size: int) -> None:
        more, self.held = size - self.held, size
        self._store.holds(more)

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
