"""An exchange that waits, with real threads: for members, for a view, for a thread; and how it fails and is stopped."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

import ftcomm.collective.watchdog
from ftcomm.collective.driver import Driver
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import ProtocolError
from ftcomm.collective.watchdog import Stall
from ftcomm.control.messages import FailedOp, Progress
from ftcomm.errors import CollectiveTimeout, FtcommError, MismatchError
from ftcomm.kernels.epochs import COUNTS
from ftcomm.transport.segment import POSTED
from tests.rigs.exchange import DEADLINE, Caller, Member, Rig, deadlines
from tests.rigs.exchange_calls import _switch_often, ones  # noqa: F401


def test_who_waits_for_whom_can_be_asked_at_any_time() -> None:
    with Rig(range(3)) as rig:
        rig.view(range(3))
        assert rig.members[0].exchange.waiting(0) is None
        ops = {m: Operation(np.ones(4), "float64", "sum") for m in (0, 2)}
        callers = [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]
        deadline = time.monotonic() + DEADLINE
        for m in ops:
            while rig.members[m].exchange.waiting(0.02) != Stall(1, 0, (1,)) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert rig.members[m].exchange.waiting(0.02) == Stall(1, 0, (1,))
            assert rig.members[m].exchange.waiting(DEADLINE) is None
        assert rig.members[1].exchange.waiting(0) is None
        rig.members[1].exchange.run(Operation(np.ones(4), "float64", "sum"))
        for caller in callers:
            caller.join()
        assert [rig.members[m].exchange.waiting(0) for m in rig.members] == [None] * 3


def stopped_clock(*members: Member) -> list[float]:
    """The one by which they time their waits; it stands still until the test puts it forward."""
    now = [0.0]
    for member in members:
        member.exchange.member.watch.clock = lambda: now[0]
    return now


def test_a_stall_names_the_members_that_are_missing_and_ends() -> None:
    with Rig(range(3), op_timeout=0.1) as rig:
        now = stopped_clock(*rig.members.values())
        rig.view(range(3))
        ops = {m: Operation(np.ones(4), "float64", "sum") for m in (0, 2)}
        for m, op in ops.items():
            rig.members[m].exchange.submit(op)
        end = time.monotonic() + DEADLINE
        while any(rig.members[m].exchange.waiting(0) != Stall(1, 0, (1,)) for m in ops):
            assert time.monotonic() < end  # each has to see first that the other has come
            time.sleep(0.001)
        now[0] = 0.15
        while not all(rig.members[m].stalls for m in ops):
            assert time.monotonic() < end
            time.sleep(0.001)
        now[0] = 0.25
        for m, op in ops.items():
            assert op.wait(DEADLINE)
            assert isinstance(op.error, CollectiveTimeout)
            assert "replicas 1" in str(op.error)
            assert [(s.epoch, s.op, s.waiting_on) for s in rig.members[m].stalls] == [(1, 0, (1,))]
            later = Operation(np.ones(4), "float64", "sum")
            rig.members[m].exchange.run(later)
            assert later.error is op.error


def test_who_finds_no_free_slot_waits_for_those_who_read_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts: one has reduced for all, and takes nothing."""
    with Rig(range(3), "tcp") as rig:
        rig.view(range(3))
        monkeypatch.setattr(rig.members[2].exchange.core.stream.pipeline, "to_take", lambda: None)
        for member in rig.members.values():
            member.exchange.submit(Operation(np.ones(3_000_000), "float64", "sum"))
        end = time.monotonic() + DEADLINE
        for m in (0, 1):
            while (stall := rig.members[m].exchange.waiting(0.02)) != Stall(1, 0, (2,)):
                assert time.monotonic() < end, stall
                time.sleep(0.001)


@pytest.mark.parametrize("how", ["shm", "tcp"])
def test_who_was_not_in_the_view_in_which_an_op_failed_hears_of_it_in_the_next(how: str) -> None:
    """One member has seen that calls differ. Of two that go on with it, one enters the view and returns the error, if
    it can; then the first is lost, too, before the other knows."""
    with Rig(range(4), how) as rig:
        rig.view(range(4))
        ops = {m: ones(8) for m in (1, 2)}
        for m, op in ops.items():
            rig.members[m].exchange.submit(op)
        told = {}
        for m in (0, 1, 2):
            still = threading.Event()
            rig.members[m].exchange.freeze(still.set)
            assert still.wait(DEADLINE)
            told[m] = rig.members[m].exchange.progress()
        told[0] = msgspec.structs.replace(told[0], failed=(FailedOp(0, "they differ"),))
        rig.epoch += 1
        view = GroupView(rig.epoch, 1, (0, 1, 2), frozenset((0, 1, 2)), how == "shm")
        rig.members[1].exchange.enter(view, rig.peers(1, (0, 1, 2)), told)
        assert ops[1].wait(DEADLINE if how == "tcp" else 0.05) == (how == "tcp")
        rig.view((1, 2))
        for op in ops.values():
            assert op.wait(DEADLINE)
            assert isinstance(op.error, MismatchError), op.error
        again = [ones(8), ones(8)]
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in zip((1, 2), again, strict=True)]:
            caller.join()
        assert [op.error for op in again] == [None, None]


def test_failing_ends_ops_in_flight_and_later_ones() -> None:
    with Rig(range(2)) as rig:
        rig.view(range(2))
        exchange = rig.members[0].exchange
        waiting = [Operation(np.ones(4), "float64", "sum") for _ in range(3)]
        caller = Caller.start(exchange.run, waiting[0])
        while waiting[0].number < 0:
            caller.thread.join(0.001)
        for op in waiting[1:]:
            exchange.submit(op)
        error = RuntimeError("removed")
        exchange.fail(error)
        caller.join()
        late = Operation(np.ones(4), "float64", "sum")
        exchange.run(late)
        assert [op.error for op in (*waiting, late)] == [error] * 4


def test_a_frozen_group_goes_on_when_it_enters_a_view() -> None:
    with Rig(range(2)) as rig:
        ops = {m: Operation(np.ones(4), "float64", "sum") for m in (0, 1)}
        callers = [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]
        rig.view(range(2))
        rig.view(range(2))
        for caller in callers:
            caller.join()
        assert ops[0].array.tolist() == ops[1].array.tolist() == [2.0] * 4


def test_the_time_to_wait_for_a_view_begins_anew_with_each_freeze() -> None:
    """Also if the first one's ops were returned by `enter`, so that the driver has not looked around since."""
    with Rig(range(2)) as rig:
        rig.view(range(2))
        exchange = rig.members[0].exchange
        exchange.submit(Operation(np.ones(4), "float64", "sum"))
        quiesced = threading.Event()
        exchange.freeze(quiesced.set)
        while not quiesced.wait(0.001):
            exchange.wake()
        driver = exchange.driver
        assert driver.deadline is not None
        with driver.mutex:
            driver.entered(None)
            assert driver.deadline is None


def test_freezing_calls_back_once_each_time_even_when_repeated() -> None:
    with Rig(range(2)) as rig:
        rig.view(range(2))
        exchange = rig.members[0].exchange
        exchange.submit(Operation(np.ones(4), "float64", "sum"))
        events = [threading.Event() for _ in range(3)]
        for event in events:
            exchange.freeze(event.set)
        while not all(event.wait(0.001) for event in events):
            exchange.wake()
        assert exchange.progress().returned == 0
        assert len(exchange.progress().ops) == 1


def test_a_member_without_an_op_takes_in_what_has_come() -> None:
    with Rig(range(2), "tcp") as rig:
        rig.view(range(2))
        ops = [Operation(np.ones(4), "float64", "sum") for _ in range(2)]
        rig.members[0].exchange.submit(ops[0])
        idle = rig.members[1].exchange
        deadline = time.monotonic() + DEADLINE
        while not idle.member.peers[0].words[POSTED] & (COUNTS - 1):
            assert time.monotonic() < deadline, "nobody reads what member 0 has posted"
            idle.wake()
        idle.run(ops[1])
        assert ops[1].array.tolist() == [2.0] * 4


def hear(member: Member, op_timeout: float = DEADLINE, **callbacks: Any) -> list[BaseException]:
    """Give the member an exchange that reports its own failures here. The callback would deadlock under the mutex."""
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        member.exchange.fail(RuntimeError("hung up"))

    stalls = {"on_stall": member.stalls.append}
    member.exchange = Exchange(
        member.replica, member.segment, **deadlines(op_timeout), on_failed=failed, **{**stalls, **callbacks}
    )
    return failures


def test_a_stall_is_reported_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ftcomm.collective.watchdog, "REPORT", 0.05)
    with Rig(range(2), op_timeout=0.5) as rig:
        ticks = itertools.count()  # hundredths of a second, one a look, however long it takes
        rig.members[0].exchange.member.watch.clock = lambda: next(ticks) / 100
        rig.view(range(2))
        op = ones()
        rig.members[0].exchange.run(op)
        assert isinstance(op.error, CollectiveTimeout)
        assert next(ticks) >= 100
        assert 9 <= len(rig.members[0].stalls) <= 11
        assert {stall[:3] for stall in rig.members[0].stalls} == {(1, 0, (1,))}


def test_an_engine_that_fails_says_so_once() -> None:
    with Rig(range(2)) as rig:
        failures = hear(rig.members[0], op_timeout=0.05)
        rig.view(range(2))
        ops = [ones(), ones()]
        rig.members[0].exchange.submit(ops[1])
        rig.members[0].exchange.run(ops[0])
        assert ops[1].wait(DEADLINE)
        assert [op.error for op in ops] == failures * 2
        assert isinstance(failures[0], CollectiveTimeout)


def test_an_engine_that_gets_no_view_says_so_once() -> None:
    with Rig(range(1)) as rig:
        failures = hear(rig.members[0], op_timeout=0.05)
        op = ones()
        rig.members[0].exchange.run(op)
        assert [op.error] == failures
        assert "no view was agreed upon" in str(op.error)


@pytest.mark.parametrize(
    ("why", "in_flight"), [("contradiction", True), ("nobody contributes", True), ("nobody contributes", False)]
)
def test_a_view_that_cannot_be_entered_ends_the_engine_which_says_so_once(why: str, in_flight: bool) -> None:
    with Rig(range(2)) as rig:
        failures = hear(rig.members[0])
        rig.view(range(2))
        exchange = rig.members[0].exchange
        op = ones()
        if in_flight:
            exchange.submit(op)
        quiesced = threading.Event()
        exchange.freeze(quiesced.set)
        while not quiesced.wait(0.001):
            exchange.wake()
        progress = {0: exchange.progress(), 1: Progress(returned=int(why == "contradiction"), ops=())}
        contributing = frozenset({0, 1} if why == "contradiction" else ())
        exchange.enter(GroupView(2, 0, (0, 1), contributing, one_host=True), rig.peers(0, (0, 1)), progress)
        late = ones()
        exchange.run(late)
        assert [late.error] == failures
        assert isinstance(late.error, ProtocolError if why == "contradiction" else FtcommError)
        if in_flight:
            assert op.wait(DEADLINE)
            assert op.error is late.error


def test_an_engine_whose_driver_is_interrupted_says_so_once() -> None:
    def interrupt(stall: object) -> None:
        raise KeyboardInterrupt

    with Rig(range(2)) as rig:
        failures = hear(rig.members[0], op_timeout=0.05, on_stall=interrupt)
        rig.view(range(2))
        op = ones()
        with pytest.raises(KeyboardInterrupt):
            rig.members[0].exchange.run(op)
        assert [op.error] == failures
        assert "KeyboardInterrupt" in str(op.error)


def test_an_engine_that_is_made_to_fail_does_not_say_so() -> None:
    with Rig(range(2)) as rig:
        failures = hear(rig.members[0])
        rig.view(range(2))
        op = ones()
        rig.members[0].exchange.submit(op)
        rig.members[0].exchange.fail(RuntimeError("removed"))
        assert op.wait(DEADLINE)
        assert str(op.error) == "removed"
    assert not failures


def test_an_interrupt_at_any_line_leaves_no_engine_that_waits_for_a_driver() -> None:
    """It goes on, or it has failed and says so."""
    names = {"submit", "run", "admit", "kick", "drive", "begin", "go", "leave"}
    where = {sys.modules[of.__module__].__file__ for of in (Exchange, Driver)}

    def stopped_at(line: int, how: str) -> bool:
        """Call, with an interrupt at the n-th line; False when there are fewer."""
        left = line
        with Rig(range(1)) as rig:
            failures = hear(rig.members[0])
            rig.view((0,))
            exchange = rig.members[0].exchange

            def trace(frame: FrameType, event: str, arg: object) -> Any:
                nonlocal left
                if frame.f_code.co_filename not in where or frame.f_code.co_name not in names:
                    return None
                # On the way out of a `with` a tracer is called where no interrupt is looked for.
                if event == "line" and not exchange._mutex.locked():
                    left -= 1
                    if left == 0:
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return trace

            first, interrupted = ones(), False

            def call() -> None:
                nonlocal interrupted
                sys.settrace(trace)
                try:
                    getattr(exchange, how)(first)
                except KeyboardInterrupt:
                    interrupted = True
                finally:
                    sys.settrace(None)

            Caller.start(call).join()
            later = ones()
            Caller.start(exchange.run, later).join()
            assert later.done
            assert [later.error] == (failures or [None])
            return interrupted

    for how in ("run", "submit"):
        line = 1
        while stopped_at(line, how):
            line += 1
        assert line > 4


@contextlib.contextmanager
def short_of_threads() -> Iterator[None]:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("ftcomm-exchange"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def test_an_op_in_the_background_runs_where_it_is_called_if_no_thread_can_be_had() -> None:
    with Rig(range(2)) as rig:
        failures = [hear(rig.members[m]) for m in range(2)]
        rig.view(range(2))
        exchanges = [rig.members[m].exchange for m in range(2)]
        for short in (True, False):
            with short_of_threads() if short else contextlib.nullcontext():
                ops = [ones(), ones()]
                callers = [Caller.start(exchange.submit, op) for exchange, op in zip(exchanges, ops, strict=True)]
                for caller in callers:
                    caller.join()
            for exchange, op in zip(exchanges, ops, strict=True):
                assert op.done or not short
                exchange.wait(op)
                assert (op.error, op.array.tolist()) == (None, [2.0] * 4)
        assert failures == [[], []]


@pytest.mark.parametrize("soon", [True, False])
def test_who_has_no_thread_for_an_op_while_another_group_waits_for_it_does_not_stand_for_ever(soon: bool) -> None:
    """Member 0 calls in the background in one group and then in the other, member 1 in the other one first. Soon there
    is a thread again; or there is none, and member 0 gives itself up."""
    with Rig(range(2)) as one, Rig(range(2)) as background:
        failures = hear(background.members[0], DEADLINE if soon else 1.0)
        for rig in (one, background):
            rig.view(range(2))
        first, second = ([rig.members[m].exchange for m in range(2)] for rig in (background, one))
        ops = [ones() for _ in range(4)]

        def calls() -> None:
            first[0].submit(ops[0])
            second[0].run(ops[1])

        with short_of_threads():
            caller = Caller.start(calls)
            other = Caller.start(second[1].run, ops[2])
            while not (ops[0].number == 0 and ops[2].number == 0):
                other.thread.join(0.001)
            if not soon:
                caller.join()
        other.join()
        if soon:
            first[1].run(ops[3])
            caller.join()
            first[0].wait(ops[0])
            assert [op.error for op in ops] == [None] * 4
            assert failures == []
        else:
            assert re.search("for want of a thread: can't start new thread.* raise its limits", str(ops[0].error))
            assert failures == [ops[0].error]
            assert ops[1].error is None


def test_a_driver_whose_op_ends_while_it_is_parked_lets_go() -> None:
    """A view change returns the op, and the next one begins before the driver has woken up."""
    with Rig(range(2)) as rig:
        failures = hear(rig.members[0])
        rig.view(range(2))
        exchange = rig.members[0].exchange
        op = ones()
        caller = Caller.start(exchange.run, op)
        while op.number < 0:
            caller.thread.join(0.001)
        events = [threading.Event(), threading.Event()]
        exchange.freeze(events[0].set)
        while not events[0].wait(0.001) or not exchange.driver.changed._waiters:  # type: ignore[attr-defined]
            exchange.wake()
        elsewhere = Progress(returned=1, ops=(), failed=(FailedOp(0, "different calls"),))
        progress = {0: exchange.progress(), 1: elsewhere}
        peers = rig.peers(0, (0, 1))
        sys.setswitchinterval(5)  # the driver stays where it is until this thread waits
        exchange.enter(GroupView(2, 0, (0, 1), frozenset((0, 1)), one_host=True), peers, progress)
        exchange.freeze(events[1].set)
        sys.setswitchinterval(1e-4)
        assert events[1].wait(DEADLINE)
        caller.join()  # sooner than it would give up to wait for a view
        assert isinstance(op.error, MismatchError)
        assert not failures
        assert exchange.progress().returned == 1
        rig.epoch = 2
        rig.view((0,))
        exchange.run(later := ones())
        assert later.error is None
