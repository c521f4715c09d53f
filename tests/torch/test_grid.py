"""The order of calls on the world of a job whose replicas have several ranks."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ftcomm.errors import ArgumentError
from ftcomm.torch.grid import Grid

from ..exchange_rig import DEADLINE


class Inside(SimpleNamespace):
    """The ranks of a replica, of which this is the only one that has come to the barrier, until `here` is set."""

    roster, rank = (0, 1), 0

    def barrier(self) -> None:
        assert self.here.wait(DEADLINE)


def test_two_threads_that_call_at_once_are_told_so() -> None:
    inside = Inside(here=threading.Event())
    grid = Grid(SimpleNamespace(barrier=lambda: None, group=SimpleNamespace()), inside, lambda: (0, 0))  # type: ignore[arg-type]
    works = [grid.barrier(async_op=True) for _ in range(2)]
    told: list[Any] = []

    def call(async_op: bool) -> None:
        with pytest.raises(ArgumentError, match="thread 'reader' called a collective") as raised:
            grid.barrier(async_op=async_op)
        told.append(raised.value)

    for async_op in (False, True):
        thread = threading.Thread(target=call, args=(async_op,), name="reader")
        thread.start()
        thread.join(DEADLINE)
    inside.here.set()
    assert len(told) == 2
    for work in works:
        with pytest.raises(ArgumentError, match="thread 'reader'"):
            work.wait(DEADLINE)
    with pytest.raises(ArgumentError, match="the order of calls of this group was lost"):
        grid.barrier()
    grid._order.agree()
    grid.barrier()
    thread = threading.Thread(target=grid.barrier, name="another")
    thread.start()
    thread.join(DEADLINE)
    grid.barrier()
    grid.close()


def test_two_threads_that_make_the_first_calls_at_once_start_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would run ops at the same time as the first, and `close` would end one of them."""
    made: list[threading.Thread] = []
    meet = threading.Barrier(2)

    class Slow(threading.Thread):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            if self.name == "ftcomm-grid":
                made.append(self)
                with contextlib.suppress(threading.BrokenBarrierError):
                    meet.wait(1.0)  # until another one is made, too

    here = threading.Event()
    here.set()
    grid = Grid(SimpleNamespace(barrier=lambda: None, group=SimpleNamespace()), Inside(here=here), lambda: (0, 0))  # type: ignore[arg-type]
    monkeypatch.setattr(threading, "Thread", Slow)

    def call() -> None:
        with contextlib.suppress(ArgumentError):
            grid.barrier()

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE)
    grid.close()
    assert len(made) == 1
