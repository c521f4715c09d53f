"""Connections of the control plane in asyncio: an outgoing link that comes back, and a listening port.

Nothing that arrives ends a loop here, nor does an error in what is called from one: a link is made again, a port goes
on accepting, and what was dropped is counted in `ftcomm.control.dropped`. So no task dies unseen.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from ftcomm.control import messages as m
from ftcomm.control import wire
from ftcomm.control.dropped import drop
from ftcomm.control.within import within

log = logging.getLogger("ftcomm.control")

HANDSHAKE_TIMEOUT = 5.0  # s
MAX_HANDSHAKES = 256  # under way at one port; the oldest makes room for a newer one
CALL_TIMEOUT = 1.0  # s for a call of who has taken the place of another; see `Link.redirect`
FIRST_PAUSE = 0.02  # s before a broken link is made again; doubled up to half a second


async def serve_messages(
    sock: socket.socket,
    on_message: Callable[[m.AnyMessage], None],
    writer_ready: Callable[[asyncio.StreamWriter], None],
) -> str:
    """Read messages until the connection ends; returns why it did. Owns `sock`.

    A frame that is no message is dropped, one that is too long ends the connection, since what follows it cannot be
    found.
    """
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        writer_ready(writer)
        while True:
            data = await wire.read_frame(reader, wire.MAX_MESSAGE)
            try:
                message = m.decode(data)
            except msgspec.DecodeError as error:
                drop("message", f"a frame of {len(data)} bytes that is no message: {error}")
                continue
            try:
                on_message(message)
            except Exception as error:
                drop("internal", f"{type(message).__name__}: {error!r}", error=error)
    except (asyncio.IncompleteReadError, OSError) as error:
        if isinstance(error, wire.HandshakeError):
            drop(error.kind, str(error))
        return str(error) if isinstance(error, OSError) and str(error) else "its connection closed"
    finally:
        writer.close()


class Link:
    """An authenticated connection that is made again whenever it breaks, until `close`.

    `send` never blocks: with no connection a message is dropped, and `on_open` says again what matters. All of it runs
    in one event loop. An error in a callback costs the connection, which is made again, and never the link.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        purpose: str,
        fields: wire.Fields,
        *,
        on_open: Callable[[], None],
        on_message: Callable[[m.AnyMessage], None] = lambda message: None,
        on_down: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.address = address
        self._addresses = [address]  # the last that we were told, and the one of the start
        self._token, self._purpose, self._fields = token, purpose, fields
        self._on_open, self._on_message, self._on_down = on_open, on_message, on_down
        self._writer: asyncio.StreamWriter | None = None
        self._opened_at = 0.0
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, message: m.Message) -> None:
        if self._writer is not None:
            wire.write_frame(self._writer, m.encode(message))

    def redirect(self, address: tuple[str, int]) -> None:
        """Whom we are to reach is at `address` now, and says that it has no connection of ours; so the one that there
        is leads to somebody else, unless it is so new that the two have crossed. If `address` cannot be reached, the
        one of the start is tried in turn with it."""
        loop = asyncio.get_running_loop()
        if self._writer is not None and loop.time() - self._opened_at < CALL_TIMEOUT:
            return
        self._task.cancel()
        self._writer = None
        self.address, self._addresses = address, [address, self._addresses[-1]]
        self._on_down(ConnectionError(f"who has its place is at {address[0]}:{address[1]}"))
        self._task = loop.create_task(self._run())

    def close(self) -> None:
        """Flush what can be flushed, and end."""
        self._task.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while True:
            begun = loop.time()
            try:
                why = await self._once()
            except OSError as error:
                why = error
            except Exception as error:
                drop("internal", f"the connection to {self.address[0]}:{self.address[1]}: {error!r}", error=error)
                why = ConnectionError(repr(error))
            if self._writer is None:
                self.address = self._addresses[self.address == self._addresses[0] and len(self._addresses) > 1]
            self._writer = None
            if loop.time() - begun > 1.0:
                pause = FIRST_PAUSE  # who is turned away at once must not come back at once
            try:
                self._on_down(why)
            except Exception as error:
                drop("internal", f"on the loss of a connection: {error!r}", error=error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def _once(self) -> OSError:
        """One connection from its beginning to its end; why it ended. Raises `OSError` if there was none."""
        sock = await open_socket(self.address, self._token, self._purpose, self._fields)
        return ConnectionError(await serve_messages(sock, self._on_message, self._opened))

    @property
    def is_up(self) -> bool:
        return self._writer is not None

    def _opened(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._opened_at = asyncio.get_running_loop().time()
        self._on_open()


async def open_socket(address: tuple[str, int], token: str, purpose: str, fields: wire.Fields) -> socket.socket:
    """A non-blocking authenticated connection. Raises `OSError`, also if it takes longer than the handshake may."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        wire.tune(sock)
        try:
            await within(HANDSHAKE_TIMEOUT, loop.sock_connect(sock, address))
        except (asyncio.TimeoutError, TimeoutError):
            raise ConnectionError(f"no connection within {HANDSHAKE_TIMEOUT:g} s") from None
        except OSError as error:
            raise wire.unreached(error) from None
        except (ValueError, OverflowError) as error:  # somebody has told us an address that cannot be
            raise ConnectionError(f"no address: {error}") from None
        await wire.handshake(sock, wire.client_steps(token, purpose, fields), HANDSHAKE_TIMEOUT)
        return sock
    except BaseException:
        sock.close()
        raise


class Listener:
    """Accepts connections, does the handshake, and hands the socket (non-blocking) with its `Opening` on.

    `on_peer` owns the socket from then on; if it raises, the socket is closed. Who has not proved to hold the token may
    keep `MAX_HANDSHAKE` bytes for `HANDSHAKE_TIMEOUT` seconds, and not more than `MAX_HANDSHAKES` may do so at a time.
    """

    def __init__(
        self, sock: socket.socket, token: str, on_peer: Callable[[socket.socket, wire.Opening], Awaitable[None]]
    ):
        sock.setblocking(False)
        self._sock, self._token, self._on_peer = sock, token, on_peer
        self._strangers: dict[asyncio.Task[None], None] = {}  # in their handshake, the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # out of descriptors, say: wait for better times, but stay
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._strangers) >= MAX_HANDSHAKES:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
                drop("crowded", f"the oldest of {MAX_HANDSHAKES} connections that had not proved who they are")
            task = self._start(self._incoming(sock))
            self._strangers[task] = None
            task.add_done_callback(self._known)
            await asyncio.sleep(0)  # the next may be there already; others must have their turn in a flood

    def _known(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)

    async def _incoming(self, sock: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            sock.setblocking(False)
            wire.tune(sock)
            opening = await wire.handshake(sock, wire.server_steps(self._token), HANDSHAKE_TIMEOUT)
            self._known(task)
            await self._on_peer(sock, opening)
        except OSError as error:
            kind = error.kind if isinstance(error, wire.HandshakeError) else "handshake"
            drop(kind, f"a connection: {error}", said=not isinstance(error, wire.Unspoken))
            sock.close()
        except Exception as error:
            drop("internal", f"a connection: {error!r}", error=error)
            sock.close()
        except BaseException:
            sock.close()
            raise

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._sock.close()


def hand_over(handler: Callable[[socket.socket, wire.Fields], None], sock: socket.socket, fields: wire.Fields) -> None:
    """Run `handler`, which owns `sock` from then on, and close that if it raises: for a thread of its own."""
    try:
        handler(sock, fields)
    except wire.BadFields as error:
        drop("fields", f"a connection: {error}")
        sock.close()
    except Exception as error:
        drop("internal", f"a connection: {error!r}", error=error)
        sock.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock
