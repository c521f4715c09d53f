"""The engine with real threads: every member is an exchange of its own in this process."""

from __future__ import annotations

import dataclasses
import random
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ftcomm.collective.stall
import ftcomm.engine
from ftcomm.collective import spare
from ftcomm.collective.driver import Driver
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import ProtocolError
from ftcomm.collective.stall import Stall
from ftcomm.control import views
from ftcomm.control.engine import Unreachable
from ftcomm.control.messages import FailedOp, Progress
from ftcomm.errors import CollectiveTimeout, FtcommError, MismatchError
from ftcomm.kernels.dtypes import DTYPES, OPS, unsupported
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import POSTED, Peer
from ftcomm.transport.tcp import TcpPeer
from tests.exchange_rig import DEADLINE, Caller, Member, Rig, deadlines, socket_pair

HOWS = ("shm", "tcp", "mixed", "ring", "mixed ring")


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Threads change places every 0.1 ms instead of 5, for more interleavings."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def given(seed: int, replica: int, number: int, count: int, dtype: str) -> np.ndarray:
    """The input of a member for an op, as its carrier."""
    values = np.random.default_rng((seed, replica, number)).integers(0, 100, count)
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[dtype].carrier)


def expected(arrays: list[np.ndarray], dtype: str, op: str) -> np.ndarray:
    out = np.empty_like(arrays[0])
    Reducer().get(dtype, op)([operand(dtype, a) for a in arrays], operand(dtype, out))
    return out


def check(op: Operation, seed: int) -> None:
    """Every chunk is the reduction of exactly those inputs that it names."""
    covered = 0
    for start, stop, who in op.spans():
        inputs = [given(seed, m, op.number, op.count, op.dtype)[start:stop] for m in who]
        assert op.array[start:stop].tobytes() == expected(inputs, op.dtype, op.op).tobytes()
        assert start == covered
        covered = stop
    assert covered == op.count


def calls(seed: int, total: int, largest: int = 300_000) -> list[tuple[int, str, str]]:
    chance = random.Random(seed)
    out = []
    while len(out) < total:
        dtype, op = chance.choice(list(DTYPES)), chance.choice(OPS)
        if unsupported(dtype, op) is None:
            out.append((chance.choice((0, 1, 7, 300, 20_000, chance.randint(1, largest))), dtype, op))
    return out


def script(
    rig: Rig, replica: int, seed: int, todo: list[tuple[int, str, str]], out: dict[int, list[Operation]]
) -> None:
    """What a user's script does: a mix of synchronous and asynchronous calls, the same on all members."""
    exchange = rig.members[replica].exchange
    chance = random.Random(seed + 1)
    ops = out[replica] = []
    for number, (count, dtype, redop) in enumerate(todo):
        op = Operation(given(seed, replica, number, count, dtype), dtype, redop, atomic=number % 2 == 1)
        ops.append(op)
        (exchange.submit if chance.random() < 0.5 else exchange.run)(op)
    exchange.drain(DEADLINE)


def start(rig: Rig, seed: int, todo: list[tuple[int, str, str]], out: dict[int, list[Operation]]) -> dict[int, Caller]:
    return {m: Caller.start(script, rig, m, seed, todo, out) for m in rig.members}


def agree(out: dict[int, list[Operation]], members: list[int], seed: int) -> None:
    for ops in zip(*(out[m] for m in members), strict=True):
        for op in ops:
            if op.error is not None:
                raise op.error
            assert op.array.tobytes() == ops[0].array.tobytes()
            assert op.spans() == ops[0].spans()
        check(ops[0], seed)
        assert not ops[0].atomic or len(ops[0].spans()) <= 1


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_dtypes_and_ops(count: int, how: str) -> None:
    out: dict[int, list[Operation]] = {}
    with Rig(range(count), how) as rig:
        rig.view(range(count))
        for caller in start(rig, count, calls(count, 60), out).values():
            caller.join()
        agree(out, list(range(count)), count)
        assert all(not member.lost for member in rig.members.values())


@pytest.mark.parametrize("contributing", [{0}, {1}, {0, 2}, {1, 2}])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_input_of_a_member_that_catches_up_does_not_count(count: int, contributing: set[int]) -> None:
    contributing = {m for m in contributing if m < count}
    if not contributing:
        contributing = {count - 1}
    out: dict[int, list[Operation]] = {}
    with Rig(range(count)) as rig:
        rig.view(range(count), contributing)
        for caller in start(rig, 7, calls(7, 30), out).values():
            caller.join()
        agree(out, list(range(count)), 7)
        for op in out[0]:
            assert {who for _, _, who in op.spans()} <= {tuple(sorted(contributing))}


@pytest.mark.parametrize("how", [*HOWS, "loopback"])
@pytest.mark.parametrize("seed", range(8))
def test_view_changes_at_random_moments(seed: int, how: str) -> None:
    chance = random.Random(seed)
    count = chance.choice((2, 3, 4, 5))
    out: dict[int, list[Operation]] = {}
    todo = calls(seed, 25, 1_500_000)
    with Rig(range(count), how) as rig:
        alive = list(range(count))
        rig.view(alive)
        callers = start(rig, seed, todo, out)
        while len(alive) > 1:
            # A moment inside some op: when a member has issued that many.
            moment, watched = chance.randrange(len(todo)), chance.choice(alive)
            while callers[watched].thread.is_alive() and len(out.get(watched, ())) < moment:
                callers[watched].thread.join(0.0005)
            if chance.random() < 0.8:
                alive.remove(chance.choice(alive))  # a false suspicion: it runs on in its old view
            rig.view(alive, [m for m in alive if chance.random() < 0.8] or alive[:1])
            if chance.random() < 0.2:
                break
        for member in alive:
            callers[member].join()
        agree(out, alive, seed)
        # A member that was left behind returned nothing that the others did not.
        for member in set(out) - set(alive):
            for op in out[member]:
                if op.done and op.error is None:
                    assert op.array.tobytes() == out[alive[0]][op.number].array.tobytes()
        for member in alive:
            assert not [lost for lost in rig.members[member].lost if lost[0] in alive]


@pytest.mark.parametrize("how", HOWS)
def test_a_joiner_goes_on_from_the_numbers_of_the_others(how: str) -> None:
    with Rig(range(3), how) as rig:
        rig.view((0, 1))
        first = {m: Operation(np.full(9, m + 1.0), "float64", "sum") for m in (0, 1)}
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in first.items()]:
            caller.join()
        assert first[0].array.tolist() == [3.0] * 9
        early = Operation(np.full(9, 100.0), "float64", "sum")  # submitted before it is in a view
        rig.members[2].exchange.submit(early)
        rig.view((0, 1, 2), {0, 1})
        second = {m: Operation(np.full(9, m + 1.0), "float64", "avg") for m in (0, 1)}
        third = {**second, 2: early}
        for m in (0, 1):
            third[m] = Operation(np.full(9, m + 1.0), "float64", "sum")
            rig.members[m].exchange.submit(third[m])
        for op in third.values():
            assert op.wait(DEADLINE)
            assert op.error is None
            assert op.number == 1
            assert op.array.tolist() == [3.0] * 9


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "other", [(5, "float32", "sum"), (4, "int32", "sum"), (4, "float32", "avg"), (300_000, "float32", "sum")]
)
def test_different_calls_are_an_error_on_all_members_and_the_group_goes_on(
    other: tuple[int, str, str], how: str
) -> None:
    with Rig(range(3), how) as rig:
        rig.view(range(3))
        wrong = {m: other if m == 1 else (4, "float32", "sum") for m in rig.members}
        ops = {m: Operation(np.ones(n, d), d, r) for m, (n, d, r) in wrong.items()}
        after = {m: Operation(np.ones(500_000, np.float32), "float32", "sum") for m in rig.members}
        for m in rig.members:
            rig.members[m].exchange.submit(ops[m])
            rig.members[m].exchange.submit(after[m])
        for m in rig.members:
            assert ops[m].wait(DEADLINE)
            assert after[m].wait(DEADLINE)
            assert isinstance(ops[m].error, MismatchError)
            assert str(ops[m].error) == str(ops[0].error)
            assert ops[m].array.tolist() == [1] * wrong[m][0]
            assert after[m].error is None
            assert set(after[m].array.tolist()) == {3.0}
        message = str(ops[0].error)
        assert "atomic" not in message
        ring = ", FTCOMM_ALGORITHM=ring" if "ring" in how else ""
        assert f"replicas 0, 2: op 0, allreduce(op='sum'{ring}) of 4 x float32" in message
        assert f"replica 1: op 0, allreduce(op={other[2]!r}{ring}) of {other[0]} x {other[1]}" in message


@pytest.mark.parametrize("count", [4, 300_000])
def test_that_only_some_call_it_atomic_is_an_error_that_says_so(count: int) -> None:
    with Rig(range(2)) as rig:
        rig.view(range(2))
        ops = [Operation(np.ones(count, np.float32), "float32", "sum", atomic=m == 1) for m in rig.members]
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in enumerate(ops)]:
            caller.join()
        for op in ops:
            assert isinstance(op.error, MismatchError)
            assert f"replica 0: op 0, allreduce(op='sum') of {count} x float32" in str(op.error)
            assert f"replica 1: op 0, allreduce(op='sum', atomic=True) of {count} x float32" in str(op.error)


def test_an_atomic_op_gives_its_copy_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "_idle", [])
    with Rig(range(1)) as rig:
        rig.view((0,))
        for _ in range(3):
            rig.members[0].exchange.run(Operation(np.ones(300_000), "float64", "sum", atomic=True))
            assert [len(buffer) for buffer in spare._idle] == [2_400_000]
        rig.members[0].exchange.run(Operation(np.ones(500_000), "float64", "sum", atomic=True))
        assert [len(buffer) for buffer in spare._idle] == [4_000_000]
        rig.members[0].exchange.run(Operation(np.ones(5_000_000), "float64", "sum", atomic=True))
        assert not spare._idle  # more than what may lie idle
        rig.members[0].exchange.run(Operation(np.ones(65_536), "float64", "sum", atomic=True))
        assert not spare._idle  # one chunk: there was none


def test_members_that_disagree_on_the_ring_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "ring", lambda self, me, members: members if me == 1 else ())
    with Rig(range(3), "tcp") as rig:
        rig.view(range(3))
        ops = {m: ones(200_000) for m in rig.members}
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
            caller.join()
        for op in ops.values():
            assert isinstance(op.error, MismatchError)
            assert "replica 1: op 0, allreduce(op='sum', FTCOMM_ALGORITHM=ring) of" in str(op.error)


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


def test_a_stall_names_the_members_that_are_missing_and_ends() -> None:
    with Rig(range(3), op_timeout=0.05) as rig:
        rig.view(range(3))
        ops = {m: Operation(np.ones(4), "float64", "sum") for m in (0, 2)}
        for m, op in ops.items():
            rig.members[m].exchange.submit(op)
        for m, op in ops.items():
            assert op.wait(DEADLINE)
            assert isinstance(op.error, CollectiveTimeout)
            assert "replicas 1" in str(op.error)
            assert [(s.epoch, s.op, s.waiting_on) for s in rig.members[m].stalls] == [(1, 0, (1,))]
            later = Operation(np.ones(4), "float64", "sum")
            rig.members[m].exchange.run(later)
            assert later.error is op.error


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
        error = RuntimeError("expelled")
        exchange.fail(error)
        caller.join()
        late = Operation(np.ones(4), "float64", "sum")
        exchange.run(late)
        assert [op.error for op in (*waiting, late)] == [error] * 4


def test_a_frozen_group_goes_on_when_it_is_resumed() -> None:
    with Rig(range(2)) as rig:
        ops = {m: Operation(np.ones(4), "float64", "sum") for m in (0, 1)}
        callers = [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]
        rig.view(range(2))
        rig.view(range(2))
        for caller in callers:
            caller.join()
        assert ops[0].array.tolist() == ops[1].array.tolist() == [2.0] * 4


def test_freezing_calls_back_once_each_time_even_when_repeated() -> None:
    with Rig(range(2)) as rig:
        rig.view(range(2))
        exchange = rig.members[0].exchange
        exchange.submit(Operation(np.ones(4), "float64", "sum"))
        events = [threading.Event() for _ in range(3)]
        for event in events:
            exchange.freeze(event.set)
        while not all(event.wait(0.001) for event in events):
            exchange.nudge()
        assert exchange.progress().returned == 0
        assert len(exchange.progress().ops) == 1


def test_overflow_warns_nobody(recwarn: pytest.WarningsRecorder) -> None:
    with Rig(range(1)) as rig:
        rig.view((0,))
        op = Operation(np.full(4, 3e38, np.float32), "float32", "sum")
        rig.members[0].exchange.run(op)
    with Rig(range(2)) as rig:
        rig.view((0, 1))
        ops = [Operation(np.full(4, 3e38, np.float32), "float32", "sum") for _ in range(2)]
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in enumerate(ops)]:
            caller.join()
        assert np.isinf(ops[0].array).all()
    assert not recwarn.list


def ones(count: int = 4) -> Operation:
    return Operation(np.ones(count), "float64", "sum")


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
    monkeypatch.setattr(ftcomm.collective.stall, "REPORT", 0.05)
    with Rig(range(2), op_timeout=0.5) as rig:
        rig.view(range(2))
        op = ones()
        began = time.monotonic()
        rig.members[0].exchange.run(op)
        assert isinstance(op.error, CollectiveTimeout)
        took = time.monotonic() - began
        assert took >= 1.0
        assert 3 <= len(rig.members[0].stalls) <= 1 + (took - 0.5) / 0.05
        assert set(rig.members[0].stalls) == {(1, 0, (1,))}


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
            exchange.nudge()
        progress = {0: exchange.progress(), 1: Progress(returned=int(why == "contradiction"), ops=())}
        contributing = frozenset({0, 1} if why == "contradiction" else ())
        exchange.resume(GroupView(2, 0, (0, 1), contributing, one_host=True), rig.peers(0, (0, 1)), progress)
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
        rig.members[0].exchange.fail(RuntimeError("expelled"))
        assert op.wait(DEADLINE)
        assert str(op.error) == "expelled"
    assert not failures


def test_an_interrupt_at_any_line_leaves_no_engine_that_waits_for_a_driver() -> None:
    """It goes on, or it has failed and says so."""
    names = {"submit", "run", "_admit", "_kick", "_drive", "_loop", "_let_go"}
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


def test_a_thread_that_cannot_be_started_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Rig(range(1)) as rig:
        failures = hear(rig.members[0])
        rig.view((0,))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="new thread"):
                rig.members[0].exchange.submit(ones())
        later = ones()
        rig.members[0].exchange.run(later)
        assert [later.error] == failures


def test_a_driver_whose_op_ends_while_it_is_parked_lets_go() -> None:
    """A view change returns the op, and the next one begins before the driver has woken up."""
    with Rig(range(2)) as rig:
        failures = hear(rig.members[0], op_timeout=0.1)
        rig.view(range(2))
        exchange = rig.members[0].exchange
        op = ones()
        caller = Caller.start(exchange.run, op)
        while op.number < 0:
            caller.thread.join(0.001)
        events = [threading.Event(), threading.Event()]
        exchange.freeze(events[0].set)
        while not events[0].wait(0.001) or not exchange._changed._waiters:  # type: ignore[attr-defined]
            exchange.nudge()
        elsewhere = Progress(returned=1, ops=(), failed=(FailedOp(0, "different calls"),))
        progress = {0: exchange.progress(), 1: elsewhere}
        peers = rig.peers(0, (0, 1))
        sys.setswitchinterval(5)  # the driver stays where it is until this thread waits
        exchange.resume(GroupView(2, 0, (0, 1), frozenset((0, 1)), one_host=True), peers, progress)
        exchange.freeze(events[1].set)
        sys.setswitchinterval(1e-4)
        assert events[1].wait(DEADLINE)
        caller.join()
        assert isinstance(op.error, MismatchError)
        time.sleep(0.3)  # more than it gives a view change when an op waits
        assert not failures
        assert exchange.progress().returned == 1
        rig.epoch = 2
        rig.view((0,))
        exchange.run(later := ones())
        assert later.error is None


def test_a_second_connection_replaces_the_first() -> None:
    with Rig(range(2), "tcp") as rig:
        writer = rig.members[0]
        unwelcome, far = socket_pair()
        writer.exchange.attach(far, 1, 1)
        rig.view(range(2))  # attaches again, for the same epoch
        assert far.fileno() == -1
        ops = [ones(), ones()]
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in enumerate(ops)]:
            caller.join()
        near, far = socket_pair()
        writer.exchange.attach(far, 1, 1)
        again = TcpPeer(1, 1, near, lambda *args: None)
        (peer,) = rig.members[1].exchange._peers.values()
        peer.close()  # the reader gives the connection up
        writer.exchange.submit(ones())
        deadline = time.monotonic() + DEADLINE
        while again.words[POSTED] != 1 << 32 | 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert again.words[POSTED] == 1 << 32 | 2
        assert not writer.lost
        again.close()
        unwelcome.close()


def test_a_connection_that_breaks_while_it_gets_what_it_missed_is_lost_once() -> None:
    with Rig(range(2)) as rig:
        rig.view(range(2))
        writer = rig.members[0]
        mine = [ones(), ones()]
        for op in mine:
            writer.exchange.submit(op)
        near, far = socket_pair()
        far.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + DEADLINE
        while writer.segment.words[POSTED] != 1 << 32 | 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        writer.exchange.attach(far, 1, 1)
        while not writer.lost and time.monotonic() < deadline:
            writer.exchange.nudge()
            time.sleep(0.001)
        for _ in mine:
            rig.members[1].exchange.run(ones())
        assert all(op.wait(DEADLINE) for op in mine)
        assert [op.error for op in mine] == [None, None]
        assert [lost[:2] for lost in writer.lost] == [(1, 1)]
        near.close()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("count", [4, 500_000])
def test_the_engine_keeps_nothing_of_an_op_that_has_ended(count: int, how: str) -> None:
    with Rig(range(3), how) as rig:
        rig.view(range(3))
        ops = {m: ones(count) for m in rig.members}
        alive = [weakref.ref(op.array) for op in ops.values()]
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
            caller.join()
        waiting = ones(count)
        alive.append(weakref.ref(waiting.array))
        rig.members[0].exchange.submit(waiting)
        rig.members[0].exchange.fail(RuntimeError("expelled"))
        assert waiting.wait(DEADLINE)
        caller.errors.clear()
        del ops, waiting, caller
        deadline = time.monotonic() + DEADLINE
        while any(array() is not None for array in alive) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [array() for array in alive] == [None] * 4


# -- the way to the peers' memory --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Way:
    """An `Engine` of replica 0, whose connections are those that the test makes."""

    made: list[Peer] = dataclasses.field(default_factory=list)
    closed: list[Peer] = dataclasses.field(default_factory=list)
    dialling: threading.Event = dataclasses.field(default_factory=threading.Event)
    answered: threading.Event = dataclasses.field(default_factory=threading.Event)
    slow: int = -1  # the epoch whose connections come when they are `answered`

    def connect(self, *args: object, epoch: int, **options: object) -> Peer:
        if epoch == self.slow:
            self.dialling.set()
            assert self.answered.wait(DEADLINE)
        peer = Peer(1, "tcp")
        peer.close = lambda: self.closed.append(peer)  # type: ignore[method-assign]
        self.made.append(peer)
        return peer


class NoExchange:
    replica = 0

    def resume(self, *args: object) -> NoExchange:
        return self

    def _asdict(self) -> dict[str, int]:
        return {}


def engine() -> ftcomm.engine.Engine:
    here = views.Address("host", 0, "boot", 0, 0, "nonce")
    exchange: Any = NoExchange()
    nothing: Any = lambda *args: None  # noqa: E731
    return ftcomm.engine.Engine(0, exchange, here, mode="tcp", dial=nothing, on_lost=nothing, on_died=nothing)


def a_view(epoch: int) -> views.View:
    ranks = [(views.Address("host", 0, "boot", 0, 0, f"nonce {m}"),) for m in range(2)]
    return views.View(epoch, None, tuple(views.Member(m, "", ranks[m], True) for m in range(2)))


def test_a_connection_that_comes_after_its_view_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way(slow=1)
    monkeypatch.setattr(ftcomm.engine, "connect", way.connect)
    subject = engine()
    late = Caller.start(subject.reach, a_view(1))
    assert way.dialling.wait(DEADLINE)
    subject.reach(a_view(2))
    subject.resume(a_view(2), {})
    way.answered.set()
    late.join()
    assert way.closed == way.made[1:]
    assert list(subject.reach(a_view(1))) == []
    assert len(way.made) == 2


def test_a_peer_for_which_no_thread_can_be_started_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: object, **options: object) -> Peer:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ftcomm.engine, "connect", connect)
    with pytest.raises(Unreachable, match="new thread") as raised:
        engine().reach(a_view(1))
    assert raised.value.replica == 1
