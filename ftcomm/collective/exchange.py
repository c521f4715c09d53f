"""The engine of a shard group at one member: who drives the stream of chunk tasks, and how it is stopped and resumed.

Exactly one thread drives at a time. A synchronous op is driven by its caller if nobody else drives (handing it to
another thread would cost more than a small op); everything else by a worker thread, started when first needed.

    freeze    the driver stops at its next wait (between two memory operations) and parks
    progress  what this member holds, for the others
    resume    a new epoch: a new stream, with the tasks that are left; the driver goes on

`_mutex` guards the transitions between these and is never held across a wait or a memory operation.
"""

from __future__ import annotations

import contextvars
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ftcomm.collective.flight import Flight, Resumed
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import ProtocolError
from ftcomm.collective.stream import Interrupted, Stream
from ftcomm.control.messages import Progress
from ftcomm.errors import CollectiveTimeout, FtcommError
from ftcomm.kernels.reduce import Reducer
from ftcomm.kernels.wait import Waiter, cores
from ftcomm.transport.segment import ASLEEP, Peer, Segment
from ftcomm.transport.tcp import Lost, Reader

# Rounds of polling and yielding before a sleep. A sleeping member takes 26 us to answer, a polling one 1 us. Without
# the yield two members that share a core wait for each other until the polls are used up (1 KB: 160 us, not 5 us).
_ROUNDS = 32  # every member on this host has a core: about 80 us
_ROUNDS_CROWDED = 4  # 1 KB, four members on two cores: 21 us; 63 us without a yield
_REPORTS = 1.0  # seconds between two reports of a stall that lasts: one that is lost does not matter


class Stall(NamedTuple):
    """An op that has made no progress for the op timeout, and the replicas whose words are missing."""

    epoch: int
    op: int
    waiting_on: tuple[int, ...]


class Exchange:
    """The collectives of one member of a group. Frozen until the first `resume`; ops submitted before wait for it.

    `on_stall` is called by the driving thread when an op has made no progress for `op_timeout` seconds, and about every
    second from then on; after twice that time without a new view the engine fails with `CollectiveTimeout`.
    `on_lost(replica, epoch, reason)` is called by the driving thread when the connection to a member that reads through
    TCP has broken; the op goes on waiting, for the view change. `on_died(replica, epoch)` is called by the driving
    thread, once an epoch, for a member of this host that is seen to be dead while the op waits. `on_failed(error)` is
    called once, by any thread, if the engine fails of its own accord, not by `fail`. `ranks_per_replica` tells how
    crowded the host is.
    """

    def __init__(
        self,
        replica: int,
        segment: Segment,
        *,
        op_timeout: float,
        on_stall: Callable[[Stall], None],
        on_lost: Lost = lambda replica, epoch, reason: None,
        on_died: Callable[[int, int], None] = lambda replica, epoch: None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
        ranks_per_replica: int = 1,
    ) -> None:
        self.replica = replica
        self._segment = segment
        self._op_timeout = op_timeout
        self._on_stall = on_stall
        self._on_lost = on_lost
        self._on_died = on_died
        self._on_failed = on_failed
        self._ranks_per_replica = ranks_per_replica
        self._waiter = Waiter(segment.words, ASLEEP, 0)
        self._reducer = Reducer()
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)  # a parked driver waits on it
        self._flight = Flight()
        self._stream: Stream | None = None  # None: has never been in a view
        self._peers: dict[int, Peer] = {}
        self._readers: list[Reader] = []  # attached, and not yet welcomed by the stream of their epoch
        # Who drives, or is about to: the op of the calling thread, or the exchange itself for the worker. An interrupt
        # may come between any two lines of the calling thread, which must then know whether it was the one.
        self._driver: object = None
        self._parked = False  # somebody drives, but waits for `resume` or `fail`
        self._frozen = True
        self._quiesced: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._waiting_since: float | None = None
        self._report_at = 0.0  # when to report the stall, if there is no progress since `_waiting_since`
        self._worker: threading.Thread | None = None
        self._kicks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # Overflow and NaN in somebody's data are no news to the one who sums them. Entering a context that ignores
        # them costs 40 ns, numpy.errstate 700 ns.
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """Enqueue; the worker drives it. Does not block. If the engine has failed, `op.error` is set at once."""
        try:
            if self._admit(op):
                self._kick()
        except BaseException as error:
            self._break_off(op, error)
            raise

    def run(self, op: Operation) -> None:
        """Enqueue, and return when `op.done`. The outcome is in `op.error`."""
        self._drive(op)
        op.wait()

    def drain(self, timeout: float | None = None) -> None:
        """Block until nothing is in flight. Raises `CollectiveTimeout` after `timeout` seconds; not the ops' errors."""
        with self._mutex:
            last = self._flight.ops[-1] if self._flight.ops else None
        if last is not None and not last.wait(timeout):
            raise CollectiveTimeout(f"op {last.number} was still in flight after {timeout:g}s")

    # -- the control side: none of these blocks ----------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], None]) -> None:
        """Stop; `quiesced` is called, here or by the driver, when no memory operation of ours runs. May be repeated."""
        with self._mutex:
            self._frozen = True
            for peer in self._peers.values():
                peer.quiet()
            now = self._parked or self._driver is None
            if not now:
                self._quiesced.append(quiesced)
        if now:
            quiesced()
        else:
            self._waiter.poke()

    def nudge(self) -> None:
        """Wake the driver if it sleeps: it has something to look at."""
        self._waiter.nudge()

    def progress(self) -> Progress:
        """Where this member stands. Between `quiesced` and `resume`. Raises the engine's error if it has failed."""
        with self._mutex:
            if self._error is not None:
                raise self._error
            if self._stream is None:
                return Progress(returned=0, ops=(), fresh=True)
            return self._flight.progress()

    def attach(self, sock: socket.socket, replica: int, epoch: int) -> None:
        """A member reads this one through TCP in `epoch`; `sock` is connected and past its handshake.

        May come before `resume` for that epoch, or long after; the member gets what it missed. Replaces the connection
        that it had in this epoch.
        """
        reader = Reader(sock, replica, epoch)
        with self._mutex:
            current = 0 if self._stream is None else self._stream.view.epoch
            if self._error is not None or epoch < current:
                reader.close()
                return
            for earlier in self._waiting(replica, epoch):
                self._readers.remove(earlier)
                earlier.close()
            self._readers.append(reader)
        self._waiter.poke()

    def resume(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Resumed:
        """Enter the epoch of `view`. `peers` are all its other members, `progress` is of all its members, this one too.

        A defect in the members' accounts of themselves fails the engine with `ProtocolError`.
        """
        with self._mutex:
            if not self._frozen or (self._driver is not None and not self._parked):
                raise RuntimeError("resume() before the engine has quiesced")
            if self._error is not None:
                return Resumed(0, 0, 0)
            for peer in self._peers.values():
                if all(peer is not kept for kept in peers.values()):
                    peer.close()
            self._peers = dict(peers)
            self._waiter.rounds = self._rounds()
            stream = Stream(
                view, self._segment, self._peers, self._waiter, self._reducer, self._blocked_send, self._send_failed
            )
            if self._stream is None:
                self._flight.number_from(progress)
            else:
                self._stream.close()
            self._stream = stream
            resumed = Resumed(0, 0, 0)
            failed: BaseException | None = None
            try:
                resumed = self._flight.resume(progress)
                stream.unposted.extend(self._flight.ops)
            except ProtocolError as error:
                failed = error
            if not view.contributing:
                failed = FtcommError("no contributing member is left; the state of the training is lost")
            self._frozen = False
            self._waiting_since = None
            if failed is not None:
                self._end(failed)
            kick = bool(self._flight.ops) and self._driver is None
            if kick:
                self._driver = self
            self._waiter.poked = True
            self._changed.notify_all()
        if failed is not None:
            self._on_failed(failed)
        if kick:
            self._kick()
        return resumed

    def fail(self, error: BaseException) -> None:
        """The end: every op in flight and every later one fails with `error`. The first error counts."""
        with self._mutex:
            self._end(error)
        self._waiter.poke()

    # -- driving -------------------------------------------------------------------------------------------------------

    def _admit(self, op: Operation) -> bool:
        """Enqueue `op`; True if the calling thread has to see to it that somebody drives."""
        with self._mutex:
            if self._error is not None:
                op.finish(self._error)
                return False
            drive = self._driver is None
            if drive:
                self._driver = op  # first: if an interrupt comes after this, the engine ends
                self._parked = self._frozen  # it cannot touch the stream before it has looked around
            self._flight.add(op)
            if self._stream is not None:
                self._stream.unposted.append(op)
        if not drive:
            self._waiter.poke()
        return drive

    def _kick(self) -> None:
        """Let the worker drive, in place of the calling thread."""
        if self._worker is None:
            worker = threading.Thread(target=self._serve, name=f"ftcomm-exchange-{self.replica}", daemon=True)
            worker.start()
            self._worker = worker
        self._kicks.put(True)

    def _serve(self) -> None:
        while self._kicks.get():  # False: the end
            self._drive(None)

    def _drive(self, until: Operation | None) -> None:
        """In the worker (None): drive until nothing is in flight. In the calling thread: enqueue `until`, drive, unless
        somebody does, until it is done, then let go or hand over to the worker."""
        try:
            if until is not None and not self._admit(until):
                return
            while True:
                self._context.run(self._loop, until)
                with self._mutex:
                    if not self._flight.ops:
                        calls = self._let_go()
                        break
                if until is not None:
                    self._kick()
                    return
        except BaseException as error:
            self._break_off(self if until is None else until, error)
            raise
        for call in calls:
            call()

    def _break_off(self, driver: object, error: BaseException) -> None:
        """The thread of `driver` was stopped by `error`: the end, if it was the one that drives.

        Whatever it is (an interrupt from the keyboard, say), it may have come between two bytes of a chunk.
        """
        failed: BaseException | None = None
        with self._mutex:
            if self._driver is not driver:
                return
            if self._error is None:
                failed = FtcommError(f"the engine was interrupted by {error!r}; this rank cannot go on")
                self._error = failed
            self._abandon()
            calls = self._let_go()
        for call in calls:
            call()
        if failed is not None:
            self._on_failed(failed)

    def _let_go(self) -> list[Callable[[], None]]:
        """Nobody drives any more. With the mutex; the caller then calls what it gets, without."""
        self._driver = None
        if self._error is not None:
            self._kicks.put(False)  # the worker ends: nobody will need it
        calls, self._quiesced = self._quiesced, []
        return calls

    def _loop(self, until: Operation | None) -> None:
        waiter = self._waiter
        flight = self._flight.ops
        with self._mutex:
            if until is None:
                self._driver = self  # the thread that has handed over is out of it
            # Decided under the mutex: between a look at `_frozen` and one at `_stream` a whole view change may pass.
            stop = self._frozen or self._error is not None
            self._parked = stop
        if stop and (not self._look_around() or (until is not None and until.done)):
            return
        stream = self._stream
        while flight:
            if waiter.poked:
                if not self._look_around() or (until is not None and until.done):
                    return
                stream = self._stream
                continue
            assert stream is not None
            try:
                advanced = stream.advance()
            except Interrupted:
                continue
            if advanced:
                self._waiting_since = None
                continue
            op = flight[0]
            if stream.stable(op):
                self._flight.return_first()
                if op is until:
                    return
            elif stream.wait(op):
                self._waiting_since = None
            elif not waiter.poked:
                self._watch(stream, op, stream.missing(op))

    def _look_around(self) -> bool:
        """Somebody has poked the driver: new ops, a TCP reader, a freeze, or the end.

        False if nothing is in flight any more. The driver may then still be parked, and must not touch the stream.
        """
        self._waiter.poked = False
        failed: BaseException | None = None
        with self._mutex:
            deadline = time.monotonic() + 2 * self._op_timeout
            while self._frozen and self._error is None and self._flight.ops:
                self._parked = True
                left = deadline - time.monotonic()
                calls, self._quiesced = self._quiesced, []
                if calls:
                    self._mutex.release()
                    try:
                        for call in calls:
                            call()
                    finally:
                        self._mutex.acquire()
                elif left > 0:
                    self._changed.wait(left)
                else:
                    failed = CollectiveTimeout(
                        f"op {self._flight.ops[0].number}: no view was agreed upon within {2 * self._op_timeout:g}s. "
                        "Is the coordinator reachable? FTCOMM_OP_TIMEOUT sets half of that time."
                    )
                    self._error = failed
            readers: list[Reader] = []
            stream = self._stream
            if self._error is not None:
                self._abandon()
            elif not self._frozen:
                assert stream is not None
                readers = self._take_readers(stream.view.epoch)
            self._parked = self._frozen and self._error is None
            more = bool(self._flight.ops)
        if failed is not None:
            self._on_failed(failed)
        try:
            for reader in readers:
                assert stream is not None
                stream.welcome(reader)
        except Interrupted:
            pass  # the poke that caused it is still to be looked at
        return more

    def _take_readers(self, epoch: int) -> list[Reader]:
        """Those attached for `epoch`; drops those of earlier ones. With the mutex."""
        for reader in self._readers:
            if reader.epoch < epoch:
                reader.close()
        taken = [reader for reader in self._readers if reader.epoch == epoch]
        self._readers = [reader for reader in self._readers if reader.epoch > epoch]
        return taken

    def _waiting(self, replica: int, epoch: int) -> list[Reader]:
        """Those of this member and epoch that are yet to be welcomed. With the mutex."""
        return [reader for reader in self._readers if (reader.replica, reader.epoch) == (replica, epoch)]

    def _send_failed(self, replica: int, epoch: int, reason: str) -> None:
        """The connection to a reader has broken; no news if the next one is here already."""
        with self._mutex:
            replaced = self._waiting(replica, epoch)
        if not replaced:
            self._on_lost(replica, epoch, reason)

    def _blocked_send(self, replica: int) -> None:
        """The driver cannot get rid of a frame for `replica`."""
        if self._frozen or self._error is not None:
            self._waiter.poked = True
            raise Interrupted
        assert self._stream is not None
        self._watch(self._stream, self._flight.ops[0], (replica,))

    def _end(self, error: BaseException) -> bool:
        """The engine fails with `error`, unless it has failed before. With the mutex."""
        first = self._error is None
        if first:
            self._error = error
        if self._driver is None:
            self._abandon()
            self._kicks.put(False)
        self._changed.notify_all()
        return first

    def _abandon(self) -> None:
        """End every op in flight with the engine's error. With the mutex, and no memory operation under way."""
        assert self._error is not None
        self._flight.abandon(self._error)
        for peer in self._peers.values():
            peer.close()
        for reader in self._readers:
            reader.close()
        if self._stream is not None:
            self._stream.close()

    def _watch(self, stream: Stream, op: Operation, missing: tuple[int, ...]) -> None:
        """A wait for the replicas `missing` has ended without progress."""
        for replica in stream.died():
            self._on_died(replica, stream.view.epoch)
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since, self._report_at = now, now + self._op_timeout
        waited = now - self._waiting_since
        if now >= self._report_at:
            self._report_at = now + _REPORTS
            self._on_stall(Stall(stream.view.epoch, op.number, missing))
        elif waited >= 2 * self._op_timeout:
            who = ", ".join(map(str, missing))
            failed = CollectiveTimeout(
                f"op {op.number} ({op.count} x {op.dtype}, {op.op}) waited {waited:.1f}s for replicas {who}. "
                "Did they make the same call? FTCOMM_OP_TIMEOUT sets half of that time."
            )
            with self._mutex:
                first = self._end(failed)
            self._waiter.poke()
            if first:
                self._on_failed(failed)

    def _rounds(self) -> int:
        """How long to poll before a sleep."""
        if any(peer.how == "tcp" for peer in self._peers.values()):
            return 0  # a poll holds the interpreter lock, which the receiving threads need
        here = self._ranks_per_replica * (1 + len(self._peers))
        return _ROUNDS if here <= cores() else _ROUNDS_CROWDED
