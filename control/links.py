"""Connections of the control plane in asyncio: an outgoing link that comes back, and a listening port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from ftcomm.control import messages as m
from ftcomm.control import wire

log = logging.getLogger("ftcomm.control")

HANDSHAKE_TIMEOUT = 5.0  # s
FIRST_PAUSE = 0.02  # s before a broken link is made again; doubled up to half a second


async def serve_messages(
    sock: socket.socket,
    on_message: Callable[[m.AnyMessage], None],
    writer_ready: Callable[[asyncio.StreamWriter], None],
) -> str:
    """Read messages until the connection ends; returns why it did. A frame that is no message is dropped."""
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        writer_ready(writer)
        while True:
            data = await wire.read_frame(reader, m.MAX_MESSAGE)
            try:
                message = m.decode(data)
            except msgspec.DecodeError as error:
                log.warning("dropped a frame of %d bytes that is no message: %s", len(data), error)
                continue
            try:
                on_message(message)
            except Exception:
                log.exception("internal error while handling %s", type(message).__name__)
    except (asyncio.IncompleteReadError, OSError) as error:
        return str(error) if isinstance(error, OSError) and str(error) else "its connection closed"
    finally:
        writer.close()


class Link:
    """An authenticated connection that is made again whenever it breaks, until `close`.

    `send` never blocks: with no connection a message is dropped, and `on_open` says again what matters. All of it runs
    in one event loop.
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
        self._token, self._purpose, self._fields = token, purpose, fields
        self._on_open, self._on_message, self._on_down = on_open, on_message, on_down
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_log_error)

    def send(self, message: m.Message) -> None:
        if self._writer is not None:
            wire.write_frame(self._writer, m.encode(message))

    def close(self) -> None:
        """Flush what can be flushed, and end."""
        self._task.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while True:
            try:
                sock = await open_socket(self.address, self._token, self._purpose, self._fields)
            except OSError as error:
                self._on_down(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.5)
                continue
            opened = loop.time()
            why = await serve_messages(sock, self._on_message, self._opened)
            self._writer = None
            if loop.time() - opened > 1.0:  # who is turned away at once must not come back at once
                pause = FIRST_PAUSE
            self._on_down(ConnectionError(why))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    @property
    def is_up(self) -> bool:
        return self._writer is not None

    def _opened(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._on_open()


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("internal error in a connection of the control plane", exc_info=task.exception())


async def open_socket(address: tuple[str, int], token: str, purpose: str, fields: wire.Fields) -> socket.socket:
    """A non-blocking authenticated connection. Raises `OSError`, also if it takes longer than the handshake may."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        wire.tune(sock)
        try:
            await asyncio.wait_for(loop.sock_connect(sock, address), HANDSHAKE_TIMEOUT)
        except (asyncio.TimeoutError, TimeoutError):
            raise ConnectionError(f"no connection within {HANDSHAKE_TIMEOUT:g} s") from None
        await wire.handshake(sock, wire.client_steps(token, purpose, fields), HANDSHAKE_TIMEOUT)
        return sock
    except BaseException:
        sock.close()
        raise


class Listener:
    """Accepts connections, does the handshake, and hands the socket (non-blocking) with its `Opening` on."""

    def __init__(
        self, sock: socket.socket, token: str, on_peer: Callable[[socket.socket, wire.Opening], Awaitable[None]]
    ):
        sock.setblocking(False)
        self._sock, self._token, self._on_peer = sock, token, on_peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_error)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # out of descriptors, say: wait for better times, but stay
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            self._start(self._incoming(sock))

    async def _incoming(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            wire.tune(sock)
            opening = await wire.handshake(sock, wire.server_steps(self._token), HANDSHAKE_TIMEOUT)
        except OSError as error:
            log.warning("refused a connection: %s", error)
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        await self._on_peer(sock, opening)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        self._sock.close()


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
