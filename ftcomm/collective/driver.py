"""The thread that drives an `ExchangeCore`: it moves it on, watches its waits, and parks while it is frozen.

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

from ftcomm.collective.core import MOVED, RETURNED, ExchangeCore, nothing
from ftcomm.collective.operation import Operation
from ftcomm.collective.stream import Interrupted
from ftcomm.collective.watchdog import Stall, no_view
from ftcomm.errors import ArgumentError, FtcommError
from ftcomm.sync.futex import Waiter


class Driver:
    """`mutex` guards the transitions and is never held across a wait or a memory operation. See
    `ftcomm.collective.exchange.Exchange` for the callbacks."""

    def __init__(
        self,
        core: ExchangeCore,
        waiter: Waiter,
        mutex: threading.Lock,
        *,
        on_stall: Callable[[Stall], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._core, self._waiter = core, waiter
        self._on_stall, self._on_failed = on_stall, on_failed
        self.mutex = mutex
        self.changed = threading.Condition(mutex)  # a parked driver waits on it
        # Who drives, or is about to: the op of the calling thread, or the driver itself for the worker. An interrupt
        # may come between any two lines of the calling thread, which must then know whether it was the one.
        self._by: object = None
        self._parked = False  # somebody drives, but waits for `resume` or `fail`
        self._quiesced: list[Callable[[], None]] = []
        self._worker: threading.Thread | None = None
        self._kicks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # Overflow and NaN in somebody's data are no news to the one who sums them. Entering a context that ignores
        # them costs 40 ns, numpy.errstate 700 ns.
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """Enqueue `op`; the worker drives it."""
        try:
            if self._admit(op):
                self.kick()
        except BaseException as error:
            self._break_off(op, error)
            raise

    def drive(self, until: Operation | None) -> None:
        """In the worker (None): drive until nothing is in flight. In the calling thread: enqueue `until`, drive, unless
        somebody does, until it is done, then let go or hand over to the worker."""
        try:
            if until is not None and not self._admit(until):
                return
            while True:
                self._context.run(self._loop, until)
                with self.mutex:
                    if not self._core.inflight.ops:
                        calls = self._let_go()
                        break
                if until is not None:
                    self.kick()
                    return
        except BaseException as error:
            self._break_off(self if until is None else until, error)
            raise
        for call in calls:
            call()

    def _admit(self, op: Operation) -> bool:
        """Enqueue `op`; True if the calling thread has to see to it that somebody drives."""
        core = self._core
        with self.mutex:
            if core.error is not None:
                op.finish(core.error)
                return False
            drive = self._by is None
            if drive:
                self._by = op  # first: if an interrupt comes after this, the engine ends
                self._parked = core.frozen  # it cannot touch the stream before it has looked around
            try:
                core.submit(op)
            except ArgumentError:
                if drive:
                    self._by = None
                raise
        if not drive:
            self._waiter.interrupt()
        return drive

    def kick(self) -> None:
        """Let the worker drive, in place of the calling thread."""
        if self._worker is None:
            name = f"ftcomm-exchange-{self._core.replica}"
            worker = threading.Thread(target=self._serve, name=name, daemon=True)
            worker.start()
            self._worker = worker
        self._kicks.put(True)

    def _serve(self) -> None:
        while self._kicks.get():  # False: the end
            self.drive(None)

    def _break_off(self, driver: object, error: BaseException) -> None:
        """The thread of `driver` was stopped by `error`: the end, if it was the one that drives.

        Whatever it is (an interrupt from the keyboard, say), it may have come between two bytes of a chunk.
        """
        failed = FtcommError(f"the engine was interrupted by {error!r}; this rank cannot go on")
        with self.mutex:
            if self._by is not driver:
                return
            first = self._core.fail(failed)
            self._core.abandon()
            calls = self._let_go()
        for call in calls:
            call()
        if first:
            self._on_failed(failed)

    def _let_go(self) -> list[Callable[[], None]]:
        """Nobody drives any more. With the mutex; the caller then calls what it gets, without."""
        self._by = None
        if self._core.error is not None:
            self._kicks.put(False)  # the worker ends: nobody will need it
        calls, self._quiesced = self._quiesced, []
        return calls

    # -- the control side: any thread --------------------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], None]) -> None:
        """Stop; `quiesced` is called, here or by the driver, when no memory operation of ours runs. May be repeated."""
        with self.mutex:
            self._core.freeze()
            now = self.has_quiesced
            if not now:
                self._quiesced.append(quiesced)
        if now:
            quiesced()
        else:
            self._waiter.interrupt()

    @property
    def has_quiesced(self) -> bool:
        """With the mutex, frozen."""
        return self._parked or self._by is None

    @property
    def is_idle(self) -> bool:
        """Nobody drives. With the mutex."""
        return self._by is None

    def forget(self) -> None:
        """Tell nobody any more."""
        self._on_stall = self._on_failed = nothing

    def resumed(self, error: BaseException | None) -> bool:
        """The core has entered a view, and fails with `error`. With the mutex. True: `kick` it, without."""
        if error is not None:
            self.end(error)
        kick = bool(self._core.inflight.ops) and self._by is None
        if kick:
            self._by = self
        self._waiter.interrupted = True
        self.changed.notify_all()
        return kick

    def end(self, error: BaseException) -> bool:
        """The core fails with `error`, unless it has failed before. With the mutex."""
        first = self._core.fail(error)
        if self._by is None:
            self._core.abandon()
            self._kicks.put(False)
        self.changed.notify_all()
        return first

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """The end. `tell`: `on_failed` hears of it, if it has not before."""
        with self.mutex:
            first = self.end(error)
        self._waiter.interrupt()
        if first and tell:
            self._on_failed(error)

    # -- the driving thread ------------------------------------------------------------------------------------------

    def _loop(self, until: Operation | None) -> None:
        core, waiter = self._core, self._waiter
        flight = core.inflight.ops
        if until is None:
            with self.mutex:
                self._by = self  # the thread that has handed over is out of it
                # With the mutex: between a look at `frozen` and one at `stream` a whole view change may pass.
                stop = self._parked = core.frozen or core.error is not None
        else:
            stop = self._parked  # so it was decided when the op was admitted
        if stop:
            if not self._look_around() or (until is not None and until.done):
                return
        elif until is not None and core.at_once(until):
            return
        while flight:
            if waiter.interrupted:
                if not self._look_around() or (until is not None and until.done):
                    return
                continue
            try:
                did = core.step()
                if did is MOVED:
                    continue
                if did is RETURNED:
                    if until is not None and until.done:
                        return
                    continue
                stream = core.stream
                assert stream is not None
                if stream.wait(flight[0]):
                    core.watch.wait = None
                elif not waiter.interrupted:
                    stall = core.blocked()
                    if stall is not None:
                        self._on_stall(stall)
            except Interrupted:
                continue
            except FtcommError as error:
                self.fail(error.with_traceback(None), tell=True)  # with one it would keep the op and the stream

    def _look_around(self) -> bool:
        """Somebody has interrupted the driver: new ops, a TCP reader, a freeze, or the end.

        False if nothing is in flight any more. The driver may then still be parked, and must not touch the stream.
        """
        core = self._core
        self._waiter.interrupted = False
        failed: BaseException | None = None
        with self.mutex:
            deadline = time.monotonic() + core.watch.give_up
            while core.frozen and core.error is None and core.inflight.ops:
                self._parked = True
                left = deadline - time.monotonic()
                calls, self._quiesced = self._quiesced, []
                if calls:
                    self.mutex.release()
                    try:
                        for call in calls:
                            call()
                    finally:
                        self.mutex.acquire()
                elif left > 0:
                    self.changed.wait(left)
                else:
                    failed = no_view(core.inflight.ops[0], core.watch.give_up)
                    core.fail(failed)
            if core.error is not None:
                core.abandon()
            readers = core.due()
            self._parked = core.frozen and core.error is None
            more = bool(core.inflight.ops)
        if failed is not None:
            self._on_failed(failed)
        core.welcome(readers)
        return more
