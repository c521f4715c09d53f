"""The order of calls between the threads of one process: ops are matched by it, and threads have to agree on one."""

from __future__ import annotations

import _thread
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ftcomm.errors import ArgumentError
from ftcomm.process import callers

SubmittedT = TypeVar("SubmittedT")


class Series:
    """Ops that one thread has started, and no other thread in between."""

    crossed = ""  # the name of the thread that came between

    def __init__(self, thread: int) -> None:
        self.thread = thread

    def check(self) -> None:
        """Check the series, once an op of it is done. Raises `ArgumentError` if another thread has called meanwhile."""
        if self.crossed:
            raise ArgumentError(_told(self.crossed))


class Turn(Generic[SubmittedT]):
    """Tells whose call it is, in one group. Two threads that call at the same time have no order, so the ranks may have
    mixed their calls: where that is noticed, both are told. What the group calls next may be matched with a wrong call,
    too, so all further calls are refused until `agree`.

    It is noticed if a thread calls while another one is in a call that blocks, or while the last op that another one
    has started is in flight. A thread that has waited for that op, or finds it done, has an order.

    It is not noticed if the calls never overlap here, though the other ranks may have made them in another order; nor
    between a thread of autograd (`callers.foreign`) and one of the script, which may be in that backward.

    `ended` tells whether an op is no longer in flight.
    """

    def __init__(self, ended: Callable[[SubmittedT], bool]) -> None:
        self._ended = ended
        # 0 -> the call that blocks, so that owner and lock are one: [its thread, names of those that came between]. The
        # last of these is taken away when it ends; so who still finds the thread in front was in time with its name.
        self._held: dict[int, list[Any]] = {}
        self._starting = _thread.allocate_lock()  # guards the next two; held for some lines
        self._series: Series | None = None  # the newest
        self._last: weakref.ref[SubmittedT] | None = None  # its last op; no buffers of callers are kept
        self._mixed_by = ""  # the name of the thread that has mixed the order of calls

    def agree(self) -> None:
        """Note that all ranks have passed a point by which calls are matched from now on."""
        self._mixed_by = ""

    def run(self, call: Callable[[SubmittedT], object], op: SubmittedT) -> None:
        """Make a `call` that blocks until `op` is done. Raises `ArgumentError` if another thread is in a call, or has
        started one that is in flight, or has called meanwhile."""
        me, held = get_ident(), self._held
        if self._mixed_by and me not in held.get(0, ()):
            self._refuse()
        mine: list[Any] = [me]
        try:
            while (holder := held.setdefault(0, mine)) is not mine:
                if me in holder:
                    call(op)  # inside another one of this thread
                    return
                self.check()  # or that one is out by now
            series = self._series
            if series is not None and series.thread != me:
                with self._starting:
                    self._behind(me)
            call(op)
            del held[0]  # without a call, after which the handler of a signal may raise
        except BaseException:
            if 0 in held and held[0] is mine:
                del held[0]
            raise
        last = mine.pop()
        if last != me:
            raise ArgumentError(_told(last))

    def start(self, op: SubmittedT) -> Series:
        """A call begins that does not block. Raises `ArgumentError`, as `run` does."""
        me = get_ident()
        if self._mixed_by:
            self._refuse()
        with self._starting:
            series = self._series
            if series is None or series.thread != me:
                if callers.foreign():
                    self.check()
                    return Series(me)
                self._behind(me)
                series = Series(me)
            before = self._series, self._last
            self._series, self._last = series, weakref.ref(op)  # before the look at the other: `run` does the reverse
            try:
                self.check()
            except ArgumentError:
                self._series, self._last = before
                raise
        return series

    def check(self) -> None:
        """Raises `ArgumentError` if another thread is in a call that blocks."""
        while (holder := self._held.get(0)) is not None and get_ident() not in holder:
            here = threading.current_thread().name
            holder.append(here)
            if isinstance(holder[0], int):  # else it has ended before
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
        """The order is lost. Tell the other thread that has started what is in flight."""
        self._mixed_by = here
        series = self._series
        if series is not None and series.thread != get_ident() and self._in_flight():
            series.crossed = here
            self._series = Series(series.thread)

    def _refuse(self) -> None:
        raise ArgumentError(
            f"the order of calls of this group was lost when thread {self._mixed_by!r} called a collective while "
            "another thread was in one: the ranks may have mixed their calls. The group of a step loop matches calls "
            "again behind the next step boundary; close any other group, and make a new one. Give each thread a group "
            "of its own (Group.subgroup, dist.new_group)"
        )


def _told(other: str) -> str:
    return (
        f"thread {other!r} called a collective of a group in which another thread was in one. Calls are matched by "
        "their order, so the ranks may have mixed the two. Give each thread a group of its own (Group.subgroup, "
        "dist.new_group), or call from one thread, with async_op, or wait for what the other has started"
    )
