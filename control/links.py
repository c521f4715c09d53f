"""Connections of the control plane in asyncio: an outgoing link that is made again, and a listening port.

Neither input nor an error in a callback ends a loop here: a link is made again, a port goes on accepting, and what was
dropped is counted in `ftcomm.control.dropped`. So no task ends unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import selectors
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from typing import Any

import msgspec

from ftcomm.control import handshake, wire
from ftcomm.control import messages as m
from ftcomm.control.byte_stream import ByteStream
from ftcomm.control.connection_limit import ConnectionLimit
from ftcomm.control.dropped import drop
from ftcomm.control.fork import keep_from_children
from ftcomm.control.limits import MEMBERS
from ftcomm.control.liveness import unanswered
from ftcomm.control.rate_limit import HandshakeRateLimit, source_of
from ftcomm.control.sealed import Channel
from ftcomm.control.socket_events import socket_events
from ftcomm.control.view_differences import EncodedOnce, ViewDifferenceError, ViewsReceived, ViewsSent
from ftcomm.control.views import Address
from ftcomm.control.wait_for import wait_for

HANDSHAKE_TIMEOUT = 5.0  # s
ARRIVAL_TIMEOUT = 60.0  # s for the handshake of a connection that has come in: its process may have little of a core
BACKLOG = 4 * MEMBERS  # connections that a port keeps for a process: all members may dial a joiner at once, and again
MAX_HANDSHAKES = 256  # under way at one port; beyond it the busiest source loses its oldest
ACCEPTED = 64  # connections accepted in one turn of the loop
CALL_TIMEOUT = 1.0  # s in which two calls may cross; see `Link.redirect`
FIRST_PAUSE = 0.02  # s before a broken link is made again; doubled up to the longest one
LONGEST_PAUSE = 0.5  # s
BESIEGED_PAUSE = 0.1  # s, likewise, if the other side hangs up: in a flood some of many attempts get through


def event_loop() -> asyncio.AbstractEventLoop:
    """Makes an event loop whose selector no forked child has: what a child takes out of it would be gone from the
    parent's as well."""
    return asyncio.SelectorEventLoop(keep_from_children(selectors.DefaultSelector()))


async def serve_messages(
    channel: Channel,
    on_message: Callable[[Any], None],
    writer_ready: Callable[[wire.Writer], None],
    decode: Callable[[bytes], Any] = m.decode,
) -> str:
    """Read messages until the connection ends; returns why it did. Owns `channel`. `decode` makes a message of a
    record, and raises `DecodeError`.

    A record that is not a message is dropped. A record that is too long, or not from the other side, ends the
    connection, since what follows it cannot be trusted; so does a view that leaves out what was never told, since the
    next one would, too.
    """
    messages = _Messages(channel, on_message, decode)
    stream = ByteStream(channel.detach(), messages.arrived, messages.end)
    try:
        try:
            writer_ready(wire.Writer(channel, stream))
        except OSError as error:
            messages.end(error)
        stream.begin()
        return await messages.ended
    finally:
        stream.close()


class _Messages:
    """Hands the messages of a connection on in the callback of its socket. A leader takes some from each of thousands
    of ranks, and to wake a task for each would cost as much as all else."""

    def __init__(self, channel: Channel, on_message: Callable[[Any], None], decode: Callable[[bytes], Any]) -> None:
        self._channel, self._on_message, self._decode = channel, on_message, decode
        self._views = ViewsReceived()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it ended

    def arrived(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            for payload in self._channel.arrived(data, wire.MAX_MESSAGE):
                self._take(payload)
        except (ViewDifferenceError, OSError) as error:
            self.end(error)
        except Exception as error:
            drop("internal", f"on input: {error!r}; it connects again", error=error)
            self.end(error)

    def _take(self, payload: bytes) -> None:
        try:
            message = self._decode(payload)
        except msgspec.DecodeError as error:
            drop("message", f"a frame of {len(payload)} bytes that is no message: {error}")
            return
        whole = self._views.complete(message)
        try:
            self._on_message(whole)
        except Exception as error:
            drop("internal", f"{type(message).__name__}: {error!r}", error=error)

    def end(self, error: Exception | None) -> None:
        if isinstance(error, ViewDifferenceError):
            drop("message", f"{error}; it connects again")
        if not self.ended.done():
            self.ended.set_result(str(error or "") or "its connection closed")


class ViewWriter:
    """The sending side of a connection that is told views, each time what is new in them. For one event loop."""

    def __init__(self, writer: wire.Writer, once: EncodedOnce, shard: int | None = None) -> None:
        """`once` is common to all connections of the sender; `shard` is as in `ViewsSent`."""
        self._writer, self._once, self._sent = writer, once, ViewsSent(shard)
        self.unanswered, self.flushed, self.close = writer.unanswered, writer.flushed, writer.close

    def send(self, message: m.Message) -> None:
        self._writer.write(self._once.encode(message, self._sent))


class HostAgentWriter:
    """The sending side of a leader's connection to the host agent of some of its ranks, as `ViewWriter`."""

    def __init__(self, writer: wire.Writer, once: EncodedOnce, shards: range) -> None:
        self.shards = shards
        self._writer, self._once, self._sent = writer, once, ViewsSent(shards.start, len(shards))
        self.unanswered, self.flushed, self.close = writer.unanswered, writer.flushed, writer.close

    def send(self, shards: Sequence[int], message: m.Message) -> None:
        """Send a message to some of the ranks."""
        self._writer.write(m.encode_enclosed(tuple(shards), self._once.encode(message, self._sent)))


class Ended(ConnectionError):
    """A connection has ended; it is made again."""


class Link:
    """An authenticated connection that is made again whenever it breaks, until `close`. All of it runs in one event
    loop.

    `send` never blocks: without a connection it drops the message, and `on_open` repeats what matters. An error in a
    callback costs the connection, which is made again, and never the link.

    `on_down` is told why there is no connection: `Ended` for one that there was, or the error of an attempt. An attempt
    goes on for as long as the kernel at the other end answers, since its process may be stopped; `on_mute` is told so
    every `HANDSHAKE_TIMEOUT` seconds.
    """

    def __init__(
        self,
        address: tuple[str, int],
        credentials: handshake.Credentials,
        purpose: str,
        fields: handshake.Fields,
        *,
        to: Address | None = None,
        on_open: Callable[[], None],
        on_message: Callable[[Any], None] = lambda message: None,
        on_down: Callable[[Exception], None] = lambda error: None,
        on_mute: Callable[[], None] = lambda: None,
        decode: Callable[[bytes], Any] = m.decode,
    ) -> None:
        self.address = address
        self._addresses = [address]  # the newest address, and the one of the start
        self._credentials, self._purpose, self._fields, self._to = credentials, purpose, fields, to
        self._on_open, self._on_message, self._on_down, self._on_mute = on_open, on_message, on_down, on_mute
        self._decode = decode
        self._sock: socket.socket | None = None  # connected; the process may not have answered yet
        self._writer: wire.Writer | None = None
        self._opened_at = 0.0
        self._begun = asyncio.get_running_loop().time()  # when the newest attempt began
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, *messages: m.Message) -> None:
        if self._writer is not None:
            self._writer.write(*map(m.encode, messages))

    async def flushed(self) -> None:
        """Wait until the kernel has all that was sent, or the connection has ended."""
        if self._writer is not None:
            await self._writer.flushed()

    def redirect(self, address: tuple[str, int]) -> None:
        """Reach the other side at `address` from now on. The caller there has no connection of ours. So the present
        connection leads to another process, unless it is so new that the two have crossed. If `address` cannot be
        reached, it and the address of the start are tried in turn."""
        loop = asyncio.get_running_loop()
        if self._writer is not None and loop.time() - self._opened_at < CALL_TIMEOUT:
            return
        if self._writer is None and self.address == address and loop.time() - self._begun < HANDSHAKE_TIMEOUT:
            return  # already on its way; calls every second must not break it off
        self._task.cancel()
        self._writer = None
        self.address, self._addresses = address, [address, self._addresses[-1]]
        self._on_down(ConnectionError(f"who has its place is at {address[0]}:{address[1]}"))
        self._task = loop.create_task(self._run())

    def close(self) -> None:
        """Flush what can be flushed, and close."""
        self._task.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while True:
            begun = self._begun = loop.time()
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
                pause = FIRST_PAUSE  # a link that is turned away at once must wait
            try:
                self._on_down(why)
            except Exception as error:
                drop("internal", f"on the loss of a connection: {error!r}", error=error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, BESIEGED_PAUSE if isinstance(why, handshake.HungUp) else LONGEST_PAUSE)

    async def _once(self) -> OSError:
        """Run one connection from its beginning to its end; returns why it ended. Raises `OSError` if there was
        none."""
        self._sock = sock = await connected(self.address, HANDSHAKE_TIMEOUT)
        try:
            at = handshake.place(sock.getpeername)
            steps = handshake.client(self._credentials, self._purpose, self._fields, self._to, at)
            elsewhere = len(self._addresses) > 1  # a process that is stopped here may have been replaced there
            done = await wire.handshake(sock, steps, HANDSHAKE_TIMEOUT, None if elsewhere else self._on_mute)
        except BaseException:
            sock.close()
            raise
        return Ended(await serve_messages(Channel(sock, *done), self._on_message, self._opened, self._decode))

    def unanswered(self) -> float | None:
        """Seconds for which the kernel at the other end has not answered; None without a connection. To be asked before
        something is sent."""
        return None if self._sock is None else unanswered(self._sock)

    @property
    def is_up(self) -> bool:
        return self._writer is not None

    @property
    def sock(self) -> socket.socket | None:
        """The newest connection, which this link owns; None before the first."""
        return self._sock

    def _opened(self, writer: wire.Writer) -> None:
        self._writer = writer
        self._opened_at = asyncio.get_running_loop().time()
        self._on_open()


async def ask(
    address: tuple[str, int], credentials: handshake.Credentials, purpose: str, fields: handshake.Fields
) -> m.AnyMessage | None:
    """Returns the answer to a connection of `purpose`; None if there is none within `HANDSHAKE_TIMEOUT`. Raises
    `OSError` if there is no connection."""
    sock = await connected(address, HANDSHAKE_TIMEOUT)
    try:
        steps = handshake.client(credentials, purpose, fields, at=handshake.place(sock.getpeername))
        done = await wire.handshake(sock, steps, HANDSHAKE_TIMEOUT)
    except BaseException:
        sock.close()
        raise
    answers: list[m.AnyMessage] = []
    with contextlib.suppress(asyncio.TimeoutError):
        await wait_for(HANDSHAKE_TIMEOUT, serve_messages(Channel(sock, *done), answers.append, lambda writer: None))
    return answers[-1] if answers else None


async def connected(address: tuple[str, int], timeout: float) -> socket.socket:
    """Returns a connected socket, before its handshake. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = keep_from_children(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setblocking(False)
        wire.tune(sock)
        await _connect(sock, address, timeout)
        return sock
    except BaseException as error:
        sock.close()
        if isinstance(error, asyncio.TimeoutError | TimeoutError):
            raise ConnectionError(f"no connection within {timeout:g} s") from None
        if isinstance(error, OSError):
            raise wire.unreached(error) from None
        if isinstance(error, ValueError | OverflowError):  # an impossible address was told
            raise ConnectionError(f"no address: {error}") from None
        raise


async def _connect(sock: socket.socket, address: tuple[str, int], timeout: float) -> None:
    """Connects without a task of its own, unless a name has to be looked up. Raises `OSError`,
    `asyncio.TimeoutError`, and on an impossible address `ValueError` or `OverflowError`."""
    loop = asyncio.get_running_loop()
    if not _is_literal(sock.family, address[0]):
        await wait_for(timeout, loop.sock_connect(sock, address))
        return
    try:
        sock.connect(address)
        return
    except BlockingIOError:
        pass
    over: asyncio.Future[bool] = loop.create_future()  # whether in time

    def end(in_time: bool) -> None:
        if not over.done():
            over.set_result(in_time)

    timer = loop.call_later(timeout, end, False)
    events = socket_events()
    events.add_writer(sock.fileno(), lambda: end(True))
    try:
        if not await over:
            raise asyncio.TimeoutError
    finally:
        events.remove_writer(sock.fileno())
        timer.cancel()
    if failed := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(failed, f"{os.strerror(failed)}: {address[0]}:{address[1]}")


def _is_literal(family: int, host: str) -> bool:
    try:
        socket.inet_pton(family, host)
    except (OSError, ValueError):  # a name, an address with a zone, or text that is neither
        return False
    return True


class Listener:
    """Accepts connections, does the handshake, and hands the channel (non-blocking) with its `Opening` on.

    `on_peer` owns the channel from then on; if it raises, that is closed. `names` are the nonces in the addresses that
    lead here, by which others may want who listens.

    Who has not proved to hold the token may keep `MAX_HANDSHAKE` bytes for `ARRIVAL_TIMEOUT` seconds, and not more
    than `MAX_HANDSHAKES` may do so at a time, see `ConnectionLimit`; and what one source may cost is bounded, see
    `HandshakeRateLimit`.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: handshake.Credentials,
        on_peer: Callable[[Channel, handshake.Opening], Awaitable[None]],
        *,
        names: Set[str] = frozenset(),
    ):
        sock.setblocking(False)
        wire.tune(sock)  # the kernel hands that down
        self._sock, self._credentials, self._on_peer, self._names = (
            keep_from_children(sock),
            credentials,
            on_peer,
            names,
        )
        self._rate_limit = HandshakeRateLimit()
        self._strangers = ConnectionLimit[_Arrival](MAX_HANDSHAKES)
        self._arrivals: set[_Arrival] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._accept())

    def _start(self, work: Coroutine[Any, Any, None], channel: Channel | None = None) -> None:
        """Start a task, which owns `channel`, if there is one."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if channel is not None and task.cancelled():  # before its first step, maybe
                channel.close()

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._admit(*await loop.sock_accept(self._sock))
                with contextlib.suppress(BlockingIOError):
                    for _ in range(ACCEPTED):  # in a flood a turn of the loop for each would cost more
                        self._admit(*self._sock.accept())
            except OSError as error:  # for want of descriptors, say: wait and try again
                drop("unaccepted", f"a connection could not be accepted: {error}; it is tried again")
                await asyncio.sleep(0.1)
            await asyncio.sleep(0)  # others must have their turn in a flood

    def _admit(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        keep_from_children(sock)
        source = source_of(address[0])
        if not self._rate_limit.admit(source, asyncio.get_running_loop().time()):
            sock.close()
            drop("crowded", f"a connection from {address[0]}, unread: too many have come from there without a proof")
            return
        arrival = _Arrival(sock, source, self._arrived)
        self._arrivals.add(arrival)
        if (excess := self._strangers.come(arrival, address[0])) is not None:
            self._arrivals.discard(excess.key)
            excess.key.close()
            drop(
                "crowded", f"one from {excess.source} of {MAX_HANDSHAKES} connections that had not proved who they are"
            )
        if arrival in self._arrivals:
            arrival.begin(self._credentials, self._names)

    def _arrived(self, arrival: _Arrival, done: Any, error: Exception | None) -> None:
        """Serve a connection whose handshake has ended well, and drop any other."""
        self._strangers.gone(arrival)
        self._arrivals.discard(arrival)
        arrival.forget()
        if error is not None:
            _dropped(error)
            arrival.sock.close()
            return
        self._rate_limit.proved(arrival.source)
        opening, keys, tunnel = done
        channel = Channel(arrival.sock, keys, tunnel)
        self._start(self._serve(channel, opening), channel)

    async def _serve(self, channel: Channel, opening: handshake.Opening) -> None:
        try:
            await self._on_peer(channel, opening)
        except Exception as error:
            _dropped(error)
            channel.close()
        except BaseException:
            channel.close()
            raise

    async def close(self) -> None:
        for arrival in self._arrivals:
            arrival.close()
        self._arrivals.clear()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._sock.close()


class _Arrival:
    """A connection that has come in, until its handshake ends. `ended` is told how, and owns the socket from then
    on."""

    def __init__(
        self, sock: socket.socket, source: str, ended: Callable[[_Arrival, Any, Exception | None], None]
    ) -> None:
        self.sock, self.source, self._ended = sock, source, ended
        self._handshake: wire.Handshake | None = None

    def begin(self, credentials: handshake.Credentials, names: Set[str]) -> None:
        try:
            self.sock.setblocking(False)
            wire.inherited(self.sock)
            steps = handshake.server(credentials, names, handshake.place(self.sock.getsockname))
            ended = functools.partial(self._ended, self)
            self._handshake = wire.Handshake(self.sock, steps, ARRIVAL_TIMEOUT, ended, most=handshake.AT_ONCE)
            self._handshake.begin()
        except Exception as error:
            self._ended(self, None, error)

    def forget(self) -> None:
        """Let the handshake go, which refers to this: no garbage collector is needed for either."""
        self._handshake = None

    def close(self) -> None:
        if self._handshake is not None:
            self._handshake.stop()
        self.forget()
        self.sock.close()


def _dropped(error: Exception) -> None:
    """Count a connection that is of no use."""
    if isinstance(error, OSError):
        kind = error.kind if isinstance(error, handshake.HandshakeError) else "handshake"
        drop(kind, f"a connection: {error}", said=not isinstance(error, handshake.SilentHangUp))
    else:
        drop("internal", f"a connection: {error!r}", error=error)


def hand_over(handler: Callable[[Channel, handshake.Fields], None], channel: Channel, fields: handshake.Fields) -> None:
    """Run `handler`, which owns `channel` from then on; close that if it raises. For a thread of its own."""
    try:
        handler(channel, fields)
    except handshake.BadFields as error:
        drop("fields", f"a connection: {error}")
        channel.close()
    except Exception as error:
        drop("internal", f"a connection: {error!r}", error=error)
        channel.close()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening TCP socket; port 0 takes a free one. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = keep_from_children(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE and port == 0:
            raise OSError(error.errno, wire.no_ports()) from None
        raise
    return sock
