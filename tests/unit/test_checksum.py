"""Results that differ: seen by all, told apart by majority, over shared memory and TCP, in every chunk of every op."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.collective.algorithms.base import Algorithm
from ftcomm.collective.checksum import Divergence, fingerprint, judge
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import Slot
from ftcomm.collective.plan import GroupView
from ftcomm.collective.stream import Stream
from ftcomm.errors import DivergenceError, MismatchError
from ftcomm.kernels.epochs import COUNTER
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.transport.segment import FINGERPRINT, POSTED, REDUCED, TAKEN, descriptor
from tests.rigs.exchange import DEADLINE, Caller, Rig

HOWS = ("shm", "tcp", "mixed")
SIZES = (1, 5000, 131_072, 1_000_003)  # of float32: one chunk to eight


@pytest.mark.parametrize(
    ("prints", "wrong", "right"),
    [
        ({0: 5}, (), ()),
        ({0: 5, 1: 5, 2: 5}, (), ()),
        ({0: 5, 1: 6}, (0, 1), ()),
        ({0: 5, 1: 6, 2: 5}, (1,), (0, 2)),
        ({0: 5, 1: 6, 2: 7}, (0, 1, 2), ()),
        ({0: 5, 1: 6, 2: 5, 3: 6}, (0, 1, 2, 3), ()),
        ({0: 5, 1: 6, 2: 7, 3: 5, 4: 5}, (1, 2), (0, 3, 4)),
        ({0: 5, 1: 0, 2: 5}, (), ()),  # 0: does not compare
        ({0: 5, 1: 0, 2: 6}, (0, 2), ()),
    ],
)
def test_a_strict_majority_is_right(prints: dict[int, int], wrong: tuple[int, ...], right: tuple[int, ...]) -> None:
    assert judge(prints) == (wrong, right)


@given(st.integers(1, 70_000), st.integers(0), st.integers(0, 1000), st.integers(0, 7))
def test_any_changed_bit_changes_the_fingerprint(nbytes: int, at: int, seed: int, bit: int) -> None:
    array = np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)
    before = fingerprint(array)
    assert before == fingerprint(array.copy()) != 0
    array[at % nbytes] ^= 1 << bit
    assert fingerprint(array) != before


def test_arrays_that_start_anywhere_have_the_fingerprint_of_their_bytes() -> None:
    memory = np.arange(40_000, dtype=np.uint8)
    for offset in range(0, 32, 4):
        array = memory[offset : offset + 30_000].view(np.float32)
        assert fingerprint(array) == fingerprint(array.copy())
    assert fingerprint(np.empty(0, np.int64)) != 0


class Fault:
    """Flips one bit of the result of `replica` in a chunk of an op, after it is taken and before that is said."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, replica: int, number: int, chunk: int) -> None:
        fingerprint_of = Algorithm.fingerprint

        def faulty(algorithm: Algorithm, slot: Slot) -> tuple[int, int]:
            if algorithm.me == replica and (slot.op.number, slot.task.chunk) == (number, chunk):
                slot.here.view(np.uint8)[-1] ^= 4
            return fingerprint_of(algorithm, slot)

        monkeypatch.setattr(Algorithm, "fingerprint", faulty)


def run(rig: Rig, counts: list[int], together: bool) -> dict[int, list[Operation]]:
    """The ops of every member, called one after the other or all at once."""
    out = {m: [Operation(np.full(n, m + 1.0, np.float32), "float32", "sum") for n in counts] for m in rig.members}

    def script(member: int) -> None:
        for op in out[member]:
            (rig.members[member].exchange.submit if together else rig.members[member].exchange.run)(op)
        rig.members[member].exchange.wait_all(DEADLINE)

    for caller in [Caller.start(script, m) for m in rig.members]:
        caller.join()
    return out


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 2))])
def test_the_one_that_differs_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, seed: int, how: str, together: bool
) -> None:
    chance = random.Random(seed)
    print(f"seed {seed}")
    counts = [chance.choice(SIZES) for _ in range(12)]
    number, victim = chance.randrange(len(counts)), chance.randrange(3)
    chunk = chance.randrange(-(-counts[number] // 131_072))
    with Rig(range(3), how, verify=True) as rig:
        Fault(rig, monkeypatch, victim, number, chunk)
        rig.view(range(3), chance.choice([(0, 1, 2), (0, 2), (1,)]))  # who catches up is compared as well
        others = tuple(m for m in rig.members if m != victim)
        found = Divergence(number, chunk, (victim,), others)
        out: dict[int, list[Operation]] = {}
        caller = Caller.start(lambda: out.update(run(rig, counts, together)))
        failed = rig.members[victim].exchange
        deadline = threading.Event()
        while failed.member.error is None and not deadline.wait(0.005) and caller.thread.is_alive():
            pass
        assert isinstance(failed.member.error, DivergenceError)
        assert f"op {number}, chunk {chunk}: the result of replica {victim} differs" in str(failed.member.error)
        rig.view(others)
        caller.join()
        for m in others:
            for op in out[m]:
                assert op.error is None
                assert op.array.tobytes() == out[others[0]][op.number].array.tobytes()
            assert set(rig.members[m].divergences) <= {found}
        assert rig.members[victim].divergences == [found]
        for op in out[victim]:
            assert (op.error is None) == (0 <= op.number < number) or op.error is failed.member.error


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("count", SIZES)
def test_of_two_both_fail(monkeypatch: pytest.MonkeyPatch, count: int, how: str) -> None:
    with Rig(range(2), how, verify=True) as rig:
        Fault(rig, monkeypatch, 1, 1, (count - 1) // 131_072)
        rig.view(range(2))
        out = run(rig, [count, count], together=False)
        for m in rig.members:
            first, second = out[m]
            assert first.error is None
            assert isinstance(second.error, DivergenceError)
            assert "the result of replicas 0, 1 differs, and none has a majority" in str(second.error)
            assert rig.members[m].divergences == [Divergence(1, (count - 1) // 131_072, (0, 1), ())]


@pytest.mark.parametrize("how", HOWS)
def test_all_see_what_one_does(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Without a view change in between everybody comes to compare the chunk, the first of five too."""
    count, chunk = 600_000, 0
    with Rig(range(3), how, verify=True) as rig:
        Fault(rig, monkeypatch, 2, 0, chunk)
        rig.view(range(3))
        out = {m: Operation(np.ones(count, np.float32), "float32", "sum") for m in rig.members}
        for m, op in out.items():
            rig.members[m].exchange.submit(op)
        assert out[2].wait(DEADLINE)
        assert isinstance(out[2].error, DivergenceError)
        end = time.monotonic() + DEADLINE
        while not all(rig.members[m].divergences for m in (0, 1)) and time.monotonic() < end:
            time.sleep(0.001)
        assert [rig.members[m].divergences for m in (0, 1)] == [[Divergence(0, chunk, (2,), (0, 1))]] * 2


@pytest.mark.parametrize("how", HOWS)
def test_equal_results_raise_no_alarm(how: str) -> None:
    """Not in view changes either, nor after ops that fail."""
    with Rig(range(4), how, verify=True) as rig:
        members = [0, 1, 2, 3]
        rig.view(members)
        counts = [random.Random(9).choice(SIZES) for _ in range(30)]
        out: dict[int, list[Operation]] = {}
        caller = Caller.start(lambda: out.update(run(rig, counts, together=False)))
        while len(members) > 2:
            caller.thread.join(0.05)
            members.pop()
            rig.view(members, members[:1])
        for left in set(rig.members) - set(members):
            rig.members[left].exchange.fail(RuntimeError("left behind"))
        caller.join()
        assert all(op.error is None for m in members for op in out[m])
        assert all(not member.divergences for member in rig.members.values())


def test_ops_that_fail_have_no_result_to_compare() -> None:
    with Rig(range(3), verify=True) as rig:
        rig.view(range(3))
        ops = {m: Operation(np.full(4 + m, m + 1.0, np.float32), "float32", "sum") for m in rig.members}
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
            caller.join()
        assert all(isinstance(op.error, MismatchError) for op in ops.values())
        out = run(rig, list(SIZES), together=True)
        assert all(op.error is None for ops in out.values() for op in ops)
        assert all(not member.divergences for member in rig.members.values())


def test_a_reader_that_comes_late_gets_the_fingerprints_of_all_that_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(range(2), "tcp", verify=True) as rig:
        writer = rig.members[0]
        admit, late = writer.exchange.admit, []
        monkeypatch.setattr(writer.exchange, "admit", lambda *args: late.append(args))
        Fault(rig, monkeypatch, 0, 0, 0)
        rig.view(range(2), {0})  # a single contributor does not wait for reduced shards
        ops = {m: [Operation(np.ones(5000, np.float32), "float32", "sum") for _ in range(3)] for m in rig.members}
        for m in rig.members:
            for op in ops[m]:
                rig.members[m].exchange.submit(op)
        end = time.monotonic() + DEADLINE
        while writer.segment.words[TAKEN] < (1 << COUNTER | 2):
            assert time.monotonic() < end
            time.sleep(0.001)
        admit(*late[0])
        assert ops[1][2].wait(DEADLINE)
        assert rig.members[1].divergences == [Divergence(0, 0, (0, 1), ())]


def test_a_member_that_was_left_behind_takes_no_later_epoch_for_a_divergence() -> None:
    """The others have gone on without it: they use their slots for the tasks of an epoch that it is not in."""
    with Rig(range(2), verify=True) as rig:
        left, other = rig.members[0], rig.members[1]
        found: list[Divergence] = []
        view = GroupView(1, 0, (0, 1), frozenset((0, 1)))
        peers = rig.peers(0, (0, 1))
        nothing: Any = lambda *args: None  # noqa: E731
        stream = Stream(view, left.segment, peers, left.exchange._waiter, Reducer(), nothing, found.append)
        alarm, op = stream.checksums, Operation(np.ones(4, np.float32), "float32", "sum")
        assert alarm is not None
        alarm.taken(0, op, 0, fingerprint(op.array))
        stream.publisher.publish(TAKEN, 1)
        for epoch, expected in ((2, 0), (1, 1)):
            for word in (POSTED, REDUCED, TAKEN):
                other.segment.words[word] = epoch << COUNTER | 1
            other.segment.words[descriptor(0) + FINGERPRINT] = 1 << 32 | 7
            alarm.checked = 0
            alarm.compare(1)
            assert len(found) == expected


def test_who_does_not_compare_is_not_compared() -> None:
    with Rig(range(2), verify=True) as rig:
        for member in rig.members.values():
            if member.replica:
                member.exchange._on_divergence = None
        rig.view(range(2))
        out = run(rig, [5000, 600_000], together=False)
        assert all(op.error is None for ops in out.values() for op in ops)
