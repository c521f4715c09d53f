"""The connections over which ranks send each other arrays, and the one thread that serves them.

Each sender has one connection to each receiver. It dials when it first has something to send:

    sender                                        receiver
      EAGER(n, tag, dtype, bytes)         --->    kept until it is received; small ones, and a bounded amount
                                          <---    CTS(n)    it is received; there is room for others
      RTS(n, tag, dtype, size)            --->    only this offer is kept
                                          <---    CTS(n)    it is received
      DATA(n, bytes)                      --->    straight into the memory of the receive
                                          <---    NACK(n)   in place of CTS: the receive has another size or dtype
      CANCEL(n)                           --->    the offer is withdrawn; the receive waits for the next one

So messages of one sender and tag arrive in their order, in whatever order tags are received. No message waits behind
one that is not wanted yet, and what came unasked takes bounded memory.

Only the thread touches memory of messages longer than `EAGER` bytes, and only it ends messages that it knows of: once a
message has failed, nothing of it is read or written any more. With copy engines, they move bytes in place of DATA, see
`ftcomm.p2p.slots`.

`ftcomm.p2p.core` decides what follows from a frame, a call, an end. Here are the threads and sockets that tell it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import threading
import time
from collections.abc import Callable

import numpy as np

from ftcomm.control.dropped import drop
from ftcomm.control.fork import keep_from_children
from ftcomm.control.sealed import Connection as Socket
from ftcomm.control.sealed import unsent
from ftcomm.control.timeouts import REPORT
from ftcomm.control.wire import for_bulk
from ftcomm.errors import FtcommError
from ftcomm.p2p.channels import MessageChannel, RecvChannel, SendChannel
from ftcomm.p2p.core import (
    Actions,
    Deliver,
    DialPeer,
    EndMessage,
    FetchMessage,
    HangUp,
    MessageCore,
    PutPiece,
    Read,
    TakePiece,
    Write,
)
from ftcomm.p2p.deadlines import MessageDeadlines
from ftcomm.p2p.protocol import MessageRequest, RecvRequest, SendRequest
from ftcomm.p2p.slots import Copier, Slots
from ftcomm.p2p.wire import MessageWire
from ftcomm.process.joining import join
from ftcomm.process.own import own_process

_PARTING = 2.0  # s for the receivers to read what was sent last


class ProgressEngine:
    """All messages of one member. `dial(peer)` connects to another member and may raise `OSError`; `name(peer)` is its
    name in errors. Messages whose memory copy engines reach go by `slots`. Thread-safe; only `close` blocks."""

    def __init__(
        self,
        owner: str,
        dial: Callable[[int], Socket],
        name: Callable[[int], str],
        slots: Slots | None = None,
    ) -> None:
        self._owner, self._dial = owner, dial
        self.slots = slots
        self._copier = Copier()
        self._lock = threading.Lock()  # guards all that follows; never held during a wait
        self._core = MessageCore(owner, name, slots)
        self._wires: dict[MessageChannel, MessageWire] = {}
        self._deadlines = MessageDeadlines()
        self._stale: list[tuple[MessageChannel, str]] = []  # channels that the thread is to hang up: it may read them
        self._thread: threading.Thread | None = None
        self._bell = -1
        self._selector: selectors.BaseSelector | None = None

    # -- any thread ----------------------------------------------------------------------------------------------

    def send(self, message: SendRequest) -> None:
        own_process()
        with self._lock:
            self._begin(message, self._core.send(message))

    def receive(self, message: RecvRequest) -> None:
        own_process()
        with self._lock:
            self._begin(message, self._core.receive(message))

    def accept(self, sock: Socket, peer: int, nonce: str = "") -> None:
        """Take a connection from `peer`, which is past its handshake. It replaces an earlier one.

        `nonce` names the memory in which the peer has slots.
        """
        sock.setblocking(False)
        for_bulk(sock)
        with self._lock:
            if self._core.error is not None:
                sock.close()
                return
            channel = RecvChannel(peer, nonce)
            self._wires[channel] = MessageWire(channel, sock)
            self._do(self._core.accepted(channel))
            self._start()

    def lose(self, peer: int, why: str) -> None:
        """Note that `peer` is gone: messages to and from it fail, until it connects again or is `found`."""
        with self._lock:
            self._do(self._core.lose(peer, why))
            self._ring()

    def found(self, peer: int) -> None:
        """Note that `peer` may be sent to again."""
        with self._lock:
            self._core.found(peer)

    def fail(self, error: BaseException) -> None:
        """End: every message, and every later one, fails with `error`. The first error counts."""
        with self._lock:
            if self._core.error is None:
                self._core.error = error
            self._ring()

    def close(self, error: BaseException) -> None:
        """Fail as `fail` does; then block until the receivers have read what was sent, for at most 2 seconds."""
        self.fail(error)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            join(thread, self._owner)
        self._copier.close()

    def forget(self) -> None:
        """Drop all references to the owners of messages. Called after `close`."""
        self._dial, self._core.name = _nobody, str

    # -- with the lock -------------------------------------------------------------------------------------------

    def _begin(self, message: MessageRequest, actions: Actions) -> None:
        """Do what follows from a call, and let the thread end the message at its deadline."""
        self._do(actions)
        if not message.ended.is_set():
            self._deadlines.add(message)
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector = keep_from_children(selectors.DefaultSelector())
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="ftcomm-p2p", daemon=True)
            self._thread.start()
        self._ring()

    def _ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def _do(self, actions: Actions) -> memoryview | None:
        """Do what the core wants. Returns the memory for the bytes that come next, if there are any."""
        memory: memoryview | None = None
        for action in actions:
            match action:
                case Write(channel, frame, message):
                    wire = self._wires.get(channel)
                    assert wire is not None or message is None  # its messages have ended with the connection
                    if wire is not None and wire.write(frame, message):
                        self._ring()
                case EndMessage(message, error):
                    message.end(error)
                case Deliver(receive, data):
                    receive.land()
                    receive.memory[:] = data
                    receive.end()
                case Read(_, memory):
                    pass
                case HangUp(channel, why):
                    self._stale.append((channel, why))
                    self._ring()
                case DialPeer(channel):
                    threading.Thread(target=self._open, args=(channel,), name="ftcomm-p2p-dial", daemon=True).start()
                case PutPiece():
                    self._copier.do(functools.partial(self._put, action))
                case TakePiece():
                    self._copier.do(functools.partial(self._take, action))
                case FetchMessage():
                    self._copier.do(functools.partial(self._fetch, action))
        return memory

    # -- the thread of copies ------------------------------------------------------------------------------------

    def _copy(self, message: MessageRequest, channel: MessageChannel, move: Callable[[Slots], None]) -> bool:
        """Copies for a message by `move`; False if the message has ended."""
        assert self.slots is not None
        if not message.hold():
            return False
        try:
            move(self.slots)
        except Exception as error:
            with self._lock:
                self._do([HangUp(channel, f"a copy of a message has failed: {error}")])
            return False
        finally:
            message.let_go()
        return True

    def _put(self, piece: PutPiece) -> None:
        send, slot, at = piece.message, piece.slot, piece.at
        if self._copy(send, piece.channel, lambda slots: slots.put(slot, send.address() + at, piece.nbytes)):
            with self._lock:
                self._do(self._core.put(piece))

    def _take(self, piece: TakePiece) -> None:
        channel, receive = piece.channel, piece.message

        def take(slots: Slots) -> None:
            slots.take(channel.nonce, piece.slot, receive.address() + piece.at, piece.nbytes)

        if self._copy(receive, channel, take):
            with self._lock:
                self._do(self._core.taken(piece))

    def _fetch(self, fetch: FetchMessage) -> None:
        """Copy a message to the host for a receiver that wants the bytes."""
        send = fetch.message
        host = np.empty(send.nbytes, np.uint8)
        if self._copy(send, fetch.channel, lambda slots: slots.move(host.ctypes.data, send.address(), send.nbytes)):
            with self._lock:
                self._do(self._core.fetched(fetch, host.data))

    # -- a thread for each dial ----------------------------------------------------------------------------------

    def _open(self, channel: SendChannel) -> None:
        why = ""
        try:
            sock = self._dial(channel.peer)
            sock.setblocking(False)
            for_bulk(sock)
        except (OSError, FtcommError) as error:
            why = f"it cannot be reached: {error}"
        with self._lock:
            if why:
                self._stale.append((channel, why))
            elif not self._core.serves(channel):
                sock.close()
            else:
                self._wires[channel] = MessageWire(channel, sock)
                self._do(self._core.opened(channel))
            self._ring()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._selector is not None
        try:
            while self._turn(self._selector):
                pass
            self._part(self._selector)
        except Exception as error:
            drop("internal", f"{self._owner}: messages: {error!r}", error=error)
            self.fail(FtcommError(f"{self._owner}: internal error: {error!r}; please report it"))
            self._end_all()
        finally:
            with self._lock:
                bell, self._bell = self._bell, -1
            os.close(bell)
            self._selector.close()

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        with self._lock:
            if self._core.error is not None:
                return False
        self._hang_up_stale()
        with self._lock:
            while (message := self._deadlines.passed()) is not None:
                self._do(self._core.give_up(message))
            left = self._deadlines.left()
        self._hang_up_stale()
        with self._lock:
            self._do(self._core.fail_silent())  # for members without a connection
            wires = list(self._wires.values())
        for wire in wires:
            self._look_for(selector, wire)
        for key, mask in selector.select(None if left is None else min(REPORT / 2, left)):
            wire = key.data
            if wire is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                continue
            try:
                if mask & selectors.EVENT_READ:
                    wire.read(self._heard)
                if mask & selectors.EVENT_WRITE:
                    wire.flush(self._lock)
            except BlockingIOError:
                pass
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError):
                    who = self._core.name(wire.channel.peer)
                    drop("data", f"a message from {who}: {error}; its connection is closed")
                self._hang_up(wire.channel, str(error))
        return True

    def _heard(self, wire: MessageWire, head: bytes | bytearray | None) -> memoryview | None:
        channel = wire.channel
        with self._lock:
            if isinstance(channel, SendChannel):
                assert head is not None
                return self._do(self._core.answered(channel, head))
            return self._do(self._core.whole(channel) if head is None else self._core.heard(channel, head))

    def _look_for(self, selector: selectors.BaseSelector, wire: MessageWire) -> None:
        interest = selectors.EVENT_READ | (0 if wire.is_flushed else selectors.EVENT_WRITE)
        if interest != wire.interest:
            change = selector.modify if wire.interest else selector.register
            change(wire.sock, interest, wire)
            wire.interest = interest

    # -- ends ----------------------------------------------------------------------------------------------------

    def _hang_up_stale(self) -> None:
        with self._lock:
            stale, self._stale = self._stale, []
        for channel, why in stale:
            self._hang_up(channel, why)

    def _hang_up(self, channel: MessageChannel, why: str) -> None:
        """End a connection, and with it what was under way on it."""
        assert self._selector is not None
        with self._lock:  # in one step: a message that is sent now goes into this connection and ends, or into the next
            wire = self._wires.pop(channel, None)
            unwritten = [] if wire is None else [message for _, message in wire.queue if message is not None]
            actions = self._core.hung_up(channel, why, unwritten)
        if wire is not None:
            if wire.interest:
                self._selector.unregister(wire.sock)
            wire.sock.close()
        with self._lock:
            self._do(actions)

    def _end_all(self) -> list[MessageWire]:
        """Fail every message; returns the connections to receivers, which are still to be closed."""
        self._hang_up_stale()
        with self._lock:
            error = self._core.error
            receivers = list(self._core.receivers.values())
        for channel in receivers:
            self._hang_up(channel, "")
        with self._lock:
            wires = list(self._wires.values())
            messages = self._deadlines.clear()
            for wire in wires:
                wire.queue.clear()
        for message in messages:
            message.end(error)
        return wires

    def _part(self, selector: selectors.BaseSelector) -> None:
        """Part from the receivers. Closing a connection with an unread answer would discard what was sent last, so read
        until the receivers close."""
        wires = self._end_all()
        for wire in wires:
            with contextlib.suppress(OSError):
                self._look_for(selector, wire)
                wire.shut_down()
        until = time.monotonic() + _PARTING
        while wires and time.monotonic() < until:
            for key, _ in selector.select(max(0.0, until - time.monotonic())):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                    continue
                try:
                    if unsent(key.data.sock):
                        key.data.shut_down()
                        self._look_for(selector, key.data)
                    if key.data.sock.recv(4096):
                        continue
                except BlockingIOError:
                    continue
                except OSError:
                    pass
                self._hang_up(key.data.channel, "")
                wires.remove(key.data)
        for wire in wires:
            self._hang_up(wire.channel, "")


def _nobody(peer: int) -> Socket:
    raise ConnectionError("the group is closed")
