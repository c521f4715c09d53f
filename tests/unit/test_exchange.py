"""The engine with real threads: every member is an exchange of its own in this process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import ftcomm.collective.watchdog
from ftcomm.bench.tune import ONE, RING, TWO, WAYS
from ftcomm.collective import buffer_pool
from ftcomm.collective.compression import COMPRESSIONS, unsupported_compression
from ftcomm.collective.driver import Driver
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import ProtocolError
from ftcomm.collective.watchdog import Stall
from ftcomm.control.messages import FailedOp, Progress
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, MismatchError
from ftcomm.kernels.dtypes import DTYPES, OPS, unsupported
from ftcomm.kernels.epochs import COUNTER, COUNTS
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import POSTED
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.coded import coded
from tests.exchange_rig import DEADLINE, Caller, Member, Rig, deadlines, socket_pair

HOWS = ("shm", "tcp", "alike", "mixed", "ring", "mixed ring", "hosts", "tcp hosts")


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
        want = (coded if op.compression == "fp8" else expected)(inputs, op.dtype, op.op)
        assert op.array[start:stop].tobytes() == want.tobytes()
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
        array = given(seed, replica, number, count, dtype)
        wire = COMPRESSIONS[number % len(COMPRESSIONS)]
        wire = "input" if unsupported_compression(dtype, redop, wire) else wire
        op = Operation(array, dtype, redop, atomic=number % 2 == 1, compression=wire)
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


@pytest.mark.parametrize("how", ["shm", "alike", "ring"])
def test_switch_points_can_be_changed_between_two_ops(how: str) -> None:
    found: dict[int, list[tuple[bool, bool]]] = {}

    def body(member: Member) -> None:
        ways = found[member.replica] = []
        for way in (ONE, TWO, ONE, RING):
            member.exchange.tune(WAYS[way])
            for _ in range(2):
                op = Operation(given(0, member.replica, 0, 1000, "float32"), "float32", "sum")
                member.exchange.run(op)
                assert op.error is None
            algorithms = member.exchange.core.stream.pipeline.algorithms
            chosen = algorithms.of(op)
            ways.append((chosen is algorithms.two_shot, chosen is algorithms.route))

    with Rig(range(3), how) as rig:
        rig.view(range(3))
        for caller in [Caller.start(body, member) for member in rig.members.values()]:
            caller.join()
    last = (False, True) if how == "ring" else (True, False)
    first = (True, False) if how == "ring" else (False, False)  # whose members are not alike
    assert all(ways == [first, (True, False), first, last] for ways in found.values())


@pytest.mark.parametrize("how", ["shm", "alike"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_nans_and_zeros_have_the_same_bits_on_all_members(count: int, how: str) -> None:
    """Where each member sums by itself: it has its own input in its array, which lies elsewhere, and those of the
    others in their staging or its mirrors."""
    chance = np.random.default_rng(count)
    exponents = {"float32": 0x7F80_0000, "float64": 0x7FF0 << 48, "float16": 0x7C00, "bfloat16": 0x7F80}
    todo = [(dtype, op) for dtype in exponents for op in ("sum", "min", "max")]
    bits = []
    for dtype, _ in todo:
        size = DTYPES[dtype].itemsize
        drawn = chance.integers(0, 256, (count, 1002 * size), np.uint8).view(f"uint{8 * size}")
        drawn[:, ::3] &= drawn.dtype.type(1 << 8 * size - 1)  # zeros of both signs
        drawn[:, 1::3] |= drawn.dtype.type(exponents[dtype])  # NaNs with payloads, of both signs
        bits.append(drawn.view(np.uint8))
    out: dict[int, list[np.ndarray]] = {}

    def body(member: Member) -> None:
        me = member.replica
        out[me] = []
        for (dtype, op), inputs in zip(todo, bits, strict=True):
            carrier = DTYPES[dtype].carrier
            place = np.empty(len(inputs[me]) + 64, np.uint8)[8 * me :][: len(inputs[me])].view(carrier)
            place[...] = inputs[me].view(carrier)
            member.exchange.run(Operation(place, dtype, op))
            out[me].append(place)

    with Rig(range(count), how) as rig:
        rig.view(range(count))
        for caller in [Caller.start(body, member) for member in rig.members.values()]:
            caller.join()
    for number, (dtype, op) in enumerate(todo):
        assert len({out[me][number].tobytes() for me in out}) == 1, (dtype, op)


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


@pytest.mark.protocol
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
        way = ", FTCOMM_ALGORITHM=ring" if "ring" in how else ", FTCOMM_ALGORITHM=auto" if "hosts" in how else ""
        assert f"replicas 0, 2: op 0, allreduce(op='sum'{way}) of 4 x float32" in message
        assert f"replica 1: op 0, allreduce(op={other[2]!r}{way}) of {other[0]} x {other[1]}" in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [0, 1, 257, 40_000, 300_001])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_what_is_coded_has_the_same_bits_by_every_way(op: str, count: int, dtype: str) -> None:
    """And of two members with one that does not contribute, in one-shot, two-shot, and where all else goes around."""
    inputs = {m: coded_input(m, count, dtype) for m in range(3)}
    want = coded([inputs[0], inputs[2]], dtype, op)
    for how in HOWS:
        with Rig(range(3), how, verify=how in ("shm", "tcp")) as rig:
            rig.view(range(3), (0, 2))
            ops = {
                m: Operation(inputs[m].copy(), dtype, op, compression="fp8", atomic=how == "tcp") for m in rig.members
            }
            for caller in [Caller.start(rig.members[m].exchange.run, made) for m, made in ops.items()]:
                caller.join()
            for made in ops.values():
                assert made.error is None
                assert made.array.tobytes() == want.tobytes(), how
            assert not any(member.divergences for member in rig.members.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", ["ring", "mixed ring"])
def test_halves_go_around_and_are_rounded_once(how: str, dtype: str) -> None:
    """By float32 partial sums; what is averaged is no half before the last of its chain has divided it."""
    inputs = {m: given(1, m, 0, 300_001, dtype) for m in range(3)}
    with Rig(range(3), how) as rig:
        rig.view(range(3))
        ops = {m: Operation(inputs[m].copy(), dtype, "avg", compression="fp32") for m in rig.members}
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
            caller.join()
        for op in ops.values():
            algorithms = rig.members[0].exchange.core.stream.pipeline.algorithms
            assert algorithms.of(op) is algorithms.route
            assert op.array.tobytes() == expected(list(inputs.values()), dtype, "avg").tobytes()


def coded_input(replica: int, count: int, dtype: str) -> np.ndarray:
    """Magnitudes over many binades; a NaN, an infinity, a zero block and subnormals where there is room for them."""
    chance = np.random.default_rng((replica, count))
    values = chance.standard_normal(count).astype(np.float32) * np.exp2(chance.integers(-30, 10, count), dtype="f4")
    for start, what in ((512, np.nan), (1024, np.inf), (1536, 0.0), (2048, 1e-42)):
        values[start : start + (256 if not what or what < 1 else 1)] = what
    if dtype == "float32":
        return values
    return torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.int16).numpy().view(DTYPES[dtype].carrier)


@pytest.mark.parametrize("wire", COMPRESSIONS)
def test_neither_modes_nor_defaults_of_pytorch_change_a_result(wire: str) -> None:
    """Of the thread that makes the first op of a kind, whose views and scratch memory stay for later ones."""
    inputs = {m: coded_input(m, 3000, "bfloat16") for m in range(3)}
    want = coded(list(inputs.values()), "bfloat16", "sum") if wire == "fp8" else None

    def call(member: int) -> list[Operation]:
        ops = [Operation(inputs[member].copy(), "bfloat16", "sum", compression=wire) for _ in range(2)]
        with torch.inference_mode(), torch.device("meta"):
            rig.members[member].exchange.run(ops[0])
        rig.members[member].exchange.run(ops[1])
        return ops

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with Rig(range(3)) as rig:
            rig.view(range(3))
            results: list[list[Operation]] = []
            for caller in [Caller.start(lambda m: results.append(call(m)), m) for m in rig.members]:
                caller.join()
    finally:
        torch.set_default_dtype(before)
    if want is None:
        want = expected(list(inputs.values()), "bfloat16", "sum")
    for first, second in results:
        assert first.error is second.error is None
        assert first.array.tobytes() == second.array.tobytes() == want.tobytes()


def test_a_group_of_one_has_the_same_bits_as_if_it_had_lost_the_others() -> None:
    x = coded_input(0, 3000, "float32")
    with Rig(range(1)) as rig:
        rig.view((0,))
        op = Operation(x.copy(), "float32", "avg", compression="fp8")
        rig.members[0].exchange.run(op)
    assert op.array.tobytes() == coded([x], "float32", "avg").tobytes()


@pytest.mark.parametrize(
    ("dtype", "op", "wire", "said"),
    [
        ("float64", "sum", "fp32", "compression='fp32' of float64: it is for floats of 32 bits and less"),
        ("int32", "sum", "fp32", "compression='fp32' of int32"),
        (
            "float64",
            "sum",
            "fp8",
            "compression='fp8' of float64: it is for float32, float16, bfloat16; leave compression out",
        ),
        ("int8", "sum", "fp8", "compression='fp8' of int8"),
        ("float32", "max", "fp8", "compression='fp8' with op='max': it is for sum and avg; leave compression out"),
        ("float32", "sum", "bf16", "compression='bf16' is not known; use one of input, fp32, fp8"),
    ],
)
def test_what_cannot_cross_in_a_form_is_refused(dtype: str, op: str, wire: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(said)):
        Operation(np.ones(4, dtype), dtype, op, compression=wire)


@pytest.mark.parametrize("how", HOWS)
def test_that_only_some_call_it_with_another_wire_is_an_error_that_says_so(how: str) -> None:
    with Rig(range(2), how) as rig:
        rig.view(range(2))
        ops = [Operation(np.ones(300_000, np.float16), "float16", "sum", compression=wire) for wire in ("input", "fp8")]
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in enumerate(ops)]:
            caller.join()
        ring = ", FTCOMM_ALGORITHM=ring" if "ring" in how else ""
        for op in ops:
            assert isinstance(op.error, MismatchError)
            assert f"replica 0: op 0, allreduce(op='sum'{ring}) of 300000 x float16" in str(op.error)
            assert f"replica 1: op 0, allreduce(op='sum', compression='fp8'{ring}) of 300000 x float16" in str(op.error)


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
    monkeypatch.setattr(buffer_pool, "_idle", [])
    with Rig(range(1)) as rig:
        rig.view((0,))
        for _ in range(3):
            rig.members[0].exchange.run(Operation(np.ones(300_000), "float64", "sum", atomic=True))
            assert [len(buffer) for buffer in buffer_pool._idle] == [2_400_000]
        rig.members[0].exchange.run(Operation(np.ones(500_000), "float64", "sum", atomic=True))
        assert [len(buffer) for buffer in buffer_pool._idle] == [4_000_000]
        rig.members[0].exchange.run(Operation(np.ones(5_000_000), "float64", "sum", atomic=True))
        assert not buffer_pool._idle  # more than what may lie idle
        rig.members[0].exchange.run(Operation(np.ones(65_536), "float64", "sum", atomic=True))
        assert not buffer_pool._idle  # one chunk: there was none


@pytest.mark.parametrize("way", ["ring", "auto"])
def test_members_that_disagree_on_the_way_are_told_so(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "ring":
        monkeypatch.setattr(Rig, "ring", lambda self, me, members: members if me == 1 else ())
    else:
        monkeypatch.setattr(Rig, "hosts", lambda self, me, members: ((0, 2), (1,)) if me == 1 else ())
    with Rig(range(3), "tcp") as rig:
        rig.view(range(3))
        ops = {m: ones(200_000) for m in rig.members}
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
            caller.join()
        for op in ops.values():
            assert isinstance(op.error, MismatchError)
            assert f"replica 1: op 0, allreduce(op='sum', FTCOMM_ALGORITHM={way}) of" in str(op.error)


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
        rig.members[1].exchange.resume(view, rig.peers(1, (0, 1, 2)), told)
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


def test_the_time_to_wait_for_a_view_begins_anew_with_each_freeze() -> None:
    """Also if the first one's ops were returned by `resume`, so that the driver has not looked around since."""
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
            driver.resumed(None)
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
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]  # which NumPy's are


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
        exchange.resume(GroupView(2, 0, (0, 1), frozenset((0, 1)), one_host=True), peers, progress)
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


def test_a_second_connection_replaces_the_first() -> None:
    with Rig(range(2), "tcp") as rig:
        writer = rig.members[0]
        unwelcome, far = socket_pair()
        life = rig.members[1].segment.nonce
        writer.exchange.admit(TcpMirrorWriter(far, 1, 1, life))
        rig.view(range(2))  # attaches again, for the same epoch
        assert far.fileno() == -1
        ops = [ones(), ones()]
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in enumerate(ops)]:
            caller.join()
        near, far = socket_pair()
        writer.exchange.admit(TcpMirrorWriter(far, 1, 1, life))
        again = TcpMirror(1, 1, near, lambda *args: None)
        again.drive(False)
        (peer,) = rig.members[1].exchange.member.peers.values()
        peer.close()  # the reader gives the connection up
        writer.exchange.submit(ones())
        deadline = time.monotonic() + DEADLINE
        while again.words[POSTED] != 1 << COUNTER | 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert again.words[POSTED] == 1 << COUNTER | 2
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
        while writer.segment.words[POSTED] != 1 << COUNTER | 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        writer.exchange.admit(TcpMirrorWriter(far, 1, 1, rig.members[1].segment.nonce))
        while not writer.lost and time.monotonic() < deadline:
            writer.exchange.wake()
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


def test_an_exchange_that_is_forgotten_while_it_drives_goes_when_that_is_over() -> None:
    """And not when the garbage collector comes, which may be much later: it holds as much memory as a segment."""
    standing, go_on = threading.Event(), threading.Event()

    def stalled(stall: Stall) -> None:
        standing.set()
        assert go_on.wait(DEADLINE)

    gc.collect()
    gc.disable()
    try:
        with Rig(range(2), op_timeout=0.1) as rig:
            rig.view(range(2))
            member = rig.members.pop(0)
            exchange, op = member.exchange, ones(4)
            exchange.driver._on_stall = stalled
            exchange.submit(op)
            assert standing.wait(DEADLINE)
            exchange.fail(RuntimeError("closed"))
            exchange.forget()
            go_on.set()
            assert op.wait(DEADLINE)
            worker = exchange.driver.worker.thread
            assert worker is not None
            worker.join(DEADLINE)
            member.segment.close()
            known = weakref.ref(exchange)
            del exchange, member, worker
            assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["tcp", "ring", "mixed"])
def test_a_view_change_keeps_the_connections_of_those_who_stay(how: str) -> None:
    """And goes on over them from the middle of ops, when who receives changes, too."""
    out: dict[int, list[Operation]] = {}
    todo = calls(3, 12, 1_500_000)
    with Rig((0, 1, 3), how) as rig:
        rig.view((0, 1, 3))
        first = rig.dials
        assert first == (4 if how == "mixed" else 6)
        callers = start(rig, 3, todo, out)
        for members in ((0, 1, 3), (0, 1, 3), (1, 3), (1, 3)):
            rig.view(members)
        assert rig.dials == first
        for m in (1, 3):
            callers[m].join()
        agree(out, [1, 3], 3)
        rig.members[2] = Member(2)
        rig.view((1, 2, 3))
        assert rig.dials == first + 4
        assert not [lost for m in (1, 3) for lost in rig.members[m].lost if lost[0] in (1, 3)]
