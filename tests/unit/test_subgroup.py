"""A group of some replicas, as one of its members makes it while the views of its job change."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ftcomm.collective.operation import UNKNOWN
from ftcomm.control import wire
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Member, View
from ftcomm.router import ConnectionRouter, Receiver
from ftcomm.subgroup import Subgroup
from ftcomm.tuning import BUILT_IN
from tests.exchange_rig import DEADLINE
from tests.fixed_rig import mappings_of_segments, no_garbage_collection, together
from tests.unit.test_node import view

pytestmark = pytest.mark.protocol


class Board(ConnectionRouter):
    """That of one rank, which others call by `ring`."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(serve=lambda purpose, handler: None))

    def ring(self, fields: wire.Fields) -> socket.socket:
        near, far = socket.socketpair()
        self._incoming(far, fields)
        return near


class Moving(Board):
    """A view of a loss comes at the worst moment: after the maker has looked which is in force, before it is told."""

    def __init__(self, loss: View) -> None:
        super().__init__()
        self._loss = loss

    def open(self, name: str, taker: Receiver) -> None:
        self.entered(self._loss)
        super().open(name, taker)


class Job:
    """What a subgroup asks of the group of all."""

    shard = 0
    _on_step_error = None
    settings = SimpleNamespace(
        host="127.0.0.1",
        shard=0,
        ranks_per_replica=1,
        transport="shm",
        data="none",
        algorithm="auto",
        tuning=BUILT_IN,
        timeouts=Timeouts.derive(60.0),
    )

    def __init__(self, replica: int, board: Board, first: View) -> None:
        self.replica, self._port, self._router = replica, 1 + replica, board
        self.roster = self.contributors = first.replicas
        board.entered(first)

    def _may_call(self) -> None:
        pass

    def _when(self) -> tuple[int, int]:
        return UNKNOWN, 0

    def _left(self, subgroup: Subgroup) -> None:
        pass


def make(job: Any, dial: Callable[..., socket.socket]) -> Subgroup:
    def nothing(*said: Any) -> None:
        pass

    return Subgroup(
        job,
        "g",
        (0, 1),
        dial=dial,
        on_stall=nothing,
        on_failed=nothing,
        on_divergence=None,
    )


def spied(group: Subgroup) -> threading.Event:
    """Set when somebody has called it."""
    called, take = threading.Event(), group.take
    group.take = lambda call: (take(call), called.set())[0]  # type: ignore[func-returns-value, method-assign]
    return called


def test_a_loss_that_comes_just_when_a_group_is_made_is_heard_of() -> None:
    def dial(*call: Any) -> socket.socket:
        raise ConnectionError("replica 1 is dead")

    first = view(1, (0, 1))
    alone = View(2, None, first.members[:1])
    made = make(Job(0, Moving(alone), first), dial)
    try:
        made.begin(20.0)
    finally:
        made.close()


def test_the_memory_of_a_group_is_gone_when_it_is_closed_and_dropped() -> None:
    """Also where nobody collects garbage for long."""

    def use() -> None:
        boards = [Board(), Board()]
        first = View(1, 0, tuple(Member(r, f"life-{r}", (Address("h", r, "b", 2, 3, "0" * 32),), True) for r in (0, 1)))

        def dial(there: Address, purpose: str, fields: wire.Fields, timeout: float) -> socket.socket:
            return boards[there.port].ring(fields)

        groups = [make(Job(replica, board, first), dial) for replica, board in enumerate(boards)]
        together(lambda i: groups[i].begin(30.0), 2)
        assert together(lambda i: float(groups[i].allreduce(np.ones(3))[0]), 2) == [2.0, 2.0]
        together(lambda i: groups[i].close(), 2)

    with no_garbage_collection():
        before = mappings_of_segments()
        use()
        end = time.monotonic() + DEADLINE
        while mappings_of_segments() > before:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize("changes", [False, True])
def test_who_makes_a_group_again_takes_nothing_from_the_one_before_of_its_name(changes: bool) -> None:
    """A member has its result, closes the group and makes the next one, before the other one has closed the first. If
    the view changes then, that one asks for accounts, too, and must not be taken for the other's next group."""
    first = View(1, 0, tuple(Member(r, f"life-{r}", (Address("h", r, "b", 2, 3, "0" * 32),), True) for r in (0, 1)))
    boards = [Board(), Board()]

    def dial(there: Address, purpose: str, fields: wire.Fields, timeout: float) -> socket.socket:
        return boards[there.port].ring(fields)

    jobs = [Job(replica, board, first) for replica, board in enumerate(boards)]

    def both(*calls: Callable[[], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return [done.result(60.0) for done in [pool.submit(call) for call in calls]]

    def reduce(group: Subgroup, value: float) -> float:
        return float(group.allreduce(np.full(3, value))[0])

    groups = [make(job, dial) for job in jobs]
    both(*(functools.partial(group.begin, 30.0) for group in groups))
    assert both(*(functools.partial(reduce, group, 1.0) for group in groups)) == [2.0, 2.0]
    slow = groups[1]
    groups[0].close()
    groups[0] = make(jobs[0], dial)
    asked, asked_back = spied(slow), spied(groups[0])

    def quick() -> float:
        groups[0].begin(30.0)
        return reduce(groups[0], 10.0)

    def late() -> float:
        asked.wait(30.0)
        if changes:
            for board in boards:
                board.entered(View(2, None, first.members))
            asked_back.wait(30.0)
        slow.close()
        groups[1] = make(jobs[1], dial)
        groups[1].begin(30.0)
        return reduce(groups[1], 20.0)

    try:
        assert both(quick, late) == [30.0, 30.0]
    finally:
        for group in groups:
            group.close()
