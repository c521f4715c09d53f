"""What a member that gets no memory to stage in means to it and to the others, and how little small ops take."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.errors import TransportError
from ftcomm.transport.segment import NEAR
from tests.rigs.exchange import Caller, Member, Rig


class Fallocate:
    """The system call, which has no memory for the descriptors in `refused`."""

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.allocate = os.posix_fallocate

    def __call__(self, fd: int, offset: int, length: int) -> None:
        if fd in self.refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.allocate(fd, offset, length)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Fallocate:
    allocate = Fallocate()
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    return allocate


def an_op(member: Member, nbytes: int) -> Operation:
    return Operation(np.full(nbytes // 4, 1 << member.replica, np.float32), "float32", "sum")


def run(member: Member, op: Operation) -> None:
    member.exchange.run(op)


@pytest.mark.parametrize("before", [0, 1000])  # bytes of an op for which there was enough
@pytest.mark.parametrize(("how", "nbytes"), [("shm", 4000), ("shm", 3 << 20), ("tcp", 4000), ("tcp", 3 << 20)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_who_gets_no_memory_fails_alone_and_the_others_finish_the_op(
    replicas: int, how: str, nbytes: int, before: int, memory: Fallocate
) -> None:
    with Rig(range(replicas), how) as rig:
        rig.view(range(replicas))
        if before:
            for caller in [Caller.start(run, member, an_op(member, before)) for member in rig.members.values()]:
                caller.join()
        poor = rig.members[1]
        memory.refused.add(poor.segment.fd)
        ops = {m: an_op(member, nbytes) for m, member in rig.members.items()}
        callers = {m: Caller.start(run, member, ops[m]) for m, member in rig.members.items()}
        callers.pop(1).join()
        assert isinstance(ops[1].error, TransportError)
        assert "of shared memory to stage in: No space left on device. Free memory" in str(ops[1].error)
        assert (ops[1].array == 2).all()  # INPUT still
        assert not any(op.done for m, op in ops.items() if m != 1)
        rig.view(m for m in range(replicas) if m != 1)
        for m, caller in callers.items():
            caller.join()
            assert ops[m].error is None
            assert (ops[m].array == sum(1 << other for other in callers)).all()


@pytest.mark.parametrize("later", [0, 2])  # who has no memory for what members of other hosts read
def test_memory_for_members_of_other_hosts_is_taken_when_there_are_such(later: int, memory: Fallocate) -> None:
    """The first view is of one host; the next one has a member of another, so that each uses more slots."""
    with Rig(range(3), "shm") as rig:
        rig.view((0, 2))
        both = (rig.members[0], rig.members[2])
        for caller in [Caller.start(run, member, an_op(member, 16 << 20)) for member in both]:
            caller.join()
        near = taken(both[0])
        assert near <= 3 * 4096 + 2 * NEAR * (512 << 10)
        rig.how = "tcp"
        memory.refused.add(rig.members[later].segment.fd)
        rig.view(range(3))  # for that nobody needs more
        ops = {m: an_op(member, 16 << 20) for m, member in rig.members.items()}
        callers = {m: Caller.start(run, member, ops[m]) for m, member in rig.members.items()}
        callers.pop(later).join()
        assert isinstance(ops[later].error, TransportError)
        rig.view(callers)
        for m, caller in callers.items():
            caller.join()
            assert (ops[m].array[:: 1 << 10] == ops[m].array[0]).all() or ops[m].error is None
            assert taken(rig.members[m]) > near


def taken(member: Member) -> int:
    return os.fstat(member.segment.fd).st_blocks * 512


@pytest.mark.parametrize(("how", "rooms"), [("shm", NEAR), ("loopback", NEAR), ("alike", 8)])
def test_small_ops_take_a_page_of_each_slot(how: str, rooms: int) -> None:
    with Rig(range(2), how) as rig:
        rig.view(range(2))
        for _ in range(2 * rooms):
            for caller in [Caller.start(run, member, an_op(member, 1024)) for member in rig.members.values()]:
                caller.join()
        assert {taken(member) for member in rig.members.values()} == {4096 + rooms * 4096}
