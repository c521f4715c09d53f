"""Sockets of the control plane, blocking and in asyncio: how they are set, connected, opened by the handshake, and
written to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftcomm.control.dropped import drop
from ftcomm.control.fork import apart
from ftcomm.control.handshake import Credentials, HandshakeError, HungUp, Unspoken, Wired, client, place
from ftcomm.control.liveness import unanswered
from ftcomm.control.running_time import RunningTimer
from ftcomm.control.sealed import Channel, Connection
from ftcomm.control.views import Address
from ftcomm.control.wait_for import wait_for

MAX_MESSAGE = 16 << 20  # bytes of a frame of the control plane; longer ones are refused unread
MAX_UNSENT = 64 << 20  # bytes that wait for a peer before its connection is given up
KERNEL = 5.0  # s for a kernel to answer, and for a process that has begun to answer; see `connect`
_LOOK = 0.5  # s between two checks that the kernel still answers

_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

_THIN_LINEAR_TIMEOUTS, _RTO_MAX_MS = 16, 44  # <linux/tcp.h>
USER_TIMEOUT = 30_000  # ms


def tune(sock: socket.socket) -> None:
    """Make small messages leave at once, and end a connection whose other end has vanished within seconds, not after a
    quarter of an hour.

    After an outage a heartbeat has to come through soon. TCP would double the wait before each attempt, so a network
    that was away for half a heartbeat timeout would be away for all of it.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
    sock.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
    with contextlib.suppress(OSError):  # Linux 6.15
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)


def for_bulk(sock: Connection, seconds: float = 0.0) -> None:
    """Let data lie unread at the other end for `seconds` (0: for ever).

    The kernel ends a connection whose window is closed for as long as `tune` says, even if the other kernel answers. A
    few messages never fill a window, but a stopped process that is sent gradients would be cut off. The sender of such
    data closes the connection when the control plane says that its peer is gone.
    """
    with contextlib.suppress(OSError):  # a socket of another kind than TCP
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * seconds))


def unreached(error: OSError) -> OSError:
    """Returns why there is no connection: `error`, in words if it says too little. A connection that is reset at once
    was taken first."""
    if isinstance(error, ConnectionResetError):
        return HungUp(str(error))
    if error.errno != errno.EADDRNOTAVAIL:
        return error
    known = ConnectionError(no_ports())
    known.errno = error.errno
    return known


def no_ports() -> str:
    """Returns why the kernel has no port left, and the mend."""
    least, most = _PORTS.read_text().split()
    return (
        f"all ports that this host gives away by itself, {least} to {most}, are in use; end what holds them (ss -tan), "
        "or give more: sysctl -w net.ipv4.ip_local_port_range='10240 65535'"
    )


def late(steps: Wired, sock: socket.socket, timeout: float) -> HandshakeError:
    """Makes the error for a handshake that came to a halt on `sock`: how far it had got tells why."""
    try:
        steps.throw(TimeoutError(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)))
    except HandshakeError as error:
        return error
    except (TimeoutError, StopIteration):
        pass
    return HandshakeError(f"no answer to the handshake within {timeout:g} s")


# -- blocking sockets --------------------------------------------------------------------------------------------


def connect(
    address: tuple[str, int],
    credentials: Credentials,
    purpose: str,
    fields: dict[str, str | int],
    timeout: float,
    to: Address | None = None,
    process: RunningTimer | None = None,
) -> Channel:
    """Returns an authenticated blocking connection, to the process at `to` if that is known. Raises `OSError`, and
    `HandshakeError` if refused.

    The process at the other end has `timeout` seconds, since it may hold its interpreter or be stopped. Call once and
    wait: each call that is given up takes a place in its backlog until it runs again. Its kernel has `KERNEL` of these
    seconds to answer, and so has the process once it has begun to answer. Seconds in which this process does not run do
    not count. `process` is the timer of the process there if it is not `timeout`.
    """
    kernel = min(timeout, KERNEL)
    sock = _connected(address, kernel)
    steps = client(credentials, purpose, fields, to, place(sock.getpeername))
    deadline: float | None = None  # for what comes after the first byte
    try:
        tune(sock)
        received: bytes | None = None
        while True:
            try:
                data = steps.send(received) if received is not None else next(steps)
            except StopIteration as stop:
                sock.settimeout(None)
                return Channel(sock, *stop.value)
            received = None
            if not isinstance(data, int):
                with contextlib.suppress(ConnectionError):  # what was sent before the end may say why it ended
                    sock.sendall(data)
                continue
            if deadline is None:
                _first_byte(sock, process or RunningTimer(timeout, time.monotonic), kernel)
                deadline = time.monotonic() + kernel
            received = _recv_exactly(sock, data, deadline)
    except TimeoutError:
        why = late(steps, sock, timeout)
        sock.close()
        raise why from None
    except (ConnectionResetError, BrokenPipeError) as error:
        sock.close()
        raise HungUp(str(error)) from None
    except BaseException:
        sock.close()
        raise


def _connected(address: tuple[str, int], timeout: float) -> socket.socket:
    """Returns a connected socket, before its handshake. Raises `OSError`. A child that is forked meanwhile does not
    have the connection."""
    failed: OSError | None = None
    for family, kind, _, _, there in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        try:
            sock = apart(socket.socket(family, kind))
        except OSError as error:  # an address family that this kernel lacks
            failed = unreached(error)
            continue
        try:
            sock.settimeout(timeout)
            sock.connect(there)
            return sock
        except OSError as error:
            sock.close()
            failed = unreached(error)
    assert failed is not None  # getaddrinfo returns an address or raises
    raise failed


def _first_byte(sock: socket.socket, process: RunningTimer, kernel: float) -> None:
    """Wait for the first byte. Raises `TimeoutError` when the timer of the process has run out, or its kernel has not
    answered for `kernel` seconds."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not poll.poll(1e3 * min(_LOOK, process.part())):
        if not process.left() or (unanswered(sock) or 0.0) > kernel:
            raise TimeoutError


def _recv_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Receives exactly `count` bytes. `deadline` is for all of them: a byte now and then is no progress."""
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        part = sock.recv(count - len(data))
        if not part:
            raise HungUp("the connection was closed during the handshake")
        data += part
    return data


# -- asyncio -----------------------------------------------------------------------------------------------------


async def handshake(
    sock: socket.socket, steps: Wired, timeout: float, on_mute: Callable[[], None] | None = None
) -> Any:
    """Drive either side over a non-blocking socket; closes nothing. Raises `OSError`, also on timeout.

    With `on_mute` the process at the other end may take as long for its first byte as its kernel answers, as in
    `connect`. `on_mute` is called after every `timeout` seconds of that.
    """
    try:
        data = None if on_mute is None else await _answer(sock, steps, timeout, on_mute)
        return await wait_for(timeout, _drive(sock, steps, data))
    except (asyncio.TimeoutError, TimeoutError):
        raise late(steps, sock, timeout) from None
    except (ConnectionResetError, BrokenPipeError) as error:
        raise HungUp(str(error)) from None


async def _answer(sock: socket.socket, steps: Wired, timeout: float, on_mute: Callable[[], None]) -> int:
    """Send what a client sends first, and wait for the answer; returns how many bytes of it are wanted next."""
    loop = asyncio.get_running_loop()
    data = next(steps)
    while not isinstance(data, int):
        await loop.sock_sendall(sock, data)
        data = next(steps)
    spoken = asyncio.Event()
    loop.add_reader(sock, spoken.set)
    try:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_for(timeout, spoken.wait())
                return data
            if (unanswered(sock) or 0.0) > timeout:
                raise TimeoutError
            on_mute()
    finally:
        loop.remove_reader(sock)


async def _drive(sock: socket.socket, steps: Wired, data: bytes | int | None = None) -> Any:
    """Drive the steps. `data` is what they yielded first, if they have been asked already."""
    loop = asyncio.get_running_loop()
    received: bytes | None = None
    closed: type[HungUp] = Unspoken
    while True:
        if data is None:
            try:
                data = steps.send(received) if received is not None else next(steps)
            except StopIteration as stop:
                return stop.value
        received = None
        if isinstance(data, int):
            received = await _receive(loop, sock, data, closed)
            closed = HungUp
        else:
            with contextlib.suppress(ConnectionError):  # what was sent before the end may say why it ended
                await loop.sock_sendall(sock, data)
        data = None


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int, closed: type[HungUp]) -> bytes:
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise (HungUp if data else closed)("the connection was closed during the handshake")
        data += part
    return data


class Writer:
    """The sending side of a `Channel` in asyncio, for one event loop. `writable` is cleared as long as the protocol of
    the transport is told to pause, and set at its end."""

    def __init__(self, channel: Channel, transport: asyncio.WriteTransport, writable: asyncio.Event) -> None:
        self._channel, self._transport, self._writable = channel, transport, writable
        self._sock = transport.get_extra_info("socket")

    def write(self, data: bytes) -> None:
        """Write a message. Does not block: what the other side does not read is kept, up to `MAX_UNSENT`, and then the
        connection is given up. A message above `MAX_MESSAGE` would cost the connection at the other end, and is not
        sent."""
        if len(data) > MAX_MESSAGE:
            drop("unsent", f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
        elif self._transport.get_write_buffer_size() > MAX_UNSENT:
            drop("unsent", f"gave up a connection whose other side has left more than {MAX_UNSENT} bytes unread")
            self._transport.abort()
        elif not self._transport.is_closing():  # a closing one would count a record that is never sent
            self._transport.write(self._channel.record(data))

    async def flushed(self) -> None:
        """Wait until the kernel has all that was written, or the connection has ended."""
        self._transport.set_write_buffer_limits(high=0)
        await self._writable.wait()

    def unanswered(self) -> float | None:
        """The seconds for which the kernel at the other end has not answered, as in `ftcomm.control.liveness`."""
        return unanswered(self._sock)

    def close(self) -> None:
        """Flush what can be flushed, and close."""
        self._transport.close()
