"""An exchange with real threads, each member one of its own in this process: views, calls that differ, connections."""

from __future__ import annotations

import gc
import random
import re
import socket
import threading
import time
import weakref

import numpy as np
import pytest

from ftcomm.bench.tune import ONE, RING, TWO, WAYS
from ftcomm.collective import buffer_pool, schedule
from ftcomm.collective.operation import Operation
from ftcomm.collective.scheduled import ScheduledOperation
from ftcomm.collective.watchdog import Stall
from ftcomm.errors import ArgumentError, MismatchError
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.segment import HOST, POSTED, TAKEN, sending
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.rigs import exchange as exchange_rig
from tests.rigs.exchange import DEADLINE, Caller, Member, Rig, socket_pair
from tests.rigs.exchange_calls import HOWS, _switch_often, agree, calls, given, ones, start  # noqa: F401


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
            pipeline = member.exchange.core.stream.pipeline
            chosen, algorithms = pipeline.course_of(op).algorithm, pipeline.algorithms
            ways.append((chosen is algorithms.two_shot, chosen is algorithms.route))

    with Rig(range(3), how) as rig:
        rig.view(range(3))
        for caller in [Caller.start(body, member) for member in rig.members.values()]:
            caller.join()
    last = (False, True) if how == "ring" else (True, False)
    first = (True, False) if how == "ring" else (False, False)  # whose members are not alike
    assert all(ways == [first, (True, False), first, last] for ways in found.values())


@pytest.mark.parametrize(  # of 5, 3, 2 and 4 members; the interleavings are others each time
    ("seed", "how"),
    [
        *((1, how) for how in (*HOWS, "loopback")),
        (0, "mixed ring"),
        *(pytest.param(0, how, marks=pytest.mark.sweep) for how in (*HOWS, "loopback") if how != "mixed ring"),
        *(pytest.param(seed, how, marks=pytest.mark.sweep) for seed in (2, 5) for how in (*HOWS, "loopback")),
    ],
)
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


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_view_changes_with_tasks_of_as_many_chunks_as_by_tcp(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_rig, "LAYOUT", sending(HOST))
    test_view_changes_at_random_moments(seed, "loopback")


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
            assert np.array_equal(ops[m].array, np.ones(wrong[m][0], wrong[m][1]))
            assert after[m].error is None
            assert (after[m].array == 3.0).all()
        message = str(ops[0].error)
        assert "atomic" not in message
        levels = "hosts" in how or how == "rows"
        way = ", FTCOMM_ALGORITHM=ring" if "ring" in how else ", FTCOMM_ALGORITHM=auto" if levels else ""
        assert f"replicas 0, 2: op 0, allreduce(op='sum'{way}) of 4 x float32" in message
        assert f"replica 1: op 0, allreduce(op={other[2]!r}{way}) of {other[0]} x {other[1]}" in message


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
        way = ", FTCOMM_ALGORITHM=ring" if "ring" in how else ", FTCOMM_ALGORITHM=auto" if how == "rows" else ""
        for op in ops:
            assert isinstance(op.error, MismatchError)
            assert f"replica 0: op 0, allreduce(op='sum'{way}) of 300000 x float16" in str(op.error)
            assert f"replica 1: op 0, allreduce(op='sum', compression='fp8'{way}) of 300000 x float16" in str(op.error)


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
        rig.members[0].exchange.fail(RuntimeError("removed"))
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


def test_who_dials_in_a_ring_when_the_other_has_taken_a_barrier_is_served() -> None:
    """In a ring members dial others than their neighbours when they need them, and one of two may be slower."""
    with Rig(range(4), "ring") as rig:
        rig.view(range(4))
        late, taken = rig.members[0].exchange.member.peers[1], rig.members[1].segment.words  # no neighbours
        assert isinstance(late, TcpMirror)
        dial = late.dial

        def dial_late() -> socket.socket:
            end = time.monotonic() + DEADLINE
            while taken[TAKEN] < (1 << COUNTER | 1):
                assert time.monotonic() < end
                time.sleep(0.001)
            return dial()

        late.dial = dial_late
        nothing = np.empty(0, np.uint8)
        ops = {
            m: ScheduledOperation(schedule.barrier((0, 1, 2, 3), m), nothing, nothing, "uint8", "", 0, 1)
            for m in rig.members
        }
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
            caller.join()
        assert all(op.done and op.error is None for op in ops.values())


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
