"""Small ops in one go: that they go this way, that they are right, and that they go on as usual where they cannot."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ftcomm.collective import fast_path, publisher
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.fast_path import FastPath
from ftcomm.collective.gate import Gate, token
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.engines.host_calls import HostCalls
from ftcomm.errors import MismatchError
from ftcomm.groups.calls import Calls
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import ASLEEP, NEAR, POSTED, TAKEN
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.bytecodes import bytecodes, mirrored_group
from tests.rigs.exchange import DEADLINE, Caller, Rig, mirrored, socket_pair
from tests.rigs.exchange_calls import check, given

MANY = 500  # ops, until one was not interrupted by the other threads of this process


class Seen:
    """What became of the ops that were tried: True for those that were done in one go."""

    def __init__(self) -> None:
        self.ended: list[bool] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    kept, run = Seen(), FastPath.run

    def watched(self: FastPath, op: Operation) -> bool:
        kept.ended.append(run(self, op))
        return kept.ended[-1]

    monkeypatch.setattr(FastPath, "run", watched)
    return kept


def all_run(rig: Rig, ops: dict[int, Operation]) -> None:
    callers = [Caller.start(rig.members[member].exchange.run, op) for member, op in ops.items()]
    for caller in callers:
        caller.join()


def made(members: range, number: int, count: int, dtype: str = "float32", op: str = "sum") -> dict[int, Operation]:
    return {m: Operation(given(7, m, number, count, dtype), dtype, op) for m in members}


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "sum"), ("bfloat16", "avg"), ("int32", "max"), ("float64", "sum"), ("int8", "avg")]
)
def test_small_ops_are_right_and_often_in_one_go(seen: Seen, members: int, dtype: str, op: str) -> None:
    with Rig(range(members)) as rig:
        rig.view(range(members))
        for number in range(MANY):
            ops = made(range(members), number, 16 + number % 2, dtype, op)
            all_run(rig, ops)
            for one in ops.values():
                assert one.error is None
                check(one, 7)
            if number >= 12 and any(seen.ended):  # each slot three times
                break
    assert len(seen.ended) == (number + 1) * members
    assert any(seen.ended)


@pytest.mark.parametrize("what", ["not all contribute", "tcp", "verify", "large", "two-shot"])
def test_what_does_not_go_in_one_go(seen: Seen, what: str) -> None:
    members, count = (3, 40_000) if what == "two-shot" else (2, 300_000 if what == "large" else 8)
    with Rig(range(members), "tcp" if what == "tcp" else "shm", verify=what == "verify") as rig:
        rig.view(range(members), (0,) if what == "not all contribute" else None)
        ops = made(range(members), 0, count)
        all_run(rig, ops)
        for op in ops.values():
            check(op, 7)
    assert not any(seen.ended)


Raises = Callable[[], bool]  # raises the word, once, and waits until all have


def at_each_word(monkeypatch: pytest.MonkeyPatch, body: Callable[[int, Gate, int, Raises], bool]) -> None:
    """Let `body(me, gate, count, raises)` stand for what the fast path does to raise a word and wait for the others."""
    init = FastPath.__init__

    def watched(self: FastPath, *args: Any) -> None:
        init(self, *args)
        me = self._view.me

        def of(gate: Gate, raise_to: Callable[[int], None]) -> Any:
            said = 0

            def wait(count: int, waiter: Waiter) -> bool:
                def raises() -> bool:
                    nonlocal said
                    if said < count:
                        raise_to(count)
                        said = count
                    return gate.wait(count, waiter)

                return body(me, gate, count, raises)

            return SimpleNamespace(wait=wait)

        self._posted, self._taken = of(self._posted, self._raise_posted), of(self._taken, self._raise_taken)
        self._raise_posted = self._raise_taken = lambda count: None

    monkeypatch.setattr(FastPath, "__init__", watched)


@pytest.mark.parametrize("word", [POSTED, TAKEN])
def test_an_op_goes_on_as_usual_from_where_it_stopped(seen: Seen, monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """One member gives up waiting at once, at each of the two places; the op ends all the same, and so do the next."""

    def gives_up_at_once(me: int, gate: Gate, count: int, raises: Raises) -> bool:
        return raises() and not (gate.word == word and me == 1)

    at_each_word(monkeypatch, gives_up_at_once)
    with Rig(range(3)) as rig:
        rig.view(range(3))
        for number in range(MANY):
            ops = made(range(3), number, 16)
            all_run(rig, ops)
            for one in ops.values():
                check(one, 7)
            if number >= 8 and True in seen.ended:
                break
    assert True in seen.ended
    assert False in seen.ended


@pytest.mark.parametrize("word", [POSTED, TAKEN])
def test_a_member_is_lost_in_the_middle(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """It stops for good before it raises the word: the others finish that very op without it, with equal bytes."""
    stopped = threading.Event()

    def stops(me: int, gate: Gate, count: int, raises: Raises) -> bool:
        if gate.word == word and me == 2 and count == 3:
            stopped.set()
            raise SystemExit
        came = raises()
        while not came and me == 2 and count == 3:  # else it would go on as usual
            came = raises()
        return came

    at_each_word(monkeypatch, stops)
    with Rig(range(3)) as rig:
        rig.view(range(3))
        for number in range(2):
            all_run(rig, made(range(3), number, 16))
        ops = made(range(3), 2, 16)
        callers = [Caller.start(rig.members[m].exchange.run, ops[m]) for m in range(3)]
        assert stopped.wait(DEADLINE)
        rig.view((0, 1))
        for caller in callers[:2]:
            caller.join()
        assert ops[0].array.tobytes() == ops[1].array.tobytes()
        for m in (0, 1):
            check(ops[m], 7)
        late = made(range(2), 3, 16)
        all_run(rig, late)
        check(late[0], 7)


class OneWay(Rig):
    """The last member reads the others through connections, and they read its memory where it lies. It is admitted
    when `late` says so."""

    def __init__(self, members: range) -> None:
        super().__init__(members)
        self.late: list[tuple[Exchange, TcpMirrorWriter]] = []

    def connect(self, me: int, other: int) -> Peer:
        if me < len(self.members) - 1:
            return super().connect(me, other)
        near, far = socket_pair()
        writer = TcpMirrorWriter(far, me, self.epoch, self.members[me].segment.nonce)
        self.late.append((self.members[other].exchange, writer))
        peer = TcpMirror(other, self.epoch, near, lambda *lost: self.members[me].lost.append(lost))
        peer.nonce = self.members[other].segment.nonce
        return peer


@pytest.mark.parametrize("members", [2, 3])
def test_who_attaches_late_gets_a_task_that_went_in_one_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    taken = threading.Semaphore(0)

    def watched(me: int, gate: Gate, count: int, raises: Raises) -> bool:
        came = raises()
        while not came and gate.word == POSTED:  # however slow the others are
            came = raises()
        if gate.word == TAKEN:
            taken.release()
        return came

    at_each_word(monkeypatch, watched)
    with OneWay(range(members)) as rig:
        rig.view(range(members))
        ops = made(range(members), 0, 16)
        exchanges = {m: rig.members[m].exchange for m in range(members)}
        for exchange in exchanges.values():
            exchange._waiter.interrupted = False  # the view change, which the fast path would look at first
        callers = [Caller.start(exchanges[m].run, op) for m, op in ops.items()]
        for _ in range(members - 1):
            assert taken.acquire(timeout=DEADLINE), "it did not go in one go"
        for exchange, writer in rig.late:
            exchange.admit(writer)
        for caller in callers:
            caller.join()
        for op in ops.values():
            check(op, 7)


def test_different_calls_are_an_error_on_all(seen: Seen) -> None:
    with Rig(range(2)) as rig:
        rig.view(range(2))
        for _ in range(5):
            ops = {m: Operation(np.zeros(8 + m, np.float32), "float32", "sum") for m in range(2)}
            all_run(rig, ops)
            assert all(isinstance(op.error, MismatchError) for op in ops.values())
        ops = made(range(2), 5, 16)
        all_run(rig, ops)
        check(ops[0], 7)
    assert False in seen.ended


def test_a_view_says_whether_its_ops_may(seen: Seen) -> None:
    assert fast_path.LEAST == 2
    with Rig(range(1)) as rig:
        rig.view(range(1))
        op = made(range(1), 0, 16)[0]
        rig.members[0].exchange.run(op)
        check(op, 7)
    assert not seen.ended


def test_no_op_returns_before_all_have_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has returned it: that is what proves to a later view that all hold it."""
    there, go = threading.Event(), threading.Event()

    def waits(me: int, gate: Gate, count: int, raises: Raises) -> bool:
        if gate.word == TAKEN and me == 1:
            there.set()
            assert go.wait(DEADLINE)
        return raises()

    at_each_word(monkeypatch, waits)
    with Rig(range(2)) as rig:
        rig.view(range(2))
        for number in range(MANY):  # until this one of it went in one go there
            ops = made(range(2), number, 16)
            callers = [Caller.start(rig.members[m].exchange.run, ops[m]) for m in range(2)]
            while any(caller.thread.is_alive() for caller in callers):
                if there.wait(0.01) and not go.is_set():
                    callers[0].thread.join(0.3)
                    assert not ops[0].done
                    go.set()
            for caller in callers:
                caller.join()
            check(ops[0], 7)
            if go.is_set():
                return
    pytest.fail(f"none of {MANY} ops went in one go")


def test_members_with_a_ring_keep_to_the_stream() -> None:
    """Which says beside each call that there is one: who goes in one go and who does not would differ."""
    view = GroupView(1, 0, (0, 1), frozenset((0, 1)))
    assert fast_path.applies(view, {})
    assert not fast_path.applies(dataclasses.replace(view, ring=(0, 1)), {})


def test_an_op_that_another_thread_adds_in_the_middle_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(range(2)) as rig:
        rig.view(range(2))
        all_run(rig, made(range(2), 0, 16))  # what has interrupted the driver at the view change is seen to
        first, second = made(range(2), 1, 16), made(range(2), 2, 16)
        exchange = rig.members[0].exchange

        class Beside(tuple[tuple[int, int, int], ...]):
            def __getitem__(self, slot: Any) -> Any:
                if threading.current_thread().name == "calls" and second[0].number < 0:
                    exchange.submit(second[0])
                return super().__getitem__(slot)

        monkeypatch.setattr(fast_path, "_PLACES", Beside(fast_path._PLACES))
        for ops in (first, second):
            rig.members[1].exchange.submit(ops[1])
        caller = threading.Thread(target=exchange.run, args=(first[0],), name="calls", daemon=True)
        caller.start()
        caller.join(DEADLINE)
        if second[0].number < 0:
            pytest.fail("it did not go in one go")
        assert second[0].wait(DEADLINE), "it was never posted"
        check(first[0], 7)
        check(second[0], 7)


def test_an_op_calls_no_more_functions_than_it_needs() -> None:
    """What a small op costs is what the interpreter runs for it. Who adds a call here says why, or takes one away.

    Four of them raise the words and wait at the gates, so that nothing else says who waits for whom. Two record the
    call and the return, and one is the function below."""

    class Member(Calls):
        roster = (0, 1)

        def _may_call(self) -> None:
            """As that of `Group`, which calls nothing in a replica that runs."""

    exchange, segment = mirrored()
    caller, array, called = Member("", 0, None, HostCalls(2), exchange), np.zeros(256, np.float32), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal called
        called += event == "call"

    def once() -> None:
        caller.allreduce(array)  # always from this line, which the recorder knows then

    for _ in range(2 * NEAR):
        once()
    least = 1 << 30
    for _ in range(5):  # the interpreter may call back in between, for a collection of garbage
        called = 0
        sys.setprofile(count)
        try:
            once()
        finally:
            sys.setprofile(None)
        least = min(least, called)
    exchange.fail(RuntimeError("the test is over"))
    segment.close()
    assert least <= 34


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="another Python has other bytecodes")
@pytest.mark.parametrize(
    ("kind", "members", "most"), [(np.asarray, 2, 984), (torch.from_numpy, 2, 1025), (np.asarray, 4, 1151)]
)
def test_an_op_runs_no_more_bytecodes_than_it_needs(kind: Callable[[Any], Any], members: int, most: int) -> None:
    """`python -m tests.bytecodes` says which functions run them. Who needs more says why, or takes some away."""
    array = kind(np.zeros(16384, np.float32))
    with mirrored_group(members) as group:
        assert bytecodes(lambda: group.allreduce(array)).total() <= most


def test_who_sleeps_on_a_word_is_woken_when_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then, since it costs a system call; and else an op would take as long as the longest sleep."""
    woken: list[int] = []
    monkeypatch.setattr(publisher, "wake", woken.append)
    with Rig(range(3)) as rig:
        rig.view(range(3))
        stream, segment = rig.members[0].exchange.core.stream, rig.members[0].segment
        assert stream is not None
        raisers = stream.publisher.raisers
        for sleeper in (1, 2):
            rig.members[sleeper].segment.words[ASLEEP] = token(0, POSTED)
        raisers[TAKEN](1)
        assert not woken
        raisers[POSTED](1)
        assert woken == [segment.address + 8 * POSTED], "all that sleep on a word by one call"
