"""The thread that drives: it moves the stream of chunk tasks on, watches its waits, and parks while it is frozen.

Exactly one thread drives at a time. A synchronous op is driven by its caller if nobody else drives (handing it to
another thread would cost more than a small op); everything else by a worker thread, started when first needed.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.inflight import Inflight
from ftcomm.collective.operation import Operation
from ftcomm.collective.pending import PendingReaders
from ftcomm.collective.pipeline import LAST, used_up
from ftcomm.collective.roster import Standing
from ftcomm.collective.stream import Interrupted, Stream
from ftcomm.collective.watchdog import Due, Stall, Watchdog, gave_up, no_view
from ftcomm.errors import DivergenceError, FtcommError, TransportError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import Lost, MirrorWriter, Peer
from ftcomm.transport.segment import ASLEEP, Segment


class Driver(Standing):
    """What an `Exchange` is made of, which says what the arguments are and when the driver is stopped and resumed.

    `_mutex` guards the transitions and is never held across a wait or a memory operation.
    """

    def __init__(
        self,
        replica: int,
        segment: Segment,
        *,
        deadline_floor: float,
        deadline_ceiling: float,
        give_up: float,
        on_stall: Callable[[Stall], None],
        on_lost: Lost = lambda replica, epoch, reason: None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
        on_divergence: Callable[[Divergence], None] | None = None,
        ranks_per_replica: int = 1,
        reducer: Reducer | None = None,
    ) -> None:
        self.replica = replica
        self._segment = segment
        self._watch = Watchdog(deadline_floor, deadline_ceiling, give_up)
        self._on_stall = on_stall
        self._on_lost = on_lost
        self._on_failed = on_failed
        self._on_divergence = on_divergence
        self._ranks_per_replica = ranks_per_replica
        self._waiter = Waiter(segment.words, ASLEEP, 0)
        self._reducer = Reducer() if reducer is None else reducer
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)  # a parked driver waits on it
        self._inflight = Inflight()
        self._stream: Stream | None = None  # None: has never been in a view
        self._peers: dict[int, Peer] = {}
        self._pending = PendingReaders()
        self._lives: dict[int, str] = {}  # of the peers: replica -> nonce of its segment
        # Who drives, or is about to: the op of the calling thread, or the exchange itself for the worker. An interrupt
        # may come between any two lines of the calling thread, which must then know whether it was the one.
        self._driver: object = None
        self._parked = False  # somebody drives, but waits for `resume` or `fail`
        self._frozen = True
        self._quiesced: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._worker: threading.Thread | None = None
        self._kicks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # Overflow and NaN in somebody's data are no news to the one who sums them. Entering a context that ignores
        # them costs 40 ns, numpy.errstate 700 ns.
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")

    def _admit(self, op: Operation) -> bool:
        """Enqueue `op`; True if the calling thread has to see to it that somebody drives."""
        with self._mutex:
            if self._error is not None:
                op.finish(self._error)
                return False
            self._inflight.room()
            drive = self._driver is None
            if drive:
                self._driver = op  # first: if an interrupt comes after this, the engine ends
                self._parked = self._frozen  # it cannot touch the stream before it has looked around
            if not self._inflight.ops:
                self._watch.began = time.monotonic()
            self._inflight.add(op)
            if self._stream is not None:
                self._stream.pipeline.unposted.append(op)
        if not drive:
            self._waiter.interrupt()
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
                    if not self._inflight.ops:
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
        watch = self._watch
        flight = self._inflight.ops
        if until is None:
            with self._mutex:
                self._driver = self  # the thread that has handed over is out of it
                # With the mutex: between a look at `_frozen` and one at `_stream` a whole view change may pass.
                stop = self._parked = self._frozen or self._error is not None
        else:
            stop = self._parked  # so it was decided when the op was admitted
        if stop and (not self._look_around() or (until is not None and until.done)):
            return
        stream = self._stream
        if until is not None and not stop and stream is not None and stream.at_once(until):
            watch.returns(until)
            self._inflight.return_first()
            return
        while flight:
            if waiter.interrupted:
                if not self._look_around() or (until is not None and until.done):
                    return
                stream = self._stream
                continue
            assert stream is not None
            try:
                if stream.advance():
                    watch.wait = None
                    continue
                op = flight[0]
                if stream.stable(op):
                    watch.returns(op)
                    self._inflight.return_first()
                    if op is until:
                        return
                    continue
                if stream.pipeline.posted >= LAST and op.end < 0:
                    self._fail(used_up(self.replica, stream.view.epoch))
                    continue
                moved = stream.wait(op)
            except Interrupted:
                continue
            if moved:
                watch.wait = None
            elif not waiter.interrupted:
                self._stalled(stream, op, stream.missing(op))

    def _look_around(self) -> bool:
        """Somebody has interrupted the driver: new ops, a TCP reader, a freeze, or the end.

        False if nothing is in flight any more. The driver may then still be parked, and must not touch the stream.
        """
        self._waiter.interrupted = False
        failed: BaseException | None = None
        with self._mutex:
            deadline = time.monotonic() + self._watch.give_up
            while self._frozen and self._error is None and self._inflight.ops:
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
                    failed = no_view(self._inflight.ops[0], self._watch.give_up)
                    self._error = failed
            readers: list[MirrorWriter] = []
            stream = self._stream
            if self._error is not None:
                self._abandon()
            elif not self._frozen:
                assert stream is not None
                readers = self._pending.take(stream.view.epoch, self._lives)
            self._parked = self._frozen and self._error is None
            more = bool(self._inflight.ops)
        if failed is not None:
            self._on_failed(failed)
        for reader in readers:
            assert stream is not None
            stream.welcome(reader)
        return more

    def _send_failed(self, replica: int, epoch: int, reason: str) -> None:
        """The connection to a reader has broken; no news if the next one is here already. Or this member itself cannot
        send."""
        if replica == self.replica:
            self._fail(TransportError(f"replica {replica} cannot go on: {reason}"))
            return
        with self._mutex:
            replaced = self._pending.holds(replica, self._lives.get(replica, ""))
        if not replaced:
            self._on_lost(replica, epoch, reason)

    def _diverged(self, divergence: Divergence) -> None:
        """The results of a chunk differ. The majority goes on; the others fail before they return the op."""
        assert self._on_divergence is not None
        self._on_divergence(divergence)
        if self.replica in divergence.wrong:
            self._fail(DivergenceError(f"replica {self.replica} cannot go on. {divergence}."))
            raise Interrupted

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
        if self._stream is not None:
            self._stream.close()  # first: what it sends may lie in the arrays of the ops
        self._inflight.abandon(self._error)
        for peer in self._peers.values():
            peer.close()
        self._pending.close()
        self._watch.wait = None

    def _stalled(self, stream: Stream, op: Operation, missing: tuple[int, ...]) -> None:
        """A wait for the replicas `missing` has ended without progress."""
        due = self._watch.waits(stream.view.epoch, op, missing)
        if due is Due.REPORT:
            self._on_stall(Stall(stream.view.epoch, op.number, missing))
        elif due is Due.GIVE_UP:
            self._fail(gave_up(op, self._watch.give_up, missing))

    def _fail(self, error: FtcommError) -> None:
        """The driver has found that this member cannot go on."""
        with self._mutex:
            first = self._end(error)
        self._waiter.interrupt()
        if first:
            self._on_failed(error)
