"""The tree of groups of many members: its shape, when it is chosen, what comes of it, and who sends what to whom."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tests.exchange_rig
from ftcomm.collective import schedule
from ftcomm.collective.operation import Operation, stamp_of
from ftcomm.collective.plan import GroupView
from ftcomm.collective.scheduled import ScheduledOperation
from ftcomm.collective.tree import tree
from ftcomm.errors import MismatchError
from ftcomm.kernels.call_codes import UNKNOWN
from ftcomm.settings.tuning import BUILT_IN, EVER, MEMBERS
from ftcomm.transport.segment import POSTED, TAKEN, TREE
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.exchange_rig import Caller, Rig

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
    assert [depth(members, BUILT_IN.tree_fan) for members in (17, 21, 32, 64, 85, 256)] == [2, 2, 3, 3, 3, 4]


def view(count: int, one_host: bool = False, ring: bool = False, me: int = 0) -> GroupView:
    members = tuple(range(count))
    return GroupView(1, me, members, frozenset(members), one_host, members if ring else ())


def test_there_is_a_tree_between_hosts_beyond_16_members() -> None:
    assert [view(count).tree for count in (2, 16, 17, 256)] == [0, 0, 64 << 10, 64 << 10]
    assert view(64, one_host=True).tree == 0  # to read another word costs little there
    assert view(64, ring=True).tree == 0  # connected to neighbours alone


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Every view of a rig has a tree with so many children of each."""

    def always(fan: int) -> None:
        tuning = dataclasses.replace(BUILT_IN, tree=ALWAYS, tree_on_one_host=ALWAYS, tree_fan=fan)
        monkeypatch.setattr(tests.exchange_rig, "GroupView", functools.partial(GroupView, tuning=tuning))

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


@pytest.mark.parametrize("compares", [(0,), (3,), tuple(range(5))])
def test_results_are_compared_whoever_asks_for_it(
    compares: tuple[int, ...], trees: Callable[[int], None], frames: Counter[int]
) -> None:
    """Who compares gets what the others have taken from all of them, before its op returns."""
    trees(2)
    with Rig(range(5), "tcp") as rig:
        for m in compares:
            rig.members[m] = tests.exchange_rig.Member(m, verify=True)
        rig.view(range(5))
        for _ in range(12):
            ops = call(rig, lambda m: Operation(np.full(10, m, np.float32), "float32", "sum"))
            assert {tuple(op.array) for op in ops.values()} == {(10.0,) * 10}
        assert frames[TAKEN] == 12 * 5 * 4
        assert not any(member.divergences for member in rig.members.values())


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
                rig.members[m].exchange.drain(60)

            for caller in [Caller.start(body, m) for m in range(5)]:
                caller.join()
            for op in (op for some in ops.values() for op in some):
                assert op.error is None
                assert (op.array == 10).all()
