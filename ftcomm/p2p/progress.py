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
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from ftcomm.control.dropped import drop
from ftcomm.control.fork import apart
from ftcomm.control.running_time import RunningTime
from ftcomm.control.sealed import Connection as Socket
from ftcomm.control.sealed import flush, pending, unsent
from ftcomm.control.timeouts import REPORT
from ftcomm.control.wire import for_bulk
from ftcomm.errors import CollectiveTimeout, FtcommError, LostError, MismatchError
from ftcomm.p2p.matching import MAX_BYTES, MAX_UNEXPECTED, Matching, Unexpected
from ftcomm.p2p.protocol import (
    ANSWER,
    EAGER,
    HEAD,
    MAGIC,
    MAX_MESSAGE,
    MessageConnection,
    MessageRequest,
    ReceiverKind,
    RecvChannel,
    RecvRequest,
    SendChannel,
    SenderKind,
    SendRequest,
    dtype_of,
    head,
    shorten,
)
from ftcomm.p2p.slots import AHEAD, Copier, Slots
from ftcomm.process.own import own_process

_PARTING = 2.0  # s for the receivers to read what was sent last
_MANY = 1024  # deadlines, beyond which those of ended messages are removed
_TURN = 4 << 20  # bytes from one connection before others have their turn


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
        self._owner, self._dial, self._name = owner, dial, name
        self.slots = slots
        self._copier = Copier()
        self._lock = threading.Lock()  # guards all that follows; never held during a wait
        self._error: BaseException | None = None
        self._matching: Matching[RecvRequest] = Matching()
        self._outlets: dict[int, SendChannel] = {}
        self._inlets: dict[int, RecvChannel] = {}
        self._lost: dict[int, str] = {}  # lost members, and why
        self._silent: dict[int, str] = {}  # members whose connection to this one has ended, and why
        self._stale: list[tuple[MessageConnection, str]] = []  # to be ended
        self._pairs = [] if slots is None else list(range(0, slots.count, AHEAD))  # first slots of free pairs
        self._ran = RunningTime()
        self._deadlines: list[tuple[float, int, MessageRequest]] = []  # a heap, of times in `_ran`
        self._many = _MANY
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._bell = -1
        self._selector: selectors.BaseSelector | None = None

    # -- any thread ----------------------------------------------------------------------------------------------

    def send(self, message: SendRequest) -> None:
        own_process()
        with self._lock:
            if self._refuse(message, message.target):
                return
            self._expect(message)
            outlet = self._outlets.get(message.target)
            fresh = outlet is None
            if outlet is None:
                outlet = self._outlets[message.target] = SendChannel(message.target)
            outlet.held.append(message)
            if not fresh:
                self._pump(outlet)
        if fresh:
            threading.Thread(target=self._open, args=(outlet,), name="ftcomm-p2p-dial", daemon=True).start()

    def receive(self, message: RecvRequest) -> None:
        own_process()
        with self._lock:
            if self._refuse(message, None):
                return
            arrival = self._matching.want(message)
            if arrival is not None:
                self._match(arrival, message)
            if not message.ended.is_set():
                self._expect(message)

    def accept(self, sock: Socket, peer: int, nonce: str = "") -> None:
        """Take a connection from `peer`, which is past its handshake. It replaces an earlier one.

        `nonce` names the memory in which the peer has slots.
        """
        sock.setblocking(False)
        for_bulk(sock)
        with self._lock:
            if self._error is not None:
                sock.close()
                return
            inlet = RecvChannel(peer, sock, nonce)
            earlier, self._inlets[peer] = self._inlets.get(peer), inlet
            if earlier is not None:
                self._stale.append((earlier, "it has connected again"))
            for arrival in self._matching.arrivals(peer):  # from an earlier life
                self._matching.discard(arrival)
            self._lost.pop(peer, None)
            self._silent.pop(peer, None)
            self._start()

    def lose(self, peer: int, why: str) -> None:
        """Note that `peer` is gone: messages to and from it fail, until it connects again or is `found`."""
        with self._lock:
            self._lost[peer] = self._silent[peer] = why
            # At once, not in the thread: later messages must not go into a connection that is over.
            over = (self._outlets.pop(peer, None), self._inlets.pop(peer, None))
            self._stale += [(connection, why) for connection in over if connection is not None]
            self._discard_offers(peer)
            if self._thread is not None:
                self._ring()

    def found(self, peer: int) -> None:
        """Note that `peer` may be sent to again."""
        with self._lock:
            self._lost.pop(peer, None)
            self._silent.pop(peer, None)

    def fail(self, error: BaseException) -> None:
        """End: every message, and every later one, fails with `error`. The first error counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            if self._thread is not None:
                self._ring()

    def close(self, error: BaseException) -> None:
        """Like `fail`; then block until the receivers have read what was sent, for at most 2 seconds."""
        self.fail(error)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._copier.close()

    def forget(self) -> None:
        """Drop all references to the owners of messages. Called after `close`."""
        self._dial, self._name = _nobody, str

    # -- with the lock -------------------------------------------------------------------------------------------

    def _refuse(self, message: MessageRequest, peer: int | None) -> bool:
        error = self._error
        if error is None and peer in self._lost:
            error = self._lost_error(peer, self._lost[peer])
        if error is not None:
            message.end(error)
        return error is not None

    def _lost_error(self, peer: int, why: str) -> LostError:
        return LostError(f"{self._owner}: {self._name(peer)} was lost: {why}")

    def _expect(self, message: MessageRequest) -> None:
        """Let the thread end a message at its deadline."""
        self._start()
        now = time.monotonic()
        heapq.heappush(self._deadlines, (self._ran.at(now) + message.deadline - now, next(self._order), message))
        if len(self._deadlines) > self._many:  # most of those messages ended long before
            self._deadlines = [entry for entry in self._deadlines if not entry[2].ended.is_set()]
            heapq.heapify(self._deadlines)
            self._many = max(_MANY, 2 * len(self._deadlines))

    def _start(self) -> None:
        if self._thread is None:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector = apart(selectors.DefaultSelector())
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="ftcomm-p2p", daemon=True)
            self._thread.start()
        self._ring()

    def _discard_offers(self, peer: int) -> None:
        for arrival in self._matching.arrivals(peer):
            if arrival.data is None:
                self._matching.discard(arrival)

    def _ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def _pump(self, outlet: SendChannel) -> None:
        """Send what may be sent of the messages held back."""
        while outlet.sock is not None and outlet.held and len(outlet.offers) + len(outlet.unasked) < MAX_UNEXPECTED:
            message = outlet.held.popleft()
            message.number = next(outlet.numbers)
            whole = message.nbytes <= EAGER and outlet.nbytes + message.nbytes <= MAX_BYTES
            if whole:
                outlet.unasked[message.number] = message.nbytes
                outlet.nbytes += message.nbytes
                self._write(outlet, head(SenderKind.EAGER, message), message)
            else:
                outlet.offers[message.number] = message
                kind = SenderKind.RTS if message.place is None else SenderKind.SLOTS
                self._write(outlet, head(kind, message), None)

    def _write(self, connection: MessageConnection, frame: bytes, message: SendRequest | None) -> None:
        """Queue a frame, and the bytes of a message that ends with it. Send at once if nothing is queued."""
        parts = [memoryview(frame)]
        if message is not None and message.memory.nbytes:
            parts.append(message.memory)
        if not connection.queue and sum(part.nbytes for part in parts) <= EAGER + HEAD.size:
            assert connection.sock is not None
            with contextlib.suppress(OSError):  # the thread will meet the error, too
                shorten(parts, connection.sock.sendmsg(parts, (), socket.MSG_NOSIGNAL))
                if unsent(connection.sock):
                    self._ring()
        if not parts:
            if message is not None:
                message.end()
            return
        for part in parts[:-1]:
            connection.queue.append((part, None))
        connection.queue.append((parts[-1], message))
        self._ring()

    def _match(self, arrival: Unexpected, receive: RecvRequest) -> None:
        """Give an arrival to its receive."""
        inlet = self._inlets.get(arrival.source)
        fits = (arrival.nbytes, arrival.dtype) == (receive.nbytes, receive.dtype)
        answer = ReceiverKind.CTS if fits else ReceiverKind.NACK
        if fits and arrival.data is None:
            assert inlet is not None  # when a connection ends, its offers are discarded
            receive.by_slots = arrival.slots and self.slots is not None and self.slots.reaches(inlet.nonce)
            if arrival.slots and not receive.by_slots:
                answer = ReceiverKind.PLAIN
            inlet.expected[arrival.number] = receive
            receive.found = arrival.source
            receive.number = arrival.number
        if inlet is not None:
            self._write(inlet, ANSWER.pack(MAGIC, answer, arrival.number), None)
        if not fits:
            receive.end(
                MismatchError(
                    f"{self._owner}: {self._name(arrival.source)} has sent {arrival.nbytes} bytes of {arrival.dtype} "
                    f"with tag {arrival.tag}, and this rank receives {receive.nbytes} bytes of {receive.dtype}. Send "
                    "and receive the same number of elements of the same dtype"
                )
            )
        elif arrival.data is not None:
            receive.land()
            receive.memory[:] = arrival.data
            receive.found = arrival.source
            receive.end()

    # -- the thread of copies ------------------------------------------------------------------------------------

    def _copy(self, message: MessageRequest, connection: MessageConnection, move: Callable[[Slots], None]) -> bool:
        """Copies for a message by `move`; False if the message has ended."""
        assert self.slots is not None
        if not message.hold():
            return False
        try:
            move(self.slots)
        except Exception as error:
            with self._lock:
                self._stale.append((connection, f"a copy of a message has failed: {error}"))
                self._ring()
            return False
        finally:
            message.let_go()
        return True

    def _put(self, outlet: SendChannel, send: SendRequest, slot: int, at: int, nbytes: int) -> None:
        if self._copy(send, outlet, lambda slots: slots.put(slot, send.address() + at, nbytes)):
            with self._lock:
                if self._outlets.get(outlet.peer) is outlet:
                    outlet.track.ready()
                    self._write(outlet, HEAD.pack(MAGIC, SenderKind.READY, send.number, slot, nbytes, b""), None)

    def _take(self, inlet: RecvChannel, receive: RecvRequest, slot: int, at: int, nbytes: int) -> None:
        if self._copy(receive, inlet, lambda slots: slots.take(inlet.nonce, slot, receive.address() + at, nbytes)):
            with self._lock:
                if self._inlets.get(inlet.peer) is inlet:
                    receive.copied += nbytes
                    self._write(inlet, ANSWER.pack(MAGIC, ReceiverKind.FREE, receive.number), None)

    def _fetch(self, outlet: SendChannel, send: SendRequest) -> None:
        """Copy a message to the host for a receiver that wants the bytes."""
        host = np.empty(send.nbytes, np.uint8)
        if self._copy(send, outlet, lambda slots: slots.move(host.ctypes.data, send.address(), send.nbytes)):
            with self._lock:
                if send in outlet.fetching:  # otherwise the connection is over
                    outlet.fetching.remove(send)
                    send.memory = host.data
                    self._write(outlet, head(SenderKind.DATA, send), send)

    # -- a thread for each dial ----------------------------------------------------------------------------------

    def _open(self, outlet: SendChannel) -> None:
        why = ""
        try:
            sock = self._dial(outlet.peer)
            sock.setblocking(False)
            for_bulk(sock)
        except (OSError, FtcommError) as error:
            why = f"it cannot be reached: {error}"
        with self._lock:
            if why:
                self._stale.append((outlet, why))
            elif self._outlets.get(outlet.peer) is not outlet or self._error is not None:
                sock.close()
            else:
                outlet.sock = sock
                self._pump(outlet)
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
            if self._error is not None:
                return False
        self._end_stale()
        with self._lock:
            wait = self._expire(time.monotonic())
        self._end_stale()
        self._fail_waiting()  # for members without a connection
        with self._lock:
            connections = [c for c in (*self._outlets.values(), *self._inlets.values()) if c.sock is not None]
        for connection in connections:
            self._look_for(selector, connection)
        for key, mask in selector.select(wait):
            connection = key.data
            if connection is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                continue
            try:
                if mask & selectors.EVENT_READ:
                    self._read(connection)
                if mask & selectors.EVENT_WRITE:
                    self._flush(connection)
            except BlockingIOError:
                pass
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError):
                    drop("data", f"a message from {self._name(connection.peer)}: {error}; its connection is closed")
                self._end(connection, str(error))
        return True

    def _end_stale(self) -> None:
        with self._lock:
            stale, self._stale = self._stale, []
        for connection, why in stale:
            self._end(connection, why)

    def _look_for(self, selector: selectors.BaseSelector, connection: MessageConnection) -> None:
        assert connection.sock is not None
        left = connection.queue or unsent(connection.sock)
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
        if interest != connection.interest:
            change = selector.modify if connection.interest else selector.register
            change(connection.sock, interest, connection)
            connection.interest = interest

    def _flush(self, connection: MessageConnection) -> None:
        """Write the first buffers, without the lock: only this thread takes from the queue, and no other sends while
        the queue is not empty."""
        assert connection.sock is not None
        with self._lock:
            if not flush(connection.sock):
                return
        while connection.queue:
            part, message = connection.queue[0]
            sent = connection.sock.send(part, socket.MSG_NOSIGNAL)
            with self._lock:
                if sent < part.nbytes:
                    connection.queue[0] = (part[sent:], message)
                    continue
                connection.queue.popleft()
            if message is not None:
                message.end()

    def _read(self, connection: MessageConnection) -> None:
        assert connection.sock is not None
        size = ANSWER.size if isinstance(connection, SendChannel) else HEAD.size
        left = _TURN
        while left > 0 or pending(connection.sock):
            if not connection.rest:
                connection.head = bytearray(size)
                connection.rest = memoryview(connection.head)
            received = connection.sock.recv_into(connection.rest)
            if not received:
                raise ConnectionError("its connection was closed")
            left -= received
            connection.rest = connection.rest[received:]
            while not connection.rest:
                if isinstance(connection, SendChannel):
                    self._answered(connection)
                    break
                assert isinstance(connection, RecvChannel)
                if not self._arrived(connection):
                    break

    def _answered(self, outlet: SendChannel) -> None:
        """Take an answer of the receiver."""
        magic, kind, number = ANSWER.unpack(outlet.head)
        if magic != MAGIC or kind not in tuple(ReceiverKind):
            raise ValueError(f"an answer that cannot be: magic {magic:#x}, kind {kind}")
        if kind == ReceiverKind.FREE:
            self._freed(outlet, number)
            return
        with self._lock:
            outlet.nbytes -= outlet.unasked.pop(number, 0)
            message = outlet.offers.pop(number, None)  # None: complete, or withdrawn
            if message is not None and kind != ReceiverKind.NACK:
                self._go(outlet, message, plain=kind == ReceiverKind.PLAIN)
            self._pump(outlet)
        if message is not None and kind == ReceiverKind.NACK:
            message.end(
                MismatchError(
                    f"{self._owner}: {self._name(outlet.peer)} receives another number of elements, or another dtype, "
                    f"than the {message.nbytes} bytes of {message.dtype} that were sent with tag {message.tag}"
                )
            )

    def _go(self, outlet: SendChannel, message: SendRequest, *, plain: bool) -> None:
        """Send a message that the receiver wants. With the lock."""
        track = outlet.track
        if track.pair is None and message.place is not None and not plain and self._pairs:
            track.pair = self._pairs.pop()
        if message.place is None:
            self._write(outlet, head(SenderKind.DATA, message), message)
        elif plain or track.pair is None:
            outlet.fetching.append(message)
            self._copier.do(functools.partial(self._fetch, outlet, message))
        else:
            track.sends.append(message)
            self._fill(outlet)

    def _fill(self, outlet: SendChannel) -> None:
        """Copy into free slots. With the lock."""
        assert self.slots is not None
        while (piece := outlet.track.next(self.slots.chunk)) is not None:
            self._copier.do(functools.partial(self._put, outlet, *piece))

    def _freed(self, outlet: SendChannel, number: int) -> None:
        """Note that the receiver has taken a piece."""
        with self._lock:
            whole = outlet.track.freed(number, self.slots.chunk if self.slots is not None else 0)
            if whole is not None:
                self._write(outlet, head(SenderKind.DONE, whole), whole)
            self._fill(outlet)

    def _ready(self, inlet: RecvChannel, number: int, slot: int, nbytes: int) -> None:
        """Note that the sender has put a piece into a slot."""
        slots = self.slots
        with self._lock:
            receive = inlet.expected.get(number)
            if receive is None or slots is None or not receive.by_slots:
                raise ValueError(f"a piece of a message {number} that nobody has asked for")
            at = receive.started
            if not 0 <= slot < slots.count or not 0 < nbytes == min(slots.chunk, receive.nbytes - at):
                raise ValueError(f"a piece of {nbytes} bytes in slot {slot} behind {at} of {receive.nbytes} bytes")
            receive.started += nbytes
            self._copier.do(functools.partial(self._take, inlet, receive, slot, at, nbytes))

    def _done(self, inlet: RecvChannel, number: int) -> None:
        """End a message that has come by slots: what was copied counts."""
        with self._lock:
            receive = inlet.expected.get(number)
            if receive is None or not receive.by_slots or receive.copied != receive.nbytes:
                raise ValueError(f"the end of a message {number} that has not come whole")
            del inlet.expected[number]
        receive.end()

    def _arrived(self, inlet: RecvChannel) -> bool:
        """Take a head, or its bytes. True if bytes belong to it and there are none to read."""
        if inlet.receive is not None:
            receive, inlet.receive = inlet.receive, None
            receive.end()
            return False
        if inlet.arrival is not None:
            arrival, inlet.arrival = inlet.arrival, None
            self._deliver(inlet, arrival)
            return False
        magic, kind, number, tag, nbytes, name = HEAD.unpack(inlet.head)
        if magic != MAGIC or nbytes > MAX_MESSAGE:
            raise ValueError(f"a frame that cannot be: magic {magic:#x}, {nbytes} bytes")
        if kind == SenderKind.DATA:
            with self._lock:
                inlet.receive = inlet.expected.pop(number, None)
            if inlet.receive is None or inlet.receive.nbytes != nbytes or inlet.receive.started:
                raise ValueError(f"{nbytes} bytes of a message {number} that nobody has asked for")
            inlet.receive.land()
            inlet.rest = inlet.receive.memory
        elif kind == SenderKind.EAGER:
            with self._lock:
                full = self._matching.full(inlet.peer, nbytes)
            if nbytes > EAGER or full:
                raise ValueError(f"{nbytes} bytes more that nobody has asked for, at most {MAX_BYTES} are kept")
            data = bytearray(nbytes)
            inlet.arrival = Unexpected(inlet.peer, number, tag, dtype_of(name), nbytes, data)
            inlet.rest = memoryview(data)
        elif kind in (SenderKind.RTS, SenderKind.SLOTS):
            with self._lock:
                full = self._matching.full(inlet.peer, 0)
            if full:
                raise ValueError(f"an offer more, at most {MAX_UNEXPECTED} are kept")
            self._deliver(
                inlet, Unexpected(inlet.peer, number, tag, dtype_of(name), nbytes, None, kind == SenderKind.SLOTS)
            )
            return False
        elif kind == SenderKind.READY:
            self._ready(inlet, number, tag, nbytes)
            return False
        elif kind == SenderKind.DONE:
            self._done(inlet, number)
            return False
        elif kind == SenderKind.CANCEL:
            self._withdrawn(inlet, number)
            return False
        else:
            raise ValueError(f"a frame of the unknown kind {kind}")
        return not inlet.rest

    def _deliver(self, inlet: RecvChannel, arrival: Unexpected) -> None:
        with self._lock:
            if self._inlets.get(inlet.peer) is inlet:
                receive = self._matching.arrive(arrival)
                if receive is not None:
                    self._match(arrival, receive)

    def _withdrawn(self, inlet: RecvChannel, number: int) -> None:
        with self._lock:
            asked = inlet.expected.get(number)
            if asked is not None and asked.started:
                raise ValueError(f"a message {number} is withdrawn of which {asked.started} bytes have come")
            arrival = self._matching.offered(inlet.peer, number)
            if arrival is not None:
                self._matching.discard(arrival)
            receive = inlet.expected.pop(number, None)
            if receive is not None:
                receive.found = None
                again = self._matching.again(receive)
                if again is not None:
                    self._match(again, receive)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> float | None:
        """End messages that are past their deadline; returns the seconds until the next look. With the lock."""
        ran = self._ran.at(now)
        while self._deadlines and (self._deadlines[0][0] <= ran or self._deadlines[0][2].ended.is_set()):
            message = heapq.heappop(self._deadlines)[2]
            if not message.ended.is_set():
                self._give_up(message)
        return min(REPORT / 2, self._deadlines[0][0] - ran) if self._deadlines else None

    def _give_up(self, message: MessageRequest) -> None:
        """End a message whose deadline has passed. With the lock."""
        if isinstance(message, RecvRequest):
            sent = "anybody" if message.source is None else self._name(message.source)
            text = f"nothing came from {sent} with tag {message.tag}. Did it send?"
            if not self._matching.cancel(message):  # its bytes are coming
                assert message.found is not None
                inlet = self._inlets.get(message.found)
                if inlet is not None:  # otherwise the connection is over, and the message has ended
                    self._stale.append((inlet, "it has stopped in the middle of a message"))
                text = f"{self._name(message.found)} has stopped in the middle of a message with tag {message.tag}."
        else:
            assert isinstance(message, SendRequest)
            text = f"{self._name(message.target)} has not received the message with tag {message.tag}. Did it try to?"
            outlet = self._outlets.get(message.target)
            if outlet is None:  # the connection is over, and has ended the message
                return
            if message in outlet.held:
                outlet.held.remove(message)
            elif outlet.offers.pop(message.number, None) is not None:
                self._write(outlet, head(SenderKind.CANCEL, message), None)
            else:  # it is being sent
                self._stale.append((outlet, "it has stopped reading"))
                self._ring()
                return
        message.end(CollectiveTimeout(f"{self._owner}: {text} A longer timeout waits longer"))

    def _fail_waiting(self) -> None:
        """Fail receives that no member is left to serve."""
        with self._lock:
            for receive in self._matching.wants() if self._silent else ():
                if receive.source in self._silent:
                    self._matching.cancel(receive)
                    receive.end(self._lost_error(receive.source, self._silent[receive.source]))

    def _end(self, connection: MessageConnection, why: str) -> None:
        """End a connection, and with it what was under way on it."""
        assert self._selector is not None
        if connection.interest and connection.sock is not None:
            self._selector.unregister(connection.sock)
            connection.interest = 0
        failed: list[MessageRequest] = []
        with self._lock:
            if isinstance(connection, SendChannel):
                if self._outlets.get(connection.peer) is connection:
                    del self._outlets[connection.peer]
                failed += connection.held
                failed += connection.offers.values()
                failed += connection.track.sends
                failed += connection.fetching
                failed += [message for _, message in connection.queue if message is not None]
                connection.held.clear()
                connection.offers.clear()
                connection.track.sends.clear()
                connection.fetching.clear()
                if connection.track.pair is not None:
                    self._pairs.append(connection.track.pair)
                    connection.track.pair = None
            elif isinstance(connection, RecvChannel):
                failed += connection.expected.values()
                failed += [connection.receive] if connection.receive is not None else []
                connection.expected.clear()
                if self._inlets.get(connection.peer) is connection:
                    del self._inlets[connection.peer]
                    self._silent[connection.peer] = why
                    self._discard_offers(connection.peer)
            connection.queue.clear()
        if connection.sock is not None:
            connection.sock.close()
        error = self._error or self._lost_error(connection.peer, why)
        for message in failed:
            message.end(error)
        self._fail_waiting()

    def _end_all(self) -> list[SendChannel]:
        """Fail every message; returns the send channels, which are still to be closed."""
        self._end_stale()
        with self._lock:
            error = self._error
            outlets = list(self._outlets.values())
            inlets = list(self._inlets.values())
        for inlet in inlets:
            self._end(inlet, "")
        with self._lock:
            messages = [message for _, _, message in self._deadlines]
            self._deadlines.clear()
            for outlet in outlets:
                outlet.queue.clear()
        for message in messages:
            if not message.ended.is_set():
                message.end(error)
        return [outlet for outlet in outlets if outlet.sock is not None]

    def _part(self, selector: selectors.BaseSelector) -> None:
        """Part from the receivers. Closing a connection with an unread answer would discard what was sent last, so read
        until the receivers close."""
        outlets = self._end_all()
        for outlet in outlets:
            assert outlet.sock is not None
            with contextlib.suppress(OSError):
                self._look_for(selector, outlet)
                self._say_no_more(outlet)
        until = time.monotonic() + _PARTING
        while outlets and time.monotonic() < until:
            for key, _ in selector.select(max(0.0, until - time.monotonic())):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                    continue
                try:
                    if unsent(key.data.sock):
                        self._say_no_more(key.data)
                        self._look_for(selector, key.data)
                    if key.data.sock.recv(4096):
                        continue
                except BlockingIOError:
                    continue
                except OSError:
                    pass
                self._end(key.data, "")
                outlets.remove(key.data)
        for outlet in outlets:
            self._end(outlet, "")

    @staticmethod
    def _say_no_more(outlet: SendChannel) -> None:
        """Shut the connection down for sending, when all has gone out."""
        assert outlet.sock is not None
        if flush(outlet.sock):
            outlet.sock.shutdown(socket.SHUT_WR)


def _nobody(peer: int) -> Socket:
    raise ConnectionError("the group is closed")
