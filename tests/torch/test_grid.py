"""The order of calls on the world of a job whose replicas have several ranks."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcomm.errors import ArgumentError
from ftcomm.torch.grid import Grid
from tests.rigs.exchange import DEADLINE

SUBGROUP = SimpleNamespace(internals=SimpleNamespace())


class Inside(SimpleNamespace):
    """The ranks of a replica, of which this is the only one that has come to the barrier, until `here` is set."""

    roster, rank = (0, 1), 0

    def barrier(self) -> None:
        assert self.here.wait(DEADLINE)


def test_two_threads_that_call_at_once_are_told_so() -> None:
    inside = Inside(here=threading.Event())
    grid = Grid(SimpleNamespace(barrier=lambda: None, group=SUBGROUP), inside, lambda: (0, 0))  # type: ignore[arg-type]
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


def test_messages_go_along_a_row_or_a_column_and_any_other_is_refused() -> None:
    """Rank 0 of 2 x 2, whose neighbour in a ring over the world is rank 3: it shares neither the replica nor the
    place."""
    sent: list[tuple[str, int, int]] = []

    def group(name: str, roster: tuple[int, ...]) -> Any:
        send = lambda x, rank, tag, async_op: sent.append((name, rank, tag))  # noqa: E731
        return SimpleNamespace(roster=roster, rank=0, send=send, recv=send, group=SUBGROUP)

    grid = Grid(group("across", (0, 1)), group("inside", (0, 1)), lambda: (0, 0))
    x = torch.ones(1)
    grid.send(x, 1, 5, async_op=True)
    grid.recv(x, 2, 6)
    for call in (grid.send, grid.recv):
        with pytest.raises(ArgumentError, match=r"rank 0 and rank 3 share neither .* make a group of both"):
            call(x, 3, async_op=True)
    with pytest.raises(ArgumentError, match="recv from any rank"):
        grid.recv(x)
    assert sent == [("inside", 1, 5), ("across", 1, 6)]


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
    grid = Grid(SimpleNamespace(barrier=lambda: None, group=SUBGROUP), Inside(here=here), lambda: (0, 0))  # type: ignore[arg-type]
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
