"""The launcher's side of its socket: it reads requests, answers them, and sends events to subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.errors import FtcommError
from ftcomm.launch.admin import protocol
from ftcomm.launch.rundir import short

MOST = 32  # connections at once
BEHIND = 8 << 20  # bytes by which a subscriber may lag before it is cut off
CLOSING = 5.0  # s to close a connection that takes no answers

RequestHandler = Callable[[protocol.AnyRequest], protocol.AnyAnswer]


class AdminServer:
    """The server, on one event loop. `handle` answers every request but `GetEvents`; an `FtcommError` of it is a
    refusal."""

    def __init__(self, path: Path, handle: RequestHandler) -> None:
        self.path = path
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._subscribers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Open the socket. Raises `OSError`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short(self.path) as address:
                listener.bind(address)
                self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=protocol.MAX_REQUEST)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """Close the socket and all connections; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for writer in list(self._writers):
            writer.close()
        for writer in list(self._writers):
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), CLOSING)

    def tell(self, event: dict[str, Any]) -> None:
        """Send `event` to all subscribers. One that reads too slowly is cut off, since the launcher must not wait for
        it."""
        if not self._subscribers:
            return
        line = protocol.encode(protocol.Happened(event))
        for writer in list(self._subscribers):
            if writer.transport.get_write_buffer_size() > BEHIND:
                self._subscribers.discard(writer)
                writer.transport.abort()
            else:
                writer.write(line)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= MOST:
            writer.write(
                protocol.encode(protocol.Rejected(f"{MOST} connections to this job are open; close one of them"))
            )
            writer.close()
            return
        self._writers.add(writer)
        try:
            while (line := await _read_line(reader)) is not None:
                writer.write(protocol.encode(self._answer(line, writer)))
                await writer.drain()
        except _TooLong:
            writer.write(protocol.encode(protocol.Rejected(f"the line is longer than {protocol.MAX_REQUEST} bytes")))
        except OSError:
            pass  # the client has gone
        finally:
            self._writers.discard(writer)
            self._subscribers.discard(writer)
            writer.close()

    def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> protocol.AnyAnswer:
        try:
            request = protocol.decode_request(line)
        except msgspec.DecodeError as error:
            return protocol.Rejected(f"not a request: {error}")
        if isinstance(request, protocol.GetEvents):
            self._subscribers.add(writer)
            return protocol.Acknowledged()
        try:
            return self._handle(request)
        except FtcommError as error:
            return protocol.Rejected(str(error))


class _TooLong(Exception):
    pass


async def _read_line(reader: asyncio.StreamReader) -> bytes | None:
    """Reads a line; None at the end. A last line without an end was cut short, so it is no request."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise _TooLong from None
