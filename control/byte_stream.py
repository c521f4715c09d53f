"""The bytes of a connection, in the callbacks of its socket: read as they come, written as there is room.

It does what a transport of asyncio does, as far as it is needed here, in half the time: a leader takes in thousands of
ranks in a second or two, and tells all of them of each view.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from ftcomm.control.socket_events import socket_events

_PART = 256 << 10  # bytes that are read at a time, so that others have their turn


class ByteStream:
    """Owns `sock`, which does not block. What comes before `begin` is read after it. `arrived` is given the bytes;
    `ended` is told once why there will be none any more: the connection has failed, or (None) either side has closed
    it. It may be told so within a call."""

    def __init__(
        self, sock: socket.socket, arrived: Callable[[bytes], None], ended: Callable[[OSError | None], None]
    ) -> None:
        self.sock, self._arrived, self._ended = sock, arrived, ended
        self._number = sock.fileno()
        self._events = socket_events()
        self._unsent = bytearray()
        self._flushes: list[asyncio.Future[None]] = []  # callers that wait for the end of that
        self._reads = self._over = False
        self.is_closing = False

    def begin(self) -> None:
        """Read from now on."""
        if not self.is_closing:
            self._reads = True
            self._events.add_reader(self._number, self._read)

    def write(self, data: bytes) -> None:
        """Write without blocking; what finds no room is kept. Does nothing after the end."""
        if self.is_closing:
            return
        if not self._unsent:
            try:
                sent = self.sock.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._end(error)
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._events.add_writer(self._number, self._write)
        self._unsent += data

    @property
    def unsent(self) -> int:
        """Bytes for which there was no room yet."""
        return len(self._unsent)

    async def flushed(self) -> None:
        """Wait until the kernel has all that was written, or the connection has ended."""
        if self._unsent:
            waiting = asyncio.get_running_loop().create_future()
            self._flushes.append(waiting)
            await waiting

    def close(self) -> None:
        """Read no more, flush what can be flushed, and close. Idempotent."""
        self.is_closing = True
        self._read_no_more()
        if not self._unsent:
            self.sock.close()
            self._tell(None)

    def abort(self) -> None:
        """Give the connection up, with what is unsent."""
        self._end(None)

    def _read(self) -> None:
        try:
            data = self.sock.recv(_PART)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._arrived(data)
        else:
            self._read_no_more()
            self._tell(None)

    def _read_no_more(self) -> None:
        if self._reads:
            self._reads = False
            self._events.remove_reader(self._number)

    def _write(self) -> None:
        try:
            del self._unsent[: self.sock.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if not self._unsent:
            self._written()
            if self.is_closing:
                self.sock.close()
                self._tell(None)

    def _written(self) -> None:
        self._events.remove_writer(self._number)
        for waiting in self._flushes:
            if not waiting.done():
                waiting.set_result(None)
        self._flushes.clear()

    def _end(self, error: OSError | None) -> None:
        """Close without a flush, and say so."""
        self.is_closing = True
        self._read_no_more()
        if self._unsent:
            self._unsent.clear()
            self._written()
        self.sock.close()
        self._tell(error)

    def _tell(self, error: OSError | None) -> None:
        if not self._over:
            self._over = True
            self._ended(error)
