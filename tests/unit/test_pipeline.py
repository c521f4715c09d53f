"""What can be done next, asked of a pipeline in states that threads reach rarely."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from ftcomm.collective.algorithms import Algorithms
from ftcomm.collective.gate import Gate
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import Pipeline
from ftcomm.collective.plan import GroupView
from ftcomm.collective.publisher import Publisher
from ftcomm.collective.resume import Task
from ftcomm.kernels.epochs import COUNTER
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.settings.tuning import MEMBERS as MOST
from ftcomm.simulation.memory import CHUNK, TinyMemory
from ftcomm.transport.segment import CHUNK as REAL_CHUNK
from ftcomm.transport.segment import (
    HEADER,
    HOP,
    HOST,
    POSTED,
    REDUCED,
    SENT,
    SLOTS,
    SPAN,
    STAGED,
    TAKEN,
    Memory,
    sending,
)
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.bytecodes import bytecodes, mirrored_group
from tests.rigs.exchange import socket_pair

MEMBERS = (0, 1, 2)


class Pipelines:
    """The pipeline of member 0, and the words of all."""

    def __init__(self, *, one_host: bool) -> None:
        self.memories = {m: TinyMemory(m, CHUNK * len(MEMBERS)) for m in MEMBERS}
        view = GroupView(1, 0, MEMBERS, frozenset(MEMBERS), one_host)
        peers = {m: self.memories[m] for m in MEMBERS if m}
        algorithms = Algorithms(view, self.memories, Reducer())  # type: ignore[arg-type]
        self.pipeline = Pipeline(view, self.memories[0], peers, algorithms)  # type: ignore[arg-type]
        for m in MEMBERS:
            for word in (POSTED, REDUCED, TAKEN):
                self.memories[m].words[word] = 1 << COUNTER

    def post(self, op: Operation) -> None:
        self.pipeline.unposted.append(op)
        while self.pipeline.unposted and (posted := self.pipeline.to_post()) is not None:
            slot = self.pipeline.begin(posted)
            self.pipeline.posted = slot.index + 1
            op.verified = True

    def raise_all(self, word: int, count: int) -> None:
        for m in MEMBERS:
            self.memories[m].words[word] = 1 << COUNTER | count


def all_reduce(chunks: int) -> Operation:
    op = Operation(np.zeros(chunks * CHUNK * len(MEMBERS) // 8, np.int64), "int64", "sum", CHUNK * len(MEMBERS))
    op.number = 0
    return op


def test_a_task_takes_no_step_before_the_one_in_front_of_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word that it raises would tell of both. What the first waits for comes just after it was looked at."""
    of = Pipelines(one_host=False)
    pipeline = of.pipeline
    of.post(all_reduce(2))
    of.raise_all(POSTED, 2)
    while pipeline.arrived < pipeline.posted and (slot := pipeline.to_arrive()) is not None:
        pipeline.arrived = slot.index + 1
    looked: list[int] = []
    is_open = Gate.is_open

    def late(self: Gate, count: int) -> bool:
        looked.append(count)
        return is_open(self, count) and (count > 1 or len(looked) > 1)

    monkeypatch.setattr(Gate, "is_open", late)
    assert [slot.index for slot in pipeline.to_step()] == []
    stepped = []
    for slot in pipeline.to_step():
        stepped.append(slot.index)
        pipeline.step(slot)
    assert stepped == [0, 1]


def test_a_word_that_would_fall_is_an_error() -> None:
    of = Pipelines(one_host=True)
    publisher = Publisher(of.pipeline, of.memories[0], [], lambda *lost: None, compares=False)  # type: ignore[arg-type]
    publisher.publish(REDUCED, 2)
    with pytest.raises(AssertionError, match="goes from"):
        publisher.publish(REDUCED, 1)


@pytest.mark.parametrize("arrived", [0, 1])
def test_somebody_is_in_the_way_of_a_task_without_steps_in_all_its_stages(arrived: int) -> None:
    of = Pipelines(one_host=False)
    pipeline = of.pipeline
    op = all_reduce(1)
    op.tasks = (Task(0, 1, None),)  # to be copied, which takes no steps
    of.post(op)
    assert not pipeline.slots[0].gates
    pipeline.arrived = arrived
    gate, count = pipeline.obstacle(op)
    assert (gate.word, count) == (POSTED, 1)
    assert [peer.replica for peer in gate.behind(count)] == [1, 2]
    of.raise_all(POSTED, 1)
    assert not gate.behind(count)


@pytest.mark.parametrize(("members", "chunks"), [(2, 1), (3, SENT), (9, SENT)])
def test_a_task_by_tcp_on_one_host_has_more_chunks_where_members_send_slices(members: int, chunks: int) -> None:
    everybody = tuple(range(members))
    memories: dict[int, Any] = {m: TinyMemory(m, CHUNK) for m in everybody}
    for memory in memories.values():
        memory.layout = sending(HOST)
    view = GroupView(1, 0, everybody, frozenset(everybody))
    peers = {m: memories[m] for m in everybody if m}
    pipeline = Pipeline(view, memories[0], peers, Algorithms(view, memories, Reducer()))
    op = Operation(np.zeros(8 * CHUNK, np.uint8), "uint8", "sum", CHUNK)
    op.verified = True
    pipeline.unposted.append(op)
    assert pipeline.to_post() is op
    assert pipeline.begin(op).span == chunks
    room = SENT * REAL_CHUNK
    memory = Memory()
    memory.layout = sending(HOST)
    assert memory.place(POSTED, room, room) == HEADER + room
    for start, nbytes in ((room, room + 1), (room + 1, room), (STAGED, 1)):
        with pytest.raises(ValueError, match="a payload of"):
            memory.place(POSTED, start, nbytes)


@pytest.mark.parametrize("by_ring", [False, True])
@pytest.mark.parametrize(
    "members", [2, 9, 16, 17, 24, 32, 33, 64, 65, 128, 129, 300, pytest.param(MOST, marks=pytest.mark.sweep)]
)
def test_no_hop_of_a_large_op_between_hosts_is_small(members: int, by_ring: bool) -> None:
    """Tasks have as many chunks as that takes, while two of them fit into the staging: a slot is then used again
    when those have taken what it held who read it, and no two that are under way share a byte."""
    everybody, chunk = tuple(range(members)), 16384
    scale = REAL_CHUNK // chunk
    memories: dict[int, Any] = {m: TinyMemory(m, chunk, members=members) for m in everybody}
    for memory in memories.values():
        for word in memory.published:
            memory.words[word] = 1 << COUNTER
    view = GroupView(1, 0, everybody, frozenset(everybody), False, everybody if by_ring else ())
    peers = {m: memories[m] for m in everybody if m}
    pipeline = Pipeline(view, memories[0], peers, Algorithms(view, memories, Reducer()))
    near, far = socket_pair()
    reader = TcpMirrorWriter(far, 1, 1)  # type: ignore[arg-type]
    Publisher(pipeline, memories[0], [], lambda *lost: None, compares=False).welcome(reader)
    assert reader.slots == pipeline.staged
    near.close()
    reader.close()
    op = Operation(np.zeros(64 * chunk, np.uint8), "uint8", "sum", chunk)
    op.number, op.verified = 0, True
    pipeline.algorithms.of = lambda _: pipeline.algorithms.route or pipeline.algorithms.two_shot  # type: ignore[method-assign]
    pipeline.unposted.append(op)
    rooms: list[set[int]] = []
    while pipeline.posted < pipeline.staged and pipeline.to_post() is not None:
        slot = pipeline.begin(op)
        pipeline.posted = slot.index + 1
        rooms.append(set(range(slot.chunk, slot.chunk + slot.span)))
        views = slot.views
        bounds = views.bounds if by_ring else views.slices.values()
        hop = min(stop - start for start, stop in bounds) * scale
        assert hop > min(HOP, 64 * HOP // members) - 64 * scale, f"{hop} bytes"  # slices begin on cache lines
        assert slot.span == SPAN or members > 16
    assert len(rooms) == pipeline.staged == (SLOTS if members <= 16 else 4 if members <= 32 else 2)
    assert len(set.union(*rooms)) == sum(map(len, rooms))
    assert max(set.union(*rooms)) < SLOTS * SPAN
    pipeline.arrived = pipeline.taken = 1
    assert pipeline.to_post() is None
    for m in (1,) if by_ring else everybody:
        memories[m].words[TAKEN] = 1 << COUNTER | 1
    assert pipeline.to_post() is op
    assert pipeline.begin(op).chunk == min(rooms[0])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="another Python has other bytecodes")
@pytest.mark.parametrize(("members", "most"), [(2, 664), (4, 1139)])
def test_a_task_runs_no_more_bytecodes_than_it_needs(members: int, most: int) -> None:
    """`python -m tests.bytecodes` says which functions run them. Who needs more says why, or takes some away."""
    fewer, more = 8, 16  # tasks, of one chunk each

    def counted(tasks: int) -> int:
        array = np.zeros(tasks * REAL_CHUNK // 4, np.float32)
        with mirrored_group(members) as group:
            return bytecodes(lambda: group.allreduce(array)).total()

    assert (counted(more) - counted(fewer)) / (more - fewer) <= most


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="another Python has other bytecodes")
def test_an_op_of_two_tasks_runs_no_more_bytecodes_than_it_needs() -> None:
    array = np.zeros(2 * REAL_CHUNK // 4, np.float32)
    with mirrored_group(4) as group:
        assert bytecodes(lambda: group.allreduce(array)).total() <= 3553
