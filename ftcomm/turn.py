"""The order of calls between the threads of one process: ops are matched by it, and threads have to agree on one."""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from ftcomm import callers
from ftcomm.errors import ArgumentError

Op = TypeVar("Op")


class Series:
    """Ops that one thread has started, and no other thread in between."""

    crossed = ""  # the name of the thread that came between

    def __init__(self, thread: int) -> None:
        self.thread = thread

    def check(self) -> None:
        """Once an op of it is done. Raises `ArgumentError` if another thread has called meanwhile."""
        if self.crossed:
            raise ArgumentError(_told(self.crossed))


class Turn(Generic[Op]):
    """Whose call it is, in one group. Two threads that call at the same time have no order, so the ranks may have mixed
    their calls: where that is seen both are told.

    It is seen if a thread calls while another one is in a call that blocks, or while the last op that another one has
    started is in flight. Who has waited for that op has made an order, and so has who finds it done.

    It is not seen if the calls never overlap here, though the other ranks may have made them in another order; nor
    between a thread of autograd (`callers.foreign`) and one of the script, which may stand in that backward.

    `ended` tells whether an op is not in flight any more.
    """

    def __init__(self, ended: Callable[[Op], bool]) -> None:
        self._ended = ended
        self._lock = _thread.allocate_lock()  # held by the call that blocks
        self._thread = 0
        self._crossed = ""
        self._starting = _thread.allocate_lock()  # guards the next two; held for some lines
        self._series: Series | None = None  # the newest
        self._last: weakref.ref[Op] | None = None  # its last op; nobody's buffers are kept

    def enter(self) -> bool:
        """A call that blocks until its op is done begins; True if it has to `leave`, so is not inside another one.
        Raises `ArgumentError` if another thread is in a call, or has started one that is in flight."""
        if not self._lock.acquire(False):
            self.check()
            return False
        self._thread, self._crossed = _thread.get_ident(), ""
        series = self._series
        if series is not None and series.thread != self._thread:
            try:
                with self._starting:
                    self._behind(self._thread)
            except BaseException:
                self._lock.release()
                raise
        return True

    def leave(self) -> None:
        """Raises `ArgumentError` if another thread has called meanwhile."""
        crossed = self._crossed
        self._lock.release()
        if crossed:
            raise ArgumentError(_told(crossed))

    def start(self, op: Op) -> Series:
        """A call begins that does not block. Raises `ArgumentError`, as `enter` does."""
        me = _thread.get_ident()
        with self._starting:
            series = self._series
            if series is None or series.thread != me:
                if callers.foreign():
                    self.check()
                    return Series(me)
                self._behind(me)
                series = Series(me)
            before = self._series, self._last
            self._series, self._last = series, weakref.ref(op)  # before the look at the lock: `enter` does the reverse
            try:
                self.check()
            except ArgumentError:
                self._series, self._last = before
                raise
        return series

    def check(self) -> None:
        """Raises `ArgumentError` if another thread is in a call that blocks."""
        if self._lock.locked() and self._thread != _thread.get_ident():
            self._crossed = here = threading.current_thread().name
            self._cross(here)
            raise ArgumentError(_told(here))

    def _behind(self, me: int) -> None:
        """Raises `ArgumentError` if another thread than `me` has started an op that is in flight."""
        series = self._series
        if series is not None and series.thread != me and self._in_flight() and not callers.foreign():
            here = threading.current_thread().name
            self._cross(here)
            raise ArgumentError(_told(here))

    def _in_flight(self) -> bool:
        op = None if self._last is None else self._last()
        return op is not None and not self._ended(op)

    def _cross(self, here: str) -> None:
        """Tell the other thread that has started what is in flight. What it starts from now on is not concerned."""
        series = self._series
        if series is not None and series.thread != _thread.get_ident() and self._in_flight():
            series.crossed = here
            self._series = Series(series.thread)


def _told(other: str) -> str:
    return (
        f"thread {other!r} called a collective of a group in which another thread was in one. Calls are matched by "
        "their order, so the ranks may have mixed the two. Give each thread a group of its own (Group.subgroup, "
        "dist.new_group), or call from one thread, with async_op, or wait for what the other has started"
    )
