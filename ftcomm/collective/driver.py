"""Drives an `ExchangeCore`: moves it on, watches its waits, and parks while it is frozen.

Exactly one thread drives at a time. The caller of a synchronous op drives it if no other thread does (handing it to
another thread would cost more than a small op); a worker thread, started when first needed, drives everything else.

    begin   go   go ...   leave

A thread that drives begins, goes on until it has nothing left to do here, and leaves. In between it holds nothing, so
that something else than a thread can drive: virtual time does in `ftcomm.simulation.exchange`.
"""

from __future__ import annotations

import contextvars
import enum
from collections.abc import Callable

import numpy as np

from ftcomm.collective.core import MOVED, RETURNED, ExchangeCore, nothing
from ftcomm.collective.operation import Operation
from ftcomm.collective.stream import Interrupted
from ftcomm.collective.threads import Threads
from ftcomm.collective.watchdog import Stall, no_view
from ftcomm.control.running_time import LOOK, RunningTime
from ftcomm.errors import ArgumentError, FtcommError
from ftcomm.sync.futex import Waiter


class Pause(enum.Enum):
    """The reason why the driving thread goes no further."""

    ENDED = enum.auto()  # it has nothing left to do, and must leave
    BLOCKED = enum.auto()  # a wait for others has ended in vain
    PARKED = enum.auto()  # the core is frozen


ENDED, BLOCKED, PARKED = Pause


class Driver:
    """The driver. `mutex` guards the transitions and is never held during a wait or a memory operation.
    `ftcomm.collective.exchange.Exchange` has the callbacks."""

    def __init__(
        self,
        core: ExchangeCore,
        waiter: Waiter,
        threads: Threads,
        *,
        on_stall: Callable[[Stall], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._core, self._member, self._waiter = core, core.member, waiter
        self._on_stall, self._on_failed = on_stall, on_failed
        self.mutex = threads.mutex
        self.changed = threads.changed  # a parked driver waits on it
        # What drives, or is about to: the op of the calling thread, or the driver itself for the worker. While anything
        # is in flight, one of them does. An interrupt may come between any two lines of the calling thread, which must
        # then know whether it was the one.
        self._by: object = None
        self._parked = False  # a thread drives, but waits for `entered` or `fail`
        # When, in `Watchdog.ran`, it waits for a view no longer, unless the job goes on to the next; None: it does not.
        self.deadline: float | None = None
        self._quiesced: list[Callable[[], None]] = []
        self._forgotten = False
        self.worker = threads.worker(f"ftcomm-exchange-{core.member.replica}")
        # Overflow and NaN in the data of users are no news here. Entering a context that ignores
        # them costs 40 ns, numpy.errstate 700 ns.
        self._run = contextvars.Context().run
        self._run(np.seterr, all="ignore")

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """Enqueue `op`; the worker drives it."""
        try:
            if self.admit(op):
                self.kick()
        except BaseException as error:
            self._break_off(op, error)
            raise

    def drive(self, until: Operation | None, relieved: Callable[[], object] = nothing) -> None:
        """Drive the core. The worker (None) does so until nothing is in flight, or another thread has `relieved` it. A
        calling thread enqueues `until`, drives until it is done, unless another thread drives already, and then lets go
        or hands over to the worker."""
        try:
            if until is not None and not self.admit(until):
                return
            run = self._run
            pause = run(self.begin, until)
            while pause is not ENDED or not self.leave(until):
                if relieved():
                    return
                if pause is PARKED:
                    self._park()
                pause = run(self.go, until)
        except BaseException as error:
            self._break_off(self if until is None else until, error)
            raise

    def admit(self, op: Operation) -> bool:
        """Enqueue `op`; True if the calling thread has to drive, or make the worker drive."""
        member = self._member
        with self.mutex:
            if member.error is not None:
                op.finish(member.error)
                return False
            drive = self._by is None
            if drive:
                self._by = op  # first: if an interrupt comes after this, the engine ends
                self._parked = member.frozen  # it cannot touch the stream before it has looked around
            try:
                self._core.submit(op)
            except ArgumentError:
                if drive:
                    self._by = None
                raise
        if not drive:
            self._waiter.interrupt()
        return drive

    def kick(self) -> None:
        """Let the worker drive, in place of the calling thread. If no thread can be had, this one drives until one can.

        Meanwhile an op of another group may wait for what this thread would do next, and the others take that for the
        stall of one who is well. So before they do, this rank gives itself up.
        """
        if self.worker.kick(self.drive):
            ran, watch = RunningTime(), self._member.watch
            ran.at(watch.clock())

            def relieved() -> bool:
                lacks = self.worker.kick(self.drive)
                if lacks and ran.at(watch.clock()) > watch.give_up / 4:
                    self.fail(
                        FtcommError(f"an op in the background stands still for want of a thread: {lacks}"), tell=True
                    )
                return lacks is None

            self.drive(None, relieved)

    def _break_off(self, driver: object, error: BaseException) -> None:
        """Note that the thread of `driver` was stopped by `error`: the end, if it was the one that drives.

        Any error (an interrupt from the keyboard, say) may have come between two bytes of a chunk.
        """
        failed = FtcommError(f"the engine was interrupted by {error!r}; this rank cannot go on")
        with self.mutex:
            if self._by is not driver:
                return
            self._core.parting = False
            first = self._member.fail(failed)
        self.leave(None)
        if first:
            self._on_failed(failed)

    # -- the control side: any thread --------------------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], None]) -> None:
        """Stop; `quiesced` is called, here or by the driver, when no memory operation of ours runs. May be repeated."""
        with self.mutex:
            self._member.freeze()
            now = self.has_quiesced
            if not now:
                self._quiesced.append(quiesced)
        if now:
            quiesced()
        else:
            self._waiter.interrupt()

    @property
    def idle(self) -> bool:
        """Whether no thread drives. Called with the mutex."""
        return self._by is None

    @property
    def has_quiesced(self) -> bool:
        """Whether the core stands still. Called frozen, with the mutex."""
        return self._parked or self.idle

    def forget(self) -> None:
        """Tell no one any more, and let the core forget, too. Called after the end; the core forgets once no thread
        drives."""
        self._on_stall = self._on_failed = nothing
        with self.mutex:
            self._forgotten = True
            if self._by is None:
                self._core.forget()

    def entered(self, error: BaseException | None) -> None:
        """Note that the core has entered a view; it fails with `error`, if there is one. With the mutex."""
        if error is not None:
            self.end(error)
        self.deadline = None  # also if nothing is left in flight, so that the driver does not look around any more
        self._waiter.interrupted = True
        self.changed.notify_all()

    def end(self, error: BaseException) -> bool:
        """Fail the core with `error`, unless it has failed before. With the mutex."""
        first = self._member.fail(error)
        if self._by is None:
            self._core.abandon()
            self.worker.end()
        self.changed.notify_all()
        return first

    def part(self, error: BaseException) -> None:
        """Fail, but not before what may have returned elsewhere has returned here."""
        with self.mutex:
            self._core.parting = self._member.error is None and self._by is not None
            self.end(error)
        self._waiter.interrupt()

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Fail. With `tell`, `on_failed` hears of it, if it has not before."""
        with self.mutex:
            self._core.parting = False
            first = self.end(error)
        self._waiter.interrupt()
        if first and tell:
            self._on_failed(error)

    # -- the driving thread ------------------------------------------------------------------------------------------

    def begin(self, until: Operation | None) -> Pause:
        """Drive from now on, as far as `go` does."""
        if until is None:
            member = self._member
            with self.mutex:
                self._by = self  # the thread that has handed over no longer drives
                # With the mutex: between a look at `frozen` and one at `stream` a whole view change may pass.
                stop = self._parked = member.frozen or member.error is not None
        else:
            stop = self._parked  # as decided when the op was admitted
            if not stop and self._core.at_once(until):
                return ENDED
        if stop:
            self._waiter.interrupted = True
        return self.go(until)

    def go(self, until: Operation | None) -> Pause:
        """Drive until `until` is done, or nothing is in flight, or it has to pause."""
        core, waiter = self._core, self._waiter
        flight = self._member.inflight.ops
        while flight:
            if waiter.interrupted:
                if self._look_around():
                    return PARKED
                if until is not None and until.done:
                    return ENDED
                continue
            try:
                did = core.step()
                if did is MOVED:
                    continue
                if did is RETURNED:
                    if until is not None and until.done:
                        return ENDED
                elif not core.wait() and not waiter.interrupted:
                    stall = core.blocked()
                    if stall is not None:
                        self._on_stall(stall)
                    return BLOCKED
            except Interrupted:
                continue
            except FtcommError as error:
                self.fail(error.with_traceback(None), tell=True)  # with one it would keep the op and the stream
        return ENDED

    def leave(self, until: Operation | None) -> bool:
        """Leave. False: the worker goes on, since an op has come meanwhile. A calling thread hands that over."""
        member = self._member
        with self.mutex:
            if member.error is None and not self._quiesced and not member.inflight.ops:
                self._by = None  # as nearly every op leaves
                return True
            calls = self._ended()
        if calls is not None:
            for call in calls:
                call()
            return True
        if until is None:
            return False
        self.kick()
        return True

    def _ended(self) -> list[Callable[[], None]] | None:
        """Let no thread drive any more, if nothing is in flight; None: something is. Returns what is to be called then.
        With the mutex."""
        core, member = self._core, self._member
        if member.error is not None and core.is_over:
            core.abandon()
        if member.inflight.ops:
            return None
        self._by = None
        if member.error is not None:
            self.worker.end()  # it is no longer needed
            if self._forgotten:
                core.forget()
        calls, self._quiesced = self._quiesced, []
        return calls

    def _look_around(self) -> bool:
        """Look why the driver was interrupted: new ops, a TCP reader, a freeze, or the end. True: it has to park."""
        core, member = self._core, self._member
        self._waiter.interrupted = False
        failed: BaseException | None = None
        with self.mutex:
            while member.frozen and member.error is None and member.inflight.ops:
                self._parked = True
                now = member.watch.ran()
                if self.deadline is None:
                    self.deadline = now + member.watch.give_up
                calls, self._quiesced = self._quiesced, []
                if calls:
                    self.mutex.release()
                    try:
                        for call in calls:
                            call()
                    finally:
                        self.mutex.acquire()
                elif now < max(self.deadline, member.watch.renewed + member.watch.give_up):
                    self._waiter.interrupted = True  # it looks around again
                    return True
                else:
                    failed = no_view(member.inflight.ops[0], member.watch.give_up)
                    member.fail(failed)
            self.deadline = None
            if core.is_over:
                core.abandon()
            elif core.parting:
                core.part()
            readers = core.due()
            self._parked = member.frozen and member.error is None
        if failed is not None:
            self._on_failed(failed)
        core.welcome(readers)
        return False

    def _park(self) -> None:
        """Wait until something changes for a core that is frozen."""
        member = self._member
        with self.mutex:
            if member.frozen and member.error is None and member.inflight.ops and self.deadline is not None:
                self.changed.wait(LOOK)
