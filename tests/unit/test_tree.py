"""The tree of groups of many members: its shape, when it is chosen, what comes of it, and who sends what to whom."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tests.rigs.exchange
from ftcomm.collective import schedule
from ftcomm.collective.algorithms import Algorithms
from ftcomm.collective.operation import Operation, stamp_of
from ftcomm.collective.pipeline import Pipeline
from ftcomm.collective.plan import GroupView
from ftcomm.collective.publisher import Publisher
from ftcomm.collective.scheduled import ScheduledOperation
from ftcomm.collective.tree import tree
from ftcomm.errors import MismatchError
from ftcomm.kernels.call_codes import UNKNOWN
from ftcomm.kernels.epochs import COUNTER
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.settings.tuning import BUILT_IN, EVER, MEMBERS, differ
from ftcomm.simulation.memory import CHUNK, TinyMemory
from ftcomm.transport.base import MirrorWriter
from ftcomm.transport.segment import CHUNK as REAL_CHUNK
from ftcomm.transport.segment import GATHERED, POSTED, SLOTS, SPAN, TAKEN, TAKEN_DOWN, TAKEN_UP, TREE, Segment
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.rigs.exchange import DEADLINE, Caller, Rig, socket_pair

ALWAYS = ((MEMBERS, EVER),)


@pytest.mark.parametrize("fan", [1, 2, 4, 8, 300])
def test_all_members_are_in_the_tree_once(fan: int) -> None:
    for count in (1, 2, 3, 17, 24, 64, 256):
        members = tuple(range(3, 3 + 2 * count, 2))
        places = tree(members, fan)
        assert tuple(sorted(places)) == members
        assert [m for m in members if places[m].parent < 0] == [members[0]]
        for member, place in places.items():
            assert len(place.children) <= fan
            assert place.below[0] == member
            assert place.below == members[members.index(member) :][: len(place.below)]  # neighbours
            assert sorted(m for child in place.children for m in places[child].below) == list(place.below[1:])
            assert all(places[child].parent == member for child in place.children)
            assert [m for m in place.children if not places[m].children] == list(place.leaves)


def depth(members: int, fan: int) -> int:
    places = tree(tuple(range(members)), fan)

    def steps(member: int) -> int:
        return 0 if member == 0 else 1 + steps(places[member].parent)

    return max(map(steps, places))


def test_the_way_up_grows_with_the_logarithm() -> None:
    assert [depth(members, BUILT_IN.tree_fan) for members in (17, 21, 32, 64, 85, 256, 1024)] == [2, 2, 3, 3, 3, 4, 5]


def view(count: int, one_host: bool = False, ring: bool = False, me: int = 0) -> GroupView:
    members = tuple(range(count))
    return GroupView(1, me, members, frozenset(members), one_host, members if ring else ())


def test_there_is_a_tree_between_hosts_beyond_16_members() -> None:
    assert [view(count).tree for count in (2, 16, 17, 1024)] == [0, 0, 64 << 10, 64 << 10]
    assert view(64, one_host=True).tree == 0  # to read another word costs little there
    assert view(64, ring=True).tree == 0  # connected to neighbours alone


def test_members_of_a_ring_say_that_they_have_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one that has FTCOMM_ALGORITHM=ring alone would be waited for, and never hear why."""
    for members in (16, 17):
        monkeypatch.setattr(tests.rigs.exchange, "Segment", functools.partial(Segment, members=members))
        said = {way: tests.rigs.exchange.data_plane("tcp", algorithm=way)[1].here.tuning for way in ("auto", "ring")}
        assert differ(said["auto"], said["ring"]) == (members > 16), said


@pytest.mark.parametrize("points", ["tree", "tree_on_one_host"])
def test_members_of_a_small_ring_say_so_where_a_file_asks_for_a_tree(points: str) -> None:
    """Of as few members as it names."""
    tuning = dataclasses.replace(BUILT_IN, **{points: ((5, 1 << 10), (MEMBERS, 0))})
    said = [
        tests.rigs.exchange.data_plane("tcp", algorithm=way, tuning=tuning)[1].here.tuning for way in ("auto", "ring")
    ]
    assert differ(*said)


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Every view of a rig has a tree with so many children of each."""

    def always(fan: int) -> None:
        tuning = dataclasses.replace(BUILT_IN, tree=ALWAYS, tree_on_one_host=ALWAYS, tree_fan=fan)
        monkeypatch.setattr(tests.rigs.exchange, "GroupView", functools.partial(GroupView, tuning=tuning))

    return always


def call(rig: Rig, make: Callable[[int], Operation], members: Iterable[int] | None = None) -> dict[int, Operation]:
    """An op of all, or of these, each in a thread of its own."""
    members = rig.members if members is None else members
    ops = {m: make(m) for m in members}
    for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
        caller.join()
    return ops


def summed(inputs: dict[int, np.ndarray[Any, Any]], fan: int) -> np.ndarray[Any, Any]:
    """By the order that the tree has: each adds what its children have, in their order."""
    places = tree(tuple(sorted(inputs)), fan)

    def below(member: int) -> np.ndarray[Any, Any]:
        total = inputs[member].astype(np.float32)
        for child in places[member].children:
            total = total + below(child)
        return total

    return below(min(inputs))


@pytest.mark.parametrize(
    ("how", "fan"), [("shm", 1), ("tcp", 2), ("alike", 1), ("mixed", 1), ("loopback", 2), ("hosts", 2)]
)
def test_all_have_the_bytes_of_the_same_order(how: str, fan: int, trees: Callable[[int], None]) -> None:
    trees(fan)
    inputs = {m: np.random.default_rng(m).standard_normal(700, np.float32) for m in range(6)}
    with Rig(range(6), how) as rig:
        rig.view(range(6))
        for _ in range(20):  # more than there are slots
            ops = call(rig, lambda m: Operation(inputs[m].copy(), "float32", "sum"))
            assert {op.array.tobytes() for op in ops.values()} == {summed(inputs, fan).tobytes()}
        halves = {m: x.astype(ml_dtypes.bfloat16) for m, x in inputs.items()}
        ops = call(rig, lambda m: Operation(halves[m].view(np.uint16).copy(), "bfloat16", "sum"))
        want = summed(halves, fan).astype(ml_dtypes.bfloat16)  # rounded once
        assert {op.array.tobytes() for op in ops.values()} == {want.tobytes()}
        left = (0, 1, 3, 4, 5)
        rig.view(left, (1, 3, 5))  # neither the top nor a leaf contributes, and another is gone
        for kind, dtype, want in (("avg", "float32", 3.0), ("max", "int64", 5), ("product", "float32", 15.0)):
            ops = call(rig, lambda m, kind=kind, dtype=dtype: Operation(np.full(9, m, dtype), dtype, kind), left)  # type: ignore[misc]
            assert {tuple(op.array) for op in ops.values()} == {(want,) * 9}
            assert {op.spans() for op in ops.values()} == {((0, 9, (1, 3, 5)),)}


def barrier(me: int) -> Operation:
    return ScheduledOperation(
        schedule.barrier((0, 1, 2, 3, 4), me), np.empty(0, np.uint8), np.empty(0, np.uint8), "uint8", "", 0, 1
    )


@pytest.mark.parametrize(("how", "odd"), [("shm", 0), ("tcp", 0), ("tcp", 1), ("tcp", 4), ("mixed", 1), ("mixed", 2)])
def test_all_learn_of_a_call_that_differs(how: str, odd: int, trees: Callable[[int], None]) -> None:
    """Of the top, of one between, of a leaf: in its size, by an op that does not go through the tree, or both ways."""
    trees(2)

    def small(m: int) -> Operation:
        return Operation(np.full(10, 1.0, np.float32), "float32", "sum")

    other: list[Callable[[int], Operation]] = [
        lambda m: Operation(np.full(11, 1.0, np.float32), "float32", "sum"),
        lambda m: Operation(np.full(10, 1, np.int32), "int32", "sum"),
        lambda m: Operation(np.full(300_000, 1.0, np.float32), "float32", "sum"),
        barrier,
    ]
    with Rig(range(5), how) as rig:
        rig.view(range(5))
        for make in other:
            for usual, unusual in ((small, make), (make, small)):
                ops = call(rig, lambda m, a=usual, b=unusual: (b if m == odd else a)(m))  # type: ignore[misc]
                assert {type(op.error) for op in ops.values()} == {MismatchError}
                said = {str(op.error) for op in ops.values()}
                assert len(said) == 1
                assert f"replica {odd}: op" in said.pop()
                ops = call(rig, small)  # the group goes on
                assert {tuple(op.array) for op in ops.values()} == {(5.0,) * 10}


@pytest.mark.parametrize(("how", "odd"), [("tcp", 0), ("tcp", 4), ("mixed", 3)])
def test_calls_behind_one_that_differs_wait_until_all_know_of_it(
    how: str, odd: int, trees: Callable[[int], None]
) -> None:
    """What is posted to all would else tell of a call that not all have been sent."""
    trees(2)
    with Rig(range(5), how) as rig:
        rig.view(range(5))
        for _ in range(2):
            ops: dict[int, list[Operation]] = {}
            for m in rig.members:
                counts = (10, 10 + (m == odd), 300_000, 20, 300_000)
                ops[m] = [Operation(np.full(count, 1.0, np.float32), "float32", "sum") for count in counts]

            def body(m: int, ops: dict[int, list[Operation]] = ops) -> None:
                for op in ops[m]:
                    rig.members[m].exchange.submit(op)
                for op in ops[m]:
                    rig.members[m].exchange.wait(op, 60)

            for caller in [Caller.start(body, m) for m in rig.members]:
                caller.join()
            said = {str(some[1].error) for some in ops.values()}
            assert len(said) == 1
            assert f"replica {odd}: op" in said.pop()
            for some in ops.values():
                assert [type(op.error) for op in some] == [type(None), MismatchError, *[type(None)] * 3]
                assert all((op.array == 5).all() for op in (some[0], *some[2:]))
            assert not any(member.lost for member in rig.members.values())


def test_calls_of_which_one_has_no_step_are_alike(trees: Callable[[int], None]) -> None:
    """And two of different steps are not, though no parent has a child of another step."""
    trees(1)

    def at(m: int, steps: dict[int, int]) -> Operation:
        op = Operation(np.full(10, 1.0, np.float32), "float32", "sum")
        op.stamp = stamp_of(steps[m]) if m in steps else UNKNOWN
        return op

    with Rig(range(3), "tcp") as rig:
        rig.view(range(3))
        for _ in range(3):
            ops = call(rig, lambda m: at(m, {0: 4, 2: 4}))
            assert {tuple(op.array) for op in ops.values()} == {(3.0,) * 10}
        ops = call(rig, lambda m: at(m, {0: 4, 2: 5}))
        assert {type(op.error) for op in ops.values()} == {MismatchError}


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """How many frames of each word were sent."""
    sent: Counter[int] = Counter()
    send = TcpMirrorWriter.send

    def counted(self: TcpMirrorWriter, word: int, *args: Any) -> None:
        sent[word] += 1
        send(self, word, *args)

    monkeypatch.setattr(TcpMirrorWriter, "send", counted)
    return sent  # type: ignore[return-value]


def test_as_many_frames_as_lines_of_the_tree(trees: Callable[[int], None], frames: Counter[int]) -> None:
    """Two rounds up and down. Without the tree there are two frames from each to each."""
    trees(2)
    with Rig(range(7), "alike") as rig:
        rig.view(range(7))
        for _ in range(10):
            call(rig, lambda m: Operation(np.ones(10, np.float32), "float32", "sum"))
        assert sum(frames.values()) == 10 * 4 * 6
        assert frames[POSTED] == frames[TAKEN] == 10 * 4  # of leaves
        assert sum(frames[word] for word in TREE) == 10 * (2 * 2 + 2 * 6)


@pytest.mark.parametrize(("how", "late"), [("tcp", 0), ("tcp", 1), ("tcp", 5), ("mixed", 2), ("mixed", 6)])
def test_waits_lead_to_who_has_not_called(how: str, late: int, trees: Callable[[int], None]) -> None:
    """Each waits for a child or its parent, and one who waits for nobody is at the end, whom the coordinator and
    `ftcomm why` find so."""
    trees(2)

    def small() -> Operation:
        return Operation(np.ones(10, np.float32), "float32", "sum")

    with Rig(range(7), how) as rig:
        rig.view(range(7))
        call(rig, lambda m: small())
        ops = {m: small() for m in rig.members if m != late}
        for m, op in ops.items():
            rig.members[m].exchange.submit(op)
        places = tree(tuple(range(7)), 2)
        for m in ops:
            below = [child for child in places[m].children if late in places[child].below]
            end = time.monotonic() + DEADLINE
            while (stall := rig.members[m].exchange.waiting(0.02)) is None or stall.waiting_on != (
                below[0] if below else places[m].parent,
            ):
                assert time.monotonic() < end, stall
                time.sleep(0.001)
        rig.members[late].exchange.run(small())
        for op in ops.values():
            assert op.wait(DEADLINE)


@pytest.mark.parametrize("compares", [(0,), (3,), tuple(range(5))])
def test_results_are_compared_whoever_asks_for_it(
    compares: tuple[int, ...], trees: Callable[[int], None], frames: Counter[int]
) -> None:
    """Who compares gets what the others have taken from all of them, before its op returns."""
    trees(2)
    with Rig(range(5), "tcp") as rig:
        for m in compares:
            rig.members[m] = tests.rigs.exchange.Member(m, verify=True)
        rig.view(range(5))
        for _ in range(12):
            ops = call(rig, lambda m: Operation(np.full(10, m, np.float32), "float32", "sum"))
            assert {tuple(op.array) for op in ops.values()} == {(10.0,) * 10}
        assert frames[TAKEN] == frames[POSTED] == 12 * 5 * 4
        assert not any(member.divergences for member in rig.members.values())


def test_no_op_returns_before_who_compares_results_has_heard_of_it(
    trees: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins to read late would else wait for a member that has nothing left to do."""
    trees(2)
    with Rig(range(3), "tcp") as rig:
        rig.members[2] = tests.rigs.exchange.Member(2, verify=True)
        late: list[MirrorWriter] = []
        admit = rig.members[1].exchange.admit
        monkeypatch.setattr(
            rig.members[1].exchange, "admit", lambda reader: (late.append if reader.replica == 2 else admit)(reader)
        )
        rig.view(range(3))
        ops = {m: Operation(np.ones(10, np.float32), "float32", "sum") for m in rig.members}
        for m, op in ops.items():
            rig.members[m].exchange.submit(op)
        assert not ops[0].wait(0.3)
        for reader in late:
            admit(reader)
        for op in ops.values():
            assert op.wait(DEADLINE)
            assert (op.array == 3).all()


def test_small_and_large_ops_follow_each_other(trees: Callable[[int], None]) -> None:
    """Queued, so that those that go through the tree and those that do not are under way together."""
    trees(2)
    sizes = [10, 400_000, 20, 30, 700_000, 40, 50, 60, 70, 80, 90, 100, 110, 400_000, 5]
    for how in ("tcp", "mixed", "shm"):
        with Rig(range(5), how) as rig:
            rig.view(range(5))
            ops = {m: [Operation(np.full(size, m, np.float32), "float32", "sum") for size in sizes] for m in range(5)}

            def body(m: int, rig: Rig = rig, ops: dict[int, list[Operation]] = ops) -> None:
                for op in ops[m]:
                    rig.members[m].exchange.submit(op)
                rig.members[m].exchange.wait_all(60)

            for caller in [Caller.start(body, m) for m in range(5)]:
                caller.join()
            for op in (op for some in ops.values() for op in some):
                assert op.error is None
                assert (op.array == 10).all()


def test_a_late_reader_gets_what_is_taken_of_a_slot_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for that to return an op of two chunks, behind which small ops have filled all slots."""
    members = (0, 1, 2)
    memories: dict[int, Any] = {m: TinyMemory(m, CHUNK * len(members)) for m in members}
    for memory in memories.values():
        memory.words[POSTED] = memory.words[TAKEN] = 1 << COUNTER | 2  # all have taken these two
    tuning = dataclasses.replace(BUILT_IN, tree=ALWAYS, tree_fan=2)
    view = GroupView(1, 0, members, frozenset(members), False, tuning=tuning)
    peers = {m: memories[m] for m in members if m}
    pipeline = Pipeline(view, memories[0], peers, Algorithms(view, memories, Reducer()))
    for number, chunks in enumerate([2] + [1] * SLOTS):
        op = Operation(np.zeros(chunks * CHUNK * len(members) // 8, np.int64), "int64", "sum", CHUNK * len(members))
        op.number, op.verified = number, True
        pipeline.unposted.append(op)
        for _ in range(chunks):
            assert pipeline.to_post() is op
            pipeline.posted = pipeline.begin(op).index + 1
        while not number and pipeline.taken < chunks:
            pipeline.arrived += 1
            pipeline.take(pipeline.slots[pipeline.taken])
    assert [slot.index for slot in pipeline.slots[:2]] == [SLOTS, SLOTS + 1]
    near, far = socket_pair()
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(TcpMirrorWriter, "send", lambda self, word, value, *rest: sent.append((word, value)))
    reader: MirrorWriter = TcpMirrorWriter(far, 1, 1)  # type: ignore[arg-type]
    Publisher(pipeline, memories[0], [], lambda *lost: None, compares=False).welcome(reader)
    assert [value - (1 << COUNTER) for word, value in sent if word == TAKEN] == [1, 2]
    near.close()
    reader.close()


class Top:
    """The pipeline of the top, which has taken as many ops as there are slots; its two children have posted them."""

    def __init__(self) -> None:
        members = (0, 1, 2)
        self.memories: dict[int, Any] = {m: TinyMemory(m, CHUNK * len(members)) for m in members}
        tuning = dataclasses.replace(BUILT_IN, tree=ALWAYS, tree_fan=2)
        view = GroupView(1, 0, members, frozenset(members), False, tuning=tuning)
        peers = {m: self.memories[m] for m in (1, 2)}
        algorithms = Algorithms(view, self.memories, Reducer())
        self.pipeline = pipeline = Pipeline(view, self.memories[0], peers, algorithms)
        self.ops: list[Operation] = []
        for count in range(1, pipeline.staged + 1):
            slot = pipeline.begin(self.call())
            pipeline.posted = count
            for m in peers:
                self.memories[m].words[POSTED] = 1 << COUNTER | count
            assert pipeline.to_gather() is slot
            pipeline.gathered = count
            assert pipeline.to_announce() is slot
            pipeline.announce(slot)
            assert pipeline.to_arrive() is slot
            pipeline.arrive(slot)
            pipeline.take(slot)

    def call(self) -> Operation:
        op = Operation(np.zeros(1, np.int64), "int64", "sum", CHUNK * len(self.memories))
        op.number = len(self.ops)
        self.ops.append(op)
        self.pipeline.unposted.append(op)
        return op


def test_a_slot_is_used_again_when_all_below_have_taken_what_it_held() -> None:
    """One that begins to read late would else miss the result of it, and find that of the next task in its place."""
    top = Top()
    op = top.call()
    for m in (1, 2):
        assert top.pipeline.to_post() is None
        top.memories[m].words[TAKEN] = 1 << COUNTER | 1
    assert top.pipeline.to_post() is op


def test_no_op_returns_before_the_children_are_told_that_all_hold_it() -> None:
    """Who has returned its last op has nothing left to do, and would let them wait."""
    top = Top()
    for m in (1, 2):
        top.memories[m].words[TAKEN] = 1 << COUNTER | 1
    assert not top.pipeline.is_stable(top.ops[0])
    assert list(top.pipeline.to_settle()) == [(TAKEN_UP, 1), (TAKEN_DOWN, 1)]
    assert [top.pipeline.is_stable(op) for op in top.ops[:2]] == [True, False]


def test_what_a_reader_has_no_room_for_is_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all is told that the op needs which returns: the reader may wait for what belongs to the next one."""
    top = Top()
    near, far = socket_pair()
    reader: MirrorWriter = TcpMirrorWriter(far, 1, 1)  # type: ignore[arg-type]
    publisher = Publisher(top.pipeline, top.memories[0], [], lambda *lost: None, compares=False)
    publisher.welcome(reader)
    monkeypatch.setattr(reader, "told", lambda word, value: True)
    for sent in (False, False, True):
        monkeypatch.setattr(reader, "flush", lambda sent=sent: sent)
        assert publisher.told(1)
    monkeypatch.setattr(reader, "flush", lambda: False)
    assert not publisher.clogged()  # now nothing is left
    publisher.publish(TAKEN_DOWN, 1)
    for _ in range(2):
        assert publisher.told(1)
        assert publisher.clogged() == [reader]
    near.close()
    reader.close()


def test_a_sum_takes_the_place_of_what_the_slot_held() -> None:
    """No more bytes are under way than there are in the slots, wherever in its slot a payload begins."""
    near, far = socket_pair()
    writer = TcpMirrorWriter(far, 1, 1)  # type: ignore[arg-type]
    room = SPAN * REAL_CHUNK
    bytes_of = memoryview(bytes(room))
    for count in range(1, SLOTS + 1):
        writer.send(POSTED, 1 << COUNTER | count, (count - 1) * room + 64, bytes_of[64:], (0, 0, 0))
    writer.send(GATHERED, 1 << COUNTER | SLOTS + 1, 0, bytes_of[:4096], (0, 0, 0))
    near.close()
    writer.close()
