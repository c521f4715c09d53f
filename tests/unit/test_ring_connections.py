"""In a ring a member is connected to its neighbours alone, until an op needs somebody else."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.watchdog import Stall
from ftcomm.control.views import Address
from ftcomm.errors import MismatchError
from ftcomm.transport import connect
from ftcomm.transport.connector import Connector
from ftcomm.transport.segment import POSTED
from tests.rigs.exchange import DEADLINE, Caller, Member, Rig
from tests.unit.test_data_plane import Way, a_view, local_data_plane

LARGE, SMALL = 300_000, 100  # of float64: several chunks that go around, and an op that does not
MEMBERS = range(6)  # in the rig's ring 0 2 4 1 3 5


def reduce(rig: Rig, members: list[int], count: int = LARGE, times: int = 3) -> None:
    ops = {
        m: [Operation(np.full(count, 2.0**m), "float64", "sum", atomic=n == 1) for n in range(times)] for m in members
    }
    for m in members:
        for op in ops[m]:
            rig.members[m].exchange.submit(op)
    for m in members:
        for op in ops[m]:
            assert op.wait(DEADLINE)
            assert op.error is None
            assert (op.array == float(sum(1 << other for other in members))).all()


def connected(rig: Rig, m: int) -> set[int]:
    return {other for other, peer in rig.members[m].exchange.member.peers.items() if peer.is_open}  # type: ignore[attr-defined]


@pytest.mark.parametrize("verify", [False, True])
def test_neighbours_alone_are_connected_and_a_loss_changes_two_of_them(verify: bool) -> None:
    with Rig(MEMBERS, "ring", verify=verify) as rig:
        rig.view(MEMBERS)
        reduce(rig, list(MEMBERS))
        assert rig.dials == 12
        assert [connected(rig, m) for m in (0, 2, 4, 1, 3, 5)] == [{5, 2}, {0, 4}, {2, 1}, {4, 3}, {1, 5}, {3, 0}]
        rig.view([0, 2, 3, 4, 5])  # without 1, between 4 and 3
        reduce(rig, [0, 2, 3, 4, 5])
        assert rig.dials == 14
        assert (connected(rig, 4), connected(rig, 3)) == ({2, 3}, {4, 5})
        rig.members[1] = Member(1, verify=verify)  # its next life
        rig.view(MEMBERS)
        reduce(rig, list(MEMBERS))
        assert rig.dials == 18  # to 1 and from it
        assert not [lost for member in rig.members.values() for lost in member.lost]
        assert not [word for member in rig.members.values() for word in member.divergences]


def test_an_op_that_needs_all_connects_all_and_they_stay() -> None:
    with Rig(MEMBERS, "ring") as rig:
        rig.view(MEMBERS)
        reduce(rig, list(MEMBERS))
        reduce(rig, list(MEMBERS), SMALL)
        assert rig.dials == 30
        reduce(rig, list(MEMBERS))
        rig.view([0, 1, 2, 4, 5])
        reduce(rig, [0, 1, 2, 4, 5], SMALL)
        assert rig.dials == 30


@pytest.mark.parametrize("other", [(SMALL, "sum"), (LARGE + 1, "sum"), (LARGE, "max")])
def test_all_hear_of_a_call_that_differs_in_the_same_words(other: tuple[int, str]) -> None:
    """Also from one who goes another way, and from whom nobody but its neighbours hears by itself."""
    with Rig(MEMBERS, "ring") as rig:
        rig.view(MEMBERS)
        ops = {m: Operation(np.ones(LARGE), "float64", "sum") for m in MEMBERS}
        ops[4] = Operation(np.ones(other[0]), "float64", other[1])
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
            caller.join()
        for op in ops.values():
            assert isinstance(op.error, MismatchError)
            assert str(op.error) == str(ops[0].error)
            assert (op.array == 1.0).all()
        assert f"replicas 0, 1, 2, 3, 5: op 0, allreduce(op='sum', FTCOMM_ALGORITHM=ring) of {LARGE}" in str(
            ops[0].error
        )
        reduce(rig, list(MEMBERS))


def test_who_waits_for_another_waits_for_the_left_neighbour_and_so_on_until_who_has_not_called() -> None:
    with Rig(MEMBERS, "ring") as rig:
        rig.view(MEMBERS)
        ops = {m: Operation(np.ones(LARGE), "float64", "sum") for m in MEMBERS if m != 1}
        for m, op in ops.items():
            rig.members[m].exchange.submit(op)
        for m in ops:
            expected = {0: 5, 2: 0, 4: 1, 3: 1, 5: 3}[m]
            end = time.monotonic() + DEADLINE
            while (stall := rig.members[m].exchange.waiting(0.02)) != Stall(1, 0, (expected,)):
                assert time.monotonic() < end, stall
                time.sleep(0.001)
        rig.members[1].exchange.run(Operation(np.ones(LARGE), "float64", "sum"))
        for op in ops.values():
            assert op.wait(DEADLINE)


def test_an_engine_dials_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way()
    lazy: dict[int, bool] = {}

    def connect(me: int, here: object, replica: int, there: Address, *, epoch: int, **options: object) -> object:
        lazy[replica] = bool(options["lazy"])
        return way.connect(me, here, replica, there, epoch=epoch)

    monkeypatch.setattr("ftcomm.transport.connector.connect", connect)
    subject = local_data_plane("ring")
    subject.reach(a_view(1, "0 1 2 3 4"))
    assert lazy == {1: False, 2: True, 3: True, 4: False}


def test_who_enters_a_view_last_hears_what_its_neighbour_has_told_before() -> None:
    """Its connection is there before it knows of whom that tells."""
    with Rig(MEMBERS, "ring") as rig:
        rig.epoch, members, late = 1, tuple(MEMBERS), 3
        peers = {m: rig.peers(m, members) for m in MEMBERS}
        progress = {m: rig.members[m].exchange.progress() for m in MEMBERS}
        ops = {m: Operation(np.ones(LARGE), "float64", "sum") for m in MEMBERS}

        def enter(m: int) -> None:
            view = GroupView(1, m, members, frozenset(members), False, rig.ring(m, members))
            rig.members[m].exchange.enter(view, peers[m], progress)
            rig.members[m].exchange.submit(ops[m])

        for m in MEMBERS:
            if m != late:
                enter(m)
        left = rig.members[1].exchange.core.stream  # of 3
        assert left is not None
        end = time.monotonic() + DEADLINE
        while any(not told[POSTED] for peer, told in left.publisher.relayed if peer.replica != late):
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(0.1)  # it is sent, and a thread that receives would have done so
        enter(late)
        for op in ops.values():
            assert op.wait(DEADLINE), "somebody waits for what was told too early"
            assert op.error is None


def test_a_neighbour_that_was_lost_leaves_no_memory_behind() -> None:
    """Four megabytes each, which are not to wait until somebody looks for circles."""
    gc.collect()
    gc.disable()
    try:
        with Rig(range(4), "ring") as rig:
            rig.view(range(4))
            lost = weakref.ref(rig.members[0].exchange.member.peers[1])
            rig.view([0, 2, 3])
            end = time.monotonic() + DEADLINE
            while lost() is not None and time.monotonic() < end:
                time.sleep(0.01)
            assert lost() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("mode", "rdma", "boots", "wait"),
    [
        ("tcp", False, "aa", True),
        ("auto", False, "ab", True),
        ("auto", False, "aa", False),  # they may share memory
        ("auto", True, "ab", False),
        ("shm", False, "aa", False),
        ("nixl", True, "ab", False),
    ],
)
def test_others_are_dialled_late_if_all_are_reached_by_tcp(
    mode: str, rdma: bool, boots: str, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "rdma_available", lambda: rdma)
    here, there = (Address("127.0.0.1", 1, boot, 1, 3, "0" * 32) for boot in boots)
    connector = Connector(0, here, mode=mode, on_lost=lambda *told: None)
    assert connector.may_wait([there]) is wait
