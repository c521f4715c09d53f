"""The engine with real threads: every member is an exchange of its own in this process."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.errors import CollectiveTimeout, MismatchError
from ftcomm.kernels.reduce import DTYPES, OPS, Reducer, operand, unsupported
from tests.exchange_rig import DEADLINE, Caller, Rig

HOWS = ("shm", "tcp", "mixed")


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
        op = Operation(given(seed, replica, number, count, dtype), dtype, redop)
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


@pytest.mark.parametrize("how", HOWS)
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
        assert "replicas 0, 2: op 0, allreduce(op='sum') of 4 x float32" in message
        assert f"replica 1: op 0, allreduce(op={other[2]!r}) of {other[0]} x {other[1]}" in message


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
