"""What the parts cost one by one, by pytest-benchmark: `make bench-micro` runs, saves and compares with the run before.

The name keeps this out of `pytest tests`; test_micro.py there runs each once, without timing. Processes and cores that
interfere are not here: that is what `ftcomm bench` is for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import pytest
import torch

from ftcomm.collective import schedule
from ftcomm.collective.operation import Operation
from ftcomm.collective.resume import resume_tasks
from ftcomm.control import messages as m
from ftcomm.control.coordinator import Coordinator
from ftcomm.control.coordinator_actions import CoordinatorAction, Persist, Send
from ftcomm.control.probe_schedule import Probe, ProbeOutcome, ProbeReason
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Addresses
from ftcomm.kernels.host.reduce import reduce
from ftcomm.recorder.layout import PROCESS_SHAPE, RETURNED, GroupKind
from ftcomm.recorder.recorder import Recorder
from ftcomm.sync.futex import Waiter, wake
from tests.bytecodes import mirrored_group

MEMBERS = 16
CHUNKS = 128  # of 64 MB
ALL = tuple(range(MEMBERS))


def progress() -> dict[int, m.Progress]:
    """Of an op that broke off halfway, one chunk further at every second member."""
    final = [(m.Final(ALL, ((1 << (CHUNKS // 2 + member % 2)) - 1).to_bytes(CHUNKS // 8, "little")),) for member in ALL]
    return {member: m.Progress(7, (m.OpProgress(7, final[member]),)) for member in ALL[1:]}


def test_message_encode(benchmark: Any) -> None:
    message = m.MemberProgress(3, "life", 1, progress()[1])
    assert benchmark(m.encode, message) == m.encode(message)


def test_message_decode(benchmark: Any) -> None:
    message = m.MemberProgress(3, "life", 1, progress()[1])
    assert benchmark(m.decode, m.encode(message)) == message


def test_a_thousand_ops_are_recorded(benchmark: Any) -> None:
    """Their calls and their returns, and a loop; a millisecond of all is a microsecond of each. To find the line of the
    script, in `Calls`, comes on top."""
    shape = PROCESS_SHAPE
    recorder = Recorder(mmap.mmap(-1, shape.size), shape)
    group, op = recorder.group("*", 0, GroupKind.JOB), Operation(np.ones(256, np.float32), "float32", "sum")
    op.place, op.caller = 7, 1  # as its submission does

    def record() -> None:
        for _ in range(1000):
            group.called(op, 1.0)
            group.returned(op, 2.0)

    benchmark(record)
    assert recorder.times[(op.record >> 3) + RETURNED] == 2.0


def test_plan_of_what_is_left(benchmark: Any) -> None:
    """Of 64 MB among 15 survivors."""
    tasks = benchmark(resume_tasks, 7, CHUNKS, progress())
    assert len(tasks) == CHUNKS // 2


def test_plan_of_an_allgather(benchmark: Any) -> None:
    """Of 64 MB among 16; made anew with every call."""
    plan = benchmark(schedule.allgather, 4 << 20, ALL, 0, False, 512 << 10, 1)
    assert plan


def test_view_change(benchmark: Any) -> None:
    """What the coordinator does when one of 16 is lost: decide, and tell 15 others, encoded."""

    address = Address("h", 1, "b", 0, 3, "0" * 32)

    def lose(coordinator: Coordinator) -> int:
        coordinator.disconnected(0, 1.0)
        actions = coordinator.probed(Probe(ProbeReason.SEARCH, (0, "life-0"), 0, address), ProbeOutcome.ENDED, 1.0)
        return sum(bool(m.encode(action.message)) for action in actions if isinstance(action, Send))

    told = benchmark.pedantic(lose, setup=lambda: ((formed(),), {}), rounds=200, warmup_rounds=5)
    assert told == MEMBERS - 1


def formed() -> Coordinator:
    """All members are in their first view."""
    timeouts = Timeouts.derive()
    coordinator = Coordinator(MEMBERS, 1, timeouts, views=[], now=0.0, lifetime=1)
    actions: list[CoordinatorAction] = []
    for member in ALL:
        address = Address("h", 1, "b", member, 3, "0" * 32)
        chain = (timeouts.heartbeat, timeouts.op_floor, timeouts.op)
        join = m.Join(member, f"life-{member}", Addresses.of((address,)), epoch=0, step=-1, timeouts=chain)
        actions += coordinator.receive(member, join, now=0.0)
    (view,) = (action.view for action in actions if isinstance(action, Persist))
    for member in ALL:
        coordinator.receive(member, m.Installed(view.epoch), now=0.0)
    return coordinator


def test_allreduce_without_its_waits(benchmark: Any) -> None:
    """Of 1 KB, by a group in a step loop: what the interpreter runs for it."""
    with mirrored_group() as group:
        benchmark(group.allreduce, np.zeros(256, np.float32))


@pytest.fixture
def words() -> memoryview:
    return memoryview(mmap.mmap(-1, 4096)).cast("Q")


def test_wait_for_a_word_that_is_there(benchmark: Any, words: memoryview) -> None:
    waiter = Waiter(words, 8, 2)
    address = ctypes.addressof(ctypes.c_char.from_buffer(words))
    words[0] = 5
    assert benchmark(waiter.until, words, 0, address, 5, 6, 1)


def test_wake_nobody(benchmark: Any, words: memoryview) -> None:
    """The call of the kernel that a waiting peer costs the writer of a word."""
    benchmark(wake, ctypes.addressof(ctypes.c_char.from_buffer(words)))


def test_wait_asleep(benchmark: Any) -> None:
    """There and back between two processes that sleep: a byte through a pipe each way, the floor of any wake-up."""
    here, there = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            while os.read(here[0], 1) == b"x":
                os.write(there[1], b"x")
        finally:
            os._exit(0)

    def back_and_forth() -> None:
        os.write(here[1], b"x")
        os.read(there[0], 1)

    try:
        benchmark(back_and_forth)
    finally:
        os.write(here[1], b"q")
        os.waitpid(child, 0)
        for fd in (*here, *there):
            os.close(fd)


@pytest.mark.parametrize("elements", [256, 128 << 10], ids=["1K", "512K"])
def test_reduce_on_the_host(benchmark: Any, elements: int) -> None:
    sources = [torch.ones(elements) for _ in range(2)]
    out = torch.empty(elements)
    benchmark(reduce, sources, out)
    assert np.all(out.numpy() == 2)
