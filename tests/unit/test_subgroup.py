"""A group of some replicas, as one of its members makes it while the views of its job change."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ftcomm.collective.watchdog import Stall
from ftcomm.control import handshake
from ftcomm.control.blame import CHANGE
from ftcomm.control.framing import receive_while
from ftcomm.control.sealed import Channel, Connection
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Addresses, Member, View
from ftcomm.errors import CollectiveTimeout, FtcommError
from ftcomm.groups import communicator, subgroup, subgroup_internals
from ftcomm.groups.subgroup import Subgroup
from ftcomm.groups.subgroup_internals import FRAMES, SubgroupInternals
from ftcomm.kernels.call_codes import UNKNOWN
from ftcomm.membership.derived import Left, TellCaller
from ftcomm.process import joining
from ftcomm.settings.tuning import BUILT_IN
from ftcomm.transport.group_connection import ASK
from ftcomm.transport.router import ConnectionRouter, Receiver
from tests.rigs.exchange import DEADLINE, socket_pair
from tests.rigs.rank_node import view
from tests.rigs.sealed_pair import ends
from tests.rigs.static_ranks import (
    mappings_of_segments,
    narrow,
    no_garbage_collection,
    returns_before_the_next,
    together,
)

pytestmark = pytest.mark.protocol


class Board(ConnectionRouter):
    """That of one rank, which others call by `ring`."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(serve=lambda purpose, handler: None))

    def ring(self, fields: handshake.Fields) -> socket.socket:
        near, far = socket.socketpair()
        self._incoming(far, fields)
        return near


class Moving(Board):
    """A view of a loss comes at the worst moment: after the maker has looked which is in force, before it is told."""

    def __init__(self, loss: View) -> None:
        super().__init__()
        self._loss = loss

    def open(self, name: str, taker: Receiver) -> None:
        self.job_entered(self._loss)
        super().open(name, taker)


class Job:
    """What a subgroup asks of the group of all."""

    shard = 0
    settings = SimpleNamespace(
        host="127.0.0.1",
        shard=0,
        ranks_per_replica=1,
        transport="shm",
        data="none",
        algorithm="auto",
        tuning=BUILT_IN,
        verify=False,
        timeouts=Timeouts.derive(60.0),
    )

    def __init__(self, replica: int, board: Board, first: View) -> None:
        self.replica, self.port, self.router = replica, 1 + replica, board
        self.roster = self.contributors = first.replicas
        board.job_entered(first)

    @property
    def internals(self) -> Job:
        return self

    boundary = 0

    def next_boundary(self) -> int:
        return self.boundary

    def may_call(self) -> None:
        pass

    def when(self) -> tuple[int, int]:
        return UNKNOWN, 0


def view_of(replicas: Iterable[int], epoch: int, step: int) -> View:
    """A view of replicas of one rank, which has the number of its replica for a port."""
    addresses = {r: Addresses.of((Address("h", r, "b", 2, 3, "0" * 32),)) for r in replicas}
    return View(epoch, step, tuple(Member(r, f"life-{r}", there, True) for r, there in addresses.items()))


def dialer(boards: list[Board]) -> Callable[[Address, str, handshake.Fields, float], socket.socket]:
    return lambda there, purpose, fields, timeout: boards[there.port].ring(fields)


def nothing(*said: Any) -> None:
    pass


def make(
    job: Any,
    dial: Callable[..., Connection],
    on_stall: Callable[..., None] = nothing,
    replicas: tuple[int, ...] = (0, 1),
) -> Subgroup:
    inside = SubgroupInternals(
        *(job, "g", replicas),
        dial=dial,
        on_stall=on_stall,
        on_lost=nothing,
        on_failed=nothing,
        on_divergence=nothing,
    )
    return Subgroup(inside, nothing)


def spied(group: Subgroup) -> threading.Event:
    """Set when somebody has called it."""
    called, take = threading.Event(), group.internals.take
    group.internals.take = lambda call: (take(call), called.set())[0]  # type: ignore[func-returns-value, method-assign]
    return called


def test_a_loss_that_comes_just_when_a_group_is_made_is_heard_of() -> None:
    def dial(*call: Any) -> socket.socket:
        raise ConnectionError("replica 1 is dead")

    first = view(1, (0, 1))
    alone = View(2, None, first.members[:1])
    made = make(Job(0, Moving(alone), first), dial)
    try:
        made.internals.begin(20.0)
    finally:
        made.close()


def test_the_memory_of_a_group_is_gone_when_it_is_closed_and_dropped() -> None:
    """Also where nobody collects garbage for long."""

    def use() -> None:
        boards = [Board(), Board()]
        dial = dialer(boards)
        first = view_of((0, 1), 1, 0)

        groups = [make(Job(replica, board, first), dial) for replica, board in enumerate(boards)]
        together(lambda i: groups[i].internals.begin(30.0), 2)
        assert together(lambda i: float(groups[i].allreduce(np.ones(3))[0]), 2) == [2.0, 2.0]
        together(lambda i: groups[i].close(), 2)

    with no_garbage_collection():
        before = mappings_of_segments()
        use()
        end = time.monotonic() + DEADLINE
        while mappings_of_segments() > before:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize("data", ["none", "mac", "aes-gcm"])
def test_no_op_waits_behind_the_next(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch)
    first = view_of((0, 1), 1, 0)
    boards = [Board(), Board()]

    def dial(there: Address, purpose: str, fields: handshake.Fields, timeout: float) -> Channel:
        server, client = ends(*socket_pair())
        boards[there.port]._incoming(server, fields)
        return client

    class Remote(Job):
        settings = SimpleNamespace(**{**vars(Job.settings), "transport": "tcp", "data": data})

    groups = [make(Remote(replica, board, first), dial) for replica, board in enumerate(boards)]
    try:
        together(lambda i: groups[i].internals.begin(DEADLINE), 2)
        returns_before_the_next(*groups)
    finally:
        together(lambda i: groups[i].close(), 2)


@pytest.mark.parametrize("changes", [False, True])
def test_who_makes_a_group_again_takes_nothing_from_the_one_before_of_its_name(changes: bool) -> None:
    """A member has its result, closes the group and makes the next one, before the other one has closed the first. If
    the view changes then, that one asks for accounts, too, must not be taken for the other's next group, and goes on
    without the one that has closed it."""
    first = view_of((0, 1), 1, 0)
    boards = [Board(), Board()]
    dial = dialer(boards)
    jobs = [Job(replica, board, first) for replica, board in enumerate(boards)]

    def both(*calls: Callable[[], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return [done.result(60.0) for done in [pool.submit(call) for call in calls]]

    def reduce(group: Subgroup, value: float) -> float:
        return float(group.allreduce(np.full(3, value))[0])

    groups = [make(job, dial) for job in jobs]
    both(*(functools.partial(group.internals.begin, 30.0) for group in groups))
    assert both(*(functools.partial(reduce, group, 1.0) for group in groups)) == [2.0, 2.0]
    slow = groups[1]
    groups[0].close()
    groups[0] = make(jobs[0], dial)
    asked = spied(slow)

    def quick() -> float:
        groups[0].internals.begin(30.0)
        return reduce(groups[0], 10.0)

    def late() -> float:
        asked.wait(30.0)
        if changes:
            second = View(2, None, first.members)
            for board in boards:
                board.job_entered(second)
            slow.internals.follow(second, 30.0)
            with pytest.raises(FtcommError, match="has closed the group after 1 ops; close it here, too"):
                reduce(slow, 1.0)
        slow.close()
        groups[1] = make(jobs[1], dial)
        groups[1].internals.begin(30.0)
        return reduce(groups[1], 20.0)

    try:
        assert both(quick, late) == [30.0, 30.0]
    finally:
        for group in groups:
            group.close()


def test_a_late_question_from_a_group_that_was_closed_is_not_taken_for_one_from_the_next() -> None:
    """A member was stopped while it asked, before it knew the segment that it asks. The other one has its answer, has
    gone on without hearing more of it, has closed the group, and makes the next one."""
    first = view_of((0, 1), 1, 0)
    boards = [Board(), Board()]
    dial = dialer(boards)
    jobs = [Job(replica, board, first) for replica, board in enumerate(boards)]
    groups = [make(job, dial) for job in jobs]
    together(lambda i: groups[i].internals.begin(30.0), 2)
    slow = groups[1]
    question = slow.internals._communicator.fields(ASK, "life-1", 1)
    groups[0].close()
    groups[0] = make(jobs[0], dial)
    boards[0].open("g", groups[0].internals)
    try:
        with boards[0].ring(question) as late:
            end = time.monotonic() + DEADLINE
            assert FRAMES.read(receive_while(late, lambda: time.monotonic() < end)) == Left(0, 0)
        boards[0].forget("g", groups[0].internals)
        slow.close()
        groups[1] = make(jobs[1], dial)
        together(lambda i: groups[i].internals.begin(30.0), 2)
        assert together(lambda i: float(groups[i].allreduce(np.ones(3))[0]), 2) == [2.0, 2.0]
    finally:
        together(lambda i: groups[i].close(), 2)


def test_a_joiner_that_closes_a_group_before_it_was_in_it_is_not_met_in_its_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others still have the first group, and are about to ask the joiner; then all close it, and make the next."""
    monkeypatch.setattr(subgroup_internals, "PARTING", DEADLINE)
    second = view_of((0, 1), 2, 1)
    boards = [Board(), Board()]
    dial = dialer(boards)
    jobs = [Job(replica, board, View(1, 0, second.members[:1])) for replica, board in enumerate(boards)]
    boards[1] = jobs[1].router = Board()
    groups = [make(job, dial) for job in jobs]
    for group in groups:
        group.internals.begin(30.0)
    made = threading.Event()

    def renew(i: int) -> float:
        if i == 0:
            made.wait(0.5)  # without the rule it is set at once, with it not before this member asks
            boards[0].job_entered(second)
            groups[0].internals.follow(second, 30.0)
        else:
            boards[1].job_entered(second)
        groups[i].close()
        groups[i] = make(jobs[i], dial)
        if i == 1:
            boards[1].open("g", groups[1].internals)
            made.set()
            boards[1].forget("g", groups[1].internals)
        groups[i].internals.begin(30.0)
        return float(groups[i].allreduce(np.ones(3))[0])

    try:
        assert together(renew, 2) == [2.0, 2.0]
    finally:
        together(lambda i: groups[i].close(), 2)


def test_a_joiner_that_could_not_wait_longer_with_closing_is_not_met_in_its_next_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have been stopped for so long. They still have the first group, in which they have done an op, and ask
    the joiner, which knows none of their segments: that they made their group before it came tells it."""
    monkeypatch.setattr(subgroup_internals, "PARTING", 0.0)
    second = view_of((0, 1), 2, 1)
    boards = [Board(), Board()]
    dial = dialer(boards)
    jobs = [Job(replica, board, View(1, 0, second.members[:1])) for replica, board in enumerate(boards)]
    boards[1] = jobs[1].router = Board()  # it has come to a running job, and is in no view yet
    groups = [make(job, dial) for job in jobs]
    for group in groups:
        group.internals.begin(30.0)
    assert float(groups[0].allreduce(np.ones(3))[0]) == 1.0
    jobs[1].boundary = 1
    boards[1].job_entered(second)
    jobs[1].boundary = 2  # boundary 1 has been passed
    groups[1].close()
    groups[1] = make(jobs[1], dial)

    def renew(i: int) -> float:
        if i == 0:
            boards[0].job_entered(second)
            groups[0].internals.follow(second, 30.0)
            jobs[0].boundary = 2
            assert groups[0].error is None
            groups[0].close()
            groups[0] = make(jobs[0], dial)
        groups[i].internals.begin(30.0)
        return float(groups[i].allreduce(np.ones(3))[0])

    try:
        assert together(renew, 2) == [2.0, 2.0]
    finally:
        together(lambda i: groups[i].close(), 2)


class ShortTimeouts(Job):
    """An op is a stall soon."""

    settings = SimpleNamespace(**{**vars(Job.settings), "timeouts": Timeouts.derive(4.0, 0.4, 0.5)})


@contextlib.contextmanager
def members(count: int) -> Iterator[tuple[list[Subgroup], list[Stall], Callable[[View], None]]]:
    """All members of a group that have done one op, the stalls that they report, and a way to enter a view."""
    all_ = tuple(range(count))
    first = view_of(all_, 1, 0)
    boards, stalls = [Board() for _ in all_], list[Stall]()

    def enter(view: View) -> None:
        for board in boards:
            board.job_entered(view)

    groups = [
        make(ShortTimeouts(replica, board, first), dialer(boards), stalls.append, all_)
        for replica, board in enumerate(boards)
    ]
    try:
        together(lambda i: groups[i].internals.begin(30.0), count)
        assert together(lambda i: float(groups[i].allreduce(np.ones(3))[0]), count) == [count] * count
        yield groups, stalls, enter
    finally:
        together(lambda i: groups[i].close(), count)


def test_who_has_closed_the_group_is_asked_when_an_op_waits_for_it() -> None:
    """No view changes, so nobody has heard of it."""
    with members(2) as (groups, _, _):
        groups[0].close()
        with pytest.raises(FtcommError, match="replica 0 has closed the group after 1 ops; close it here, too"):
            groups[1].allreduce(np.ones(3))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("async_op", [False, True])
def test_an_op_that_begins_just_when_it_is_heard_that_a_member_has_closed_the_group_fails(
    count: int, async_op: bool
) -> None:
    """Else the last member would do it alone, and take its own array for the sum; and of three one would accuse the
    other, which has heard it, too, and does not begin the op."""
    with members(count) as (groups, stalls, enter):
        late, may = groups[1], groups[1]._may_call

        def may_call() -> None:
            may()
            groups[0].close()
            view = late.internals._membership.view
            assert view is not None
            second = View(2, None, view.members)
            enter(second)
            for group in groups[1:]:
                group.internals.follow(second, 30.0)

        late._may_call = may_call  # type: ignore[method-assign]
        with pytest.raises(FtcommError, match="has closed the group after 1 ops; close it here, too"):
            late.allreduce(np.ones(3), async_op=async_op)
        late._may_call = may  # type: ignore[method-assign]
        with pytest.raises(FtcommError, match="has closed the group after 1 ops; close it here, too"):
            late.allreduce(np.ones(3))
        assert late.error is not None
        assert not [stall for stall in stalls if stall.op != CHANGE]


def test_groups_that_are_closed_together_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other member never enters the view, so each would wait out its time, one after the other."""
    monkeypatch.setattr(subgroup_internals, "PARTING", 0.1)
    monkeypatch.setattr(subgroup, "PARTING", 0.1)
    close, given = Subgroup._close, list[Any]()

    def closing(group: Subgroup, until: float | None) -> None:
        given.append(until)
        monkeypatch.setattr(subgroup_internals, "PARTING", 1e6)  # for none of them from now on
        close(group, until)

    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(members(2))[0][0] for _ in range(3)]
        for group in made:
            monkeypatch.setattr(group.internals._membership, "is_needed", lambda: True)
        with monkeypatch.context() as patch:
            patch.setattr(Subgroup, "_close", closing)
            subgroup.close_all(made)
    assert len(given) == 3
    assert len(set(given)) == 1


def test_a_joiner_goes_on_without_a_group_that_the_others_have_closed() -> None:
    """It makes its groups as in its first life. The first call says what is the matter, if they never make it again."""
    first = view_of((0, 1), 1, 0)
    boards = [Board(), Board()]
    dial = dialer(boards)
    jobs = [ShortTimeouts(replica, board, first) for replica, board in enumerate(boards)]
    groups = [make(job, dial) for job in jobs]
    together(lambda i: groups[i].internals.begin(30.0), 2)
    together(lambda i: groups[i].close(), 2)
    boards[1] = jobs[1].router = Board()
    back = make(jobs[1], dial)
    back.internals.begin(30.0)
    second = View(2, 1, (first.members[0], Member(1, "life-11", first.members[1].ranks, False)))
    try:
        for board in boards:
            board.job_entered(second)
        back.internals.follow(second, 0.0)
        with pytest.raises(CollectiveTimeout, match="replica 1 has waited 8 s for replicas 0, until they"):
            back.allreduce(np.ones(3))
        groups[0] = make(jobs[0], dial)
        together(lambda i: groups[0].internals.begin(30.0) if i == 0 else back._may_call(), 2)
        assert together(lambda i: float((groups[0], back)[i].allreduce(np.ones(3))[0]), 2) == [1.0, 1.0]
    finally:
        for group in (*groups, back):
            group.close()


def test_an_op_that_a_member_has_taken_that_leaves_returns_on_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has returned it; the one that leaves, and one that stays, do not know yet that all have taken it."""
    monkeypatch.setattr(communicator, "END_NOTICED", 0.1)
    with members(3) as (groups, _, _):
        leaves, _, late = groups
        knows = threading.Event()
        for group in (leaves, late):
            stream = group._exchange.core.stream
            assert stream is not None
            stable = stream.stable
            stream.stable = lambda op, stable=stable: knows.is_set() and stable(op)  # type: ignore[method-assign]
        works = [group.allreduce(np.ones(3), async_op=True) for group in groups]
        assert float(works[1].wait()[0]) == 3.0
        leaves.close()
        assert leaves._exchange.returned < leaves._exchange.taken == 2
        next_ones = [group.allreduce(np.ones(3), async_op=True) for group in groups[1:]]
        until = time.monotonic() + DEADLINE
        while late.internals._membership.last > 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        knows.set()
        assert float(works[2].wait()[0]) == 3.0
        for work in next_ones:
            with pytest.raises(FtcommError, match="closed the group after 2 ops; close it here, too"):
                work.wait()


def test_an_op_that_a_member_had_returned_that_has_left_does_not_fail_with_the_next_one() -> None:
    """It is FINAL here, and this member does not know yet that all have it. The next one nobody can do any more."""
    with members(2) as (groups, _, _):
        left, late = groups
        late._exchange.core.stream.stable = lambda op: False  # type: ignore[method-assign, union-attr]
        first = late.allreduce(np.ones(3), async_op=True)
        assert float(left.allreduce(np.ones(3))[0]) == 2.0
        second = late.allreduce(np.ones(3), async_op=True)
        left.close()
        with pytest.raises(FtcommError, match="replica 0 has closed the group after 2 ops; close it here, too"):
            second.wait()
        assert float(first.wait()[0]) == 2.0


class Stuck:
    """A connection that takes no answer before `goes_on`."""

    def __init__(self) -> None:
        self.goes_on, self.here = threading.Event(), threading.Event()

    def __enter__(self) -> Stuck:
        self.here.set()
        self.goes_on.wait(DEADLINE)
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is closed."""


def test_a_thread_that_does_not_end_delays_a_close_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LIMIT", 0.01)
    with members(2) as (groups, _, _):
        group, stuck = groups[0], Stuck()
        answer: Any = TellCaller(SimpleNamespace(sock=stuck), None)  # type: ignore[arg-type]
        group.internals._events.put(lambda: [answer])
        assert stuck.here.wait(DEADLINE)
        with monkeypatch.context() as patch:
            forget = lambda: pytest.fail("its thread still works with that")  # noqa: E731
            patch.setattr(group.internals._communicator, "forget", forget)
            group.close()
        stuck.goes_on.set()
        group.internals._thread.join(DEADLINE)
