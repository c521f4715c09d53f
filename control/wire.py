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

from ftcomm.control.byte_stream import ByteStream
from ftcomm.control.dropped import drop
from ftcomm.control.fork import keep_from_children
from ftcomm.control.handshake import Credentials, HandshakeError, HungUp, SilentHangUp, Wired, client, place
from ftcomm.control.liveness import unanswered
from ftcomm.control.running_time import RunningTimer
from ftcomm.control.sealed import Channel, Connection
from ftcomm.control.socket_events import socket_events
from ftcomm.control.views import Address

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


def inherited(accepted: socket.socket) -> None:
    """Make sure that a connection is as `tune` has made the socket at which it came in. Linux hands that down."""
    if accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) != USER_TIMEOUT:
        tune(accepted)


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
            sock = keep_from_children(socket.socket(family, kind))
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


class Handshake:
    """Drives either side of a handshake over a non-blocking socket, in the callbacks of its event loop: a leader does
    thousands in a second or two, and to wake a task for each step would cost as much as all else.

    At its end `ended` is called once, with what the steps return, or with the error: an `OSError`, unless something is
    wrong in this process. Nothing is closed here. All of it may take `timeout` seconds.

    With `on_mute` the process at the other end may take as long for its first byte as its kernel answers, as in
    `connect`. `on_mute` is called after every `timeout` seconds of that, and what follows may take `timeout` seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        steps: Wired,
        timeout: float,
        ended: Callable[[Any, Exception | None], None],
        on_mute: Callable[[], None] | None = None,
        most: int = 0,
    ) -> None:
        self._sock, self._steps, self._timeout, self._ended, self._on_mute = sock, steps, timeout, ended, on_mute
        self._most = most
        self._loop, self._events = asyncio.get_running_loop(), socket_events()
        self._unsent: bytes | memoryview = b""
        self._sent = False  # whether the steps have said something since input was last looked for
        self._wanted: int | None = None  # how many bytes the steps wait for, which may be none
        self._come = b""  # what has come of them, or beyond
        self._spoken = False  # whether the other side has sent anything
        self._awaits: Callable[[int], bool] | None = None  # ends the wait for the socket, if there is one
        self._over = False

    def begin(self) -> None:
        self._timer = self._loop.call_later(self._timeout, self._late)
        self._go_on()

    def stop(self) -> None:
        """Do nothing more, and call nobody. Idempotent."""
        if not self._over:
            self._over = True
            self._timer.cancel()
            self._wait(None)

    def _go_on(self) -> None:
        """Go as far as is possible without a wait."""
        try:
            while not self._unsent or self._send():
                received = self._take()
                if received is None and self._wanted is not None:
                    self._wait(self._events.remove_reader)
                    return
                data = next(self._steps) if received is None else self._steps.send(received)
                if isinstance(data, int):
                    self._wanted = data
                else:
                    self._unsent, self._sent = data, True
            self._wait(self._events.remove_writer)
            return
        except StopIteration as stop:
            result, error = stop.value, None
        except Exception as failed:
            result, error = None, failed
        if self._come and error is None:
            error = HandshakeError("it says more than it may before it has the answer")
        self._end(result, error)

    def _send(self) -> bool:
        """Send what there is room for; returns whether that is all."""
        try:
            sent = self._sock.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except ConnectionError:  # what was sent before the end may say why it ended
            sent = len(self._unsent)
        self._unsent = memoryview(self._unsent)[sent:] if sent < len(self._unsent) else b""
        return not self._unsent

    def _take(self) -> bytes | None:
        """Returns the bytes that the steps want; None if they want none, or not all have come."""
        if self._wanted is None:
            return None
        while len(self._come) < self._wanted:
            if not self._receive():
                return None
        taken, self._come = self._come[: self._wanted], self._come[self._wanted :]
        self._wanted = None
        return taken

    def _receive(self) -> bool:
        """Receive some of the bytes that are wanted; False if none have come yet."""
        if self._sent:  # the other side answers later; a look before that would be in vain
            self._sent = False
            return False
        try:
            part = self._sock.recv(max(self._most, self._wanted or 0) - len(self._come))
        except BlockingIOError:
            return False
        if not part:
            raise (HungUp if self._spoken else SilentHangUp)("the connection was closed during the handshake")
        if not self._spoken and self._on_mute is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(self._timeout, self._late)
        self._spoken = True
        self._come += part
        return True

    def _wait(self, ends: Callable[[int], bool] | None) -> None:
        """Wait for input or for room, or for neither."""
        if ends == self._awaits:
            return
        if self._awaits is not None:
            self._awaits(self._sock.fileno())
        self._awaits = ends
        if ends is not None:
            begin = self._events.add_reader if ends == self._events.remove_reader else self._events.add_writer
            begin(self._sock.fileno(), self._go_on)

    def _late(self) -> None:
        try:
            answered = (unanswered(self._sock) or 0.0) <= self._timeout
            if self._on_mute is not None and not self._spoken and answered:
                self._timer = self._loop.call_later(self._timeout, self._late)
                self._on_mute()
                return
            error: Exception = TimeoutError()
        except Exception as failed:
            error = failed
        self._end(None, error)

    def _end(self, result: Any, error: Exception | None) -> None:
        if self._over:
            return
        self.stop()
        if isinstance(error, TimeoutError):
            with contextlib.suppress(OSError):
                error = late(self._steps, self._sock, self._timeout)
        elif isinstance(error, ConnectionResetError | BrokenPipeError):
            error = HungUp(str(error))
        self._ended(result, error)


async def handshake(
    sock: socket.socket, steps: Wired, timeout: float, on_mute: Callable[[], None] | None = None
) -> Any:
    """Does a `Handshake`, and returns what the steps return. Raises `OSError`, also on timeout."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def ended(result: Any, error: Exception | None) -> None:
        if done.done():  # cancelled, and not stopped yet
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    driven = Handshake(sock, steps, timeout, ended, on_mute)
    driven.begin()
    try:
        return await done
    finally:
        driven.stop()


class Writer:
    """The sending side of a `Channel` in asyncio, for one event loop."""

    def __init__(self, channel: Channel, stream: ByteStream) -> None:
        self._channel, self._stream = channel, stream
        self.flushed, self.close = stream.flushed, stream.close

    def write(self, *messages: bytes) -> None:
        """Write messages at once. Does not block: what the other side does not read is kept, up to `MAX_UNSENT`, and
        then the connection is given up. A message above `MAX_MESSAGE` would cost the connection at the other end, and
        is not sent."""
        if self._stream.is_closing:  # it would count records that are never sent
            return
        if self._stream.unsent > MAX_UNSENT:
            drop("unsent", f"gave up a connection whose other side has left more than {MAX_UNSENT} bytes unread")
            self._stream.abort()
            return
        records: list[bytes] = []
        for data in messages:
            if len(data) > MAX_MESSAGE:
                drop("unsent", f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
            else:
                records.append(self._channel.record(data))
        if records:
            self._stream.write(b"".join(records))

    def unanswered(self) -> float | None:
        """The seconds for which the kernel at the other end has not answered, as in `ftcomm.control.liveness`."""
        return unanswered(self._stream.sock)
