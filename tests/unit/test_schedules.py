"""The exchange under hundreds of schedules: crashes, false suspicions, late news, joiners, wrong calls.

All collectives; the real streams, flights and resume plans, on real segments, stepped one at a time by a seeded
scheduler instead of threads, so that a failing seed replays exactly. What a member sees of a view change, and when, is
up to the scheduler.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest

from ftcomm.collective import schedule
from ftcomm.collective.checksum import Divergence
from ftcomm.collective.core import NOTHING, RETURNED, ExchangeCore
from ftcomm.collective.inflight import Inflight
from ftcomm.collective.member import GroupMember
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView, rows, shared_hosts
from ftcomm.collective.resume import REDUCE
from ftcomm.collective.schedule import Schedule
from ftcomm.collective.scheduled import ScheduledOperation
from ftcomm.collective.watchdog import Watchdog
from ftcomm.control.messages import Progress
from ftcomm.errors import LostError, MismatchError
from ftcomm.kernels import call_codes
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.settings.tuning import BUILT_IN, EVER, MEMBERS, Tuning
from ftcomm.sync.futex import Waiter
from ftcomm.transport.segment import ASLEEP, SLOTS, SPAN, Segment
from ftcomm.transport.shm import ShmPeer
from tests.rigs.fp8_results import coded

pytestmark = pytest.mark.protocol

CHUNK = 4096  # bytes; more chunks of less to copy
DONE: set[object] = set()  # collectives that have returned, and that have failed for a loss, in any schedule
LOST: set[object] = set()
SPANS: set[int] = set()  # chunks of a task
WAYS: set[str] = set()  # algorithms of tasks
BESIDE: set[tuple[str, str]] = set()  # pairs of them in one view
TUNING = dataclasses.replace(BUILT_IN, two_levels=((MEMBERS, 64 << 10),))
EVERY = {"one-shot", "two-shot", "tree", "ring", "hierarchical"}
COUNTS = (0, 100, 2000, 7000, 20_000, 24_000)  # of float32: one chunk to 24; above 64 KB two-shot, or by a route


def lost(replica: int, epoch: int, reason: str) -> None:
    """There are no connections."""


@dataclasses.dataclass
class Node:
    replica: int
    segment: Segment
    core: ExchangeCore
    target: int = 0  # the view that it has stopped for, or runs in
    alive: bool = True
    issued: int = 0
    ops: dict[int, Operation] = dataclasses.field(default_factory=dict)
    results: dict[int, object] = dataclasses.field(default_factory=dict)

    @property
    def flight(self) -> Inflight:
        return self.core.member.inflight


class World:
    """The members, and views that the scheduler makes up."""

    def __init__(self, seed: int, segments: dict[int, Segment]) -> None:
        self.random = random.Random(seed)
        for segment in segments.values():  # as new
            for word in segment.published:
                segment.words[word] = 0
        self.segments = segments
        chance = random.Random(f"tree of {seed}")
        self.fan = chance.choice((0, 0, 1, 2, 3))  # of the tree, where there is no ring; 0: none
        self.compares = not self.fan or chance.random() < 0.5  # results
        self.count = self.random.choice((2, 2, 3, 3, 4, 5))
        self.nodes = {m: self.node(m, segments[m]) for m in range(self.count)}
        self.one_host = self.random.random() < 0.5  # else as far ahead as there are slots, and always two-shot
        self.alike = self.random.random() < 0.5  # unless all compute alike
        self.way = self.random.choice(("direct", "direct", "ring", "two levels"))
        self.rows = chance.random() < 0.5  # of members, for hosts
        self.slices = chance.choice((1, 2, 64))
        self.homes = [self.random.choice("abc") for _ in range(5)]
        self.views: list[GroupView | None] = [None]
        self.progress: dict[int, dict[int, Progress]] = {}
        self.total = self.random.randint(2, 6)
        self.sizes = [self.random.choice(COUNTS) for _ in range(2 * self.total)]
        self.wrong = {
            (self.random.randrange(self.count), self.random.randrange(self.total))
            for _ in range(self.random.choice((0, 0, 1)))
        }
        self.kinds = [self.random.choice(("allreduce", *call_codes.KINDS)) for _ in self.sizes]
        self.roots = [self.random.randrange(5) for _ in self.sizes]
        self.inputs: dict[tuple[int, int], np.ndarray] = {}
        self.atomic = [self.random.random() < 0.5 for _ in self.sizes]
        self.wires = [random.Random(f"{seed} {i}").choice(("input", "fp32", "fp8")) for i in range(len(self.sizes))]
        if self.fan:  # more ops that go through it
            for number in range(len(self.sizes)):
                if chance.random() < 0.5:
                    self.sizes[number], self.kinds[number], self.wires[number] = 100, "allreduce", "input"
        self.outcomes: dict[int, object] = {}
        self.faults = self.random.randint(0, self.count)
        self.boundary = 0  # the epoch in which the group grew
        self.grown = 0  # the first op after that
        contributing = frozenset(m for m in self.nodes if self.random.random() < 0.85) or frozenset({0})
        self.view(tuple(self.nodes), contributing)

    def node(self, replica: int, segment: Segment, target: int = 0) -> Node:
        waiter, watch = Waiter(segment.words, ASLEEP, 0), Watchdog(1.0, 1.0, 1.0)
        diverged = self.diverged if self.compares else None
        core = ExchangeCore(
            GroupMember(replica, watch), segment, waiter, Reducer(), on_lost=lost, on_divergence=diverged
        )
        return Node(replica, segment, core, target)

    def view(self, members: tuple[int, ...], contributing: frozenset[int]) -> None:
        ring = tuple(self.random.sample(members, len(members))) if self.way == "ring" else ()
        hosts = ()
        if self.way == "two levels":
            by_rows = self.rows and len(members) > 1
            hosts = rows(members) if by_rows else shared_hosts({m: self.homes[m] for m in members})
        one_host = self.one_host and not hosts
        tuning = self.tuning()
        view = GroupView(len(self.views), members[0], members, contributing, one_host, ring, self.alike, tuning, hosts)
        self.views.append(view)
        self.progress[len(self.views) - 1] = {}

    def tuning(self) -> Tuning:
        points = ((MEMBERS, EVER if self.fan else 0),)
        tuning = dataclasses.replace(TUNING, tree=points, tree_on_one_host=points, tree_fan=max(1, self.fan))
        return dataclasses.replace(tuning, slices=self.slices)

    @property
    def newest(self) -> GroupView:
        view = self.views[-1]
        assert view is not None
        return view

    def input(self, replica: int, number: int) -> np.ndarray:
        # Sums of such numbers depend on the order, and every combination of contributors is told from every other.
        if (replica, number) not in self.inputs:
            size = self.sizes[number] + ((replica, number) in self.wrong)
            chance = np.random.default_rng((replica, number))
            any_order = self.way != "direct" or self.fan
            drawn = chance.integers(0, 1 << 20, size).astype(np.float32) if any_order else None
            self.inputs[replica, number] = chance.standard_normal(size, np.float32) if drawn is None else drawn
        return self.inputs[replica, number]

    def roster(self, number: int) -> tuple[int, ...]:
        """Who was there at the last boundary before the op."""
        view = self.views[self.boundary if self.boundary and number >= self.grown else 1]
        assert view is not None
        return view.members

    def schedule(self, replica: int, number: int) -> Schedule:
        """Of an op that is no all-reduce. The array of the input has as many elements, whatever the collective."""
        roster = self.roster(number)
        me, root, n = roster.index(replica), self.roots[number] % len(roster), len(roster)
        count = len(self.input(replica, number))
        match = {
            "broadcast": lambda: schedule.broadcast(count, roster, me, root, CHUNK, 4),
            "reduce": lambda: schedule.reduce(count, roster, me, root, CHUNK, 4),
            "allgather": lambda: schedule.allgather(count, roster, me, self.atomic[number], CHUNK, 4),
            "gather": lambda: schedule.gather(count, roster, me, root, CHUNK, 4),
            "scatter": lambda: schedule.scatter(count // n, roster, me, root, CHUNK, 4),
            "reduce_scatter": lambda: schedule.reduce_scatter(count // n, roster, me, self.atomic[number], CHUNK, 4),
            "alltoall": lambda: schedule.alltoall(((count // n,) * n,) * n, roster, me, CHUNK, 4),
            "barrier": lambda: schedule.barrier(roster, me),
        }
        return match[self.kinds[number]]()

    def operation(self, replica: int, number: int) -> Operation:
        given = self.input(replica, number).copy()
        if self.kinds[number] == "allreduce":
            return Operation(given, "float32", "sum", CHUNK, atomic=self.atomic[number], compression=self.wires[number])
        plan = self.schedule(replica, number)
        size = max((part.dest + part.size for part in plan.parts if part.dest >= 0), default=0)
        source, result = given, np.full(size, np.nan, np.float32)
        if plan.kind == "allgather" and self.atomic[number]:
            source = result
            begin = self.roster(number).index(replica) * len(given)
            result[begin : begin + len(given)] = given
        elif plan.kind in ("broadcast", "reduce") or (plan.kind == "reduce_scatter" and self.atomic[number]):
            result = source
        op = "sum" if plan.kind in ("allreduce", "reduce", "reduce_scatter") else ""
        return ScheduledOperation(plan, source, result, "float32", op, len(given), 4)

    # -- what can happen -------------------------------------------------------------------------------------------

    def issue(self, node: Node) -> None:
        # Nobody goes beyond the boundary at which the group grows before it has installed that view.
        last = self.total if node.target >= self.boundary else self.total // 2
        if node.issued < last and node.core.stream:
            op = self.operation(node.replica, node.issued)
            node.core.submit(op)
            assert op.number == node.issued
            node.ops[op.number] = op
            node.issued += 1

    def step(self, node: Node) -> bool:
        if node.core.member.frozen or not node.flight.ops:
            return False
        first = node.flight.ops[0]
        did = node.core.step()
        if did is RETURNED:
            self.returned(node, first)
        return did is not NOTHING

    def returned(self, node: Node, op: Operation) -> None:
        """Promise 1: whoever returns an op returns the same."""
        if op.error is not None:
            assert isinstance(op.error, (MismatchError, LostError))
            assert isinstance(op.error, MismatchError) or any(m not in self.newest.members for m in range(self.count))
            outcome: object = (type(op.error), str(op.error))
            LOST.add(isinstance(op.error, LostError) and self.kinds[op.number])
        else:
            assert None not in op.finals
            self.check(op, node.replica)
            assert not op.atomic or len(op.spans()) <= 1  # promise 2: what else is atomic
            alike = self.kinds[op.number] in ("allreduce", "broadcast", "allgather")
            outcome = (op.array.tobytes(), op.spans()) if alike else "each its own"
            DONE.add(self.kinds[op.number])
            assert node.core.stream
            used = [slot for slot in node.core.stream.pipeline.slots if hasattr(slot, "span")]
            SPANS.update(slot.span for slot in used)
            names = sorted({slot.algorithm.name for slot in used})
            WAYS.update(names)
            BESIDE.update(itertools.combinations(names, 2))
        assert self.outcomes.setdefault(op.number, outcome) == outcome

    def diverged(self, divergence: Divergence) -> None:
        """Nobody corrupts anything here, and who was left behind in an earlier epoch sees others write for a later."""
        raise AssertionError(f"a false alarm: {divergence}")

    def check(self, op: Operation, replica: int) -> None:
        """Promise 2: every FINAL chunk is the sum of exactly the inputs that it says, every other chunk is intact."""
        if isinstance(op, ScheduledOperation):
            self.check_parts(op, replica)
            return
        for start, stop, who in op.spans():
            inputs = [self.input(member, op.number)[start:stop] for member in who]
            want = coded(inputs, "float32", "sum") if op.compression == "fp8" else functools.reduce(np.add, inputs)
            assert op.array[start:stop].tobytes() == want.tobytes()

    def check_parts(self, op: ScheduledOperation, replica: int) -> None:
        """The same; and the input of what may have to be given again stays, whatever else is in that array."""
        for number, (part, who) in enumerate(zip(op.schedule.parts, op.finals, strict=True)):
            if who:
                assert part.holder in (REDUCE, *who)
                want = self.given(who[0], op.number, number)
                for other in who[1:]:
                    want = want + self.given(other, op.number, number)
                assert op.array[part.dest : part.dest + part.size].tobytes() == want.tobytes()
            in_place = op.source is op.array and part.source == part.dest
            if part.source >= 0 and not (who and in_place):
                mine = self.given(replica, op.number, number)
                assert op.source[part.source : part.source + part.size].tobytes() == mine.tobytes()

    def given(self, giver: int, op: int, number: int) -> np.ndarray:
        """What a member gives of a part."""
        plan, content = self.schedule(giver, op), self.input(giver, op)
        begin = plan.parts[number].source
        if plan.kind == "allgather" and self.atomic[op]:
            begin -= self.roster(op).index(giver) * len(content)
        return content[begin : begin + plan.parts[number].size]

    def check_progress(self, node: Node) -> None:
        for op in node.flight.ops:
            self.check(op, node.replica)
            if isinstance(op, ScheduledOperation):
                continue
            mine = self.input(node.replica, op.number)
            for chunk, who in enumerate(op.finals):
                part = slice(chunk * op.elements, (chunk + 1) * op.elements)
                assert who is not None or op.array[part].tobytes() == mine[part].tobytes()

    def hear(self, node: Node) -> None:
        """The node learns of a newer view that it belongs to; it stops and tells what it holds."""
        later = [v.epoch for v in self.views[node.target + 1 :] if v and node.replica in v.members]
        if later:
            node.target = self.random.choice(later)
            node.core.member.freeze()
            self.check_progress(node)
            self.progress[node.target][node.replica] = node.core.progress()

    def enter(self, node: Node) -> None:
        view = self.views[node.target]
        if (
            not node.core.member.frozen
            or view is None
            or node.replica not in view.members
            or set(self.progress[node.target]) != set(view.members)
        ):
            return
        progress = self.progress[node.target]
        view = dataclasses.replace(view, me=node.replica)
        peers = {
            m: ShmPeer(m, "self", s.fd, s.nonce)  # type: ignore[arg-type]
            for m in view.members
            if (s := self.segments[m]) and m != node.replica
        }
        first = node.core.stream is None
        done = list(node.flight.ops)
        atomic = any(op.atomic for op in done)
        resumed, error = node.core.enter(view, peers, progress)
        assert error is None
        if first:
            node.issued = node.flight.returned
        assert resumed.again <= SLOTS * SPAN or atomic, "more is sent again than was in flight"
        assert resumed.resent <= SLOTS * SPAN * CHUNK or atomic
        for op in done:
            if op.done:
                self.returned(node, op)

    def lose(self, node: Node, crash: bool) -> None:
        members = tuple(m for m in self.newest.members if m != node.replica)
        contributing = self.newest.contributing & set(members)
        if self.faults and node.replica in self.newest.members and contributing:
            self.faults -= 1
            node.alive = not crash
            self.view(members, contributing)
            for member in members:  # news may arrive at once, before the others have come as far as this one
                if self.random.random() < 0.7 and self.nodes[member].alive:
                    self.hear(self.nodes[member])

    def grow(self) -> None:
        """At a boundary: everybody has returned all that was issued. A new incarnation of a lost one joins."""
        members = self.newest.members
        ready = all(
            n.alive
            and n.target == self.newest.epoch
            and not n.core.member.frozen
            and n.issued == self.total
            and not n.flight.ops
            for n in (self.nodes[m] for m in members)
        )
        lost = [m for m in range(self.count) if m not in members]
        if ready and lost and not self.boundary:
            self.boundary = len(self.views)
            who = self.random.choice(lost)
            self.nodes[who] = self.node(who, Segment(), self.boundary - 1)
            self.segments = {**self.segments, who: self.nodes[who].segment}
            self.view(tuple(sorted((*members, who))), self.newest.contributing)
            self.grown = self.total
            self.total *= 2

    def halfway(self) -> bool:
        """Some chunk in flight is FINAL: the moment for a fault that leaves something to copy."""
        return any(any(op.finals) for n in self.nodes.values() for op in n.flight.ops)

    def finished(self) -> bool:
        return all(
            self.nodes[m].alive
            and self.nodes[m].issued == self.total
            and not self.nodes[m].flight.ops
            and self.nodes[m].target == self.newest.epoch
            for m in self.newest.members
        )

    def run(self) -> None:
        fault = self.random.choice((0.0, 0.02, 0.1))
        for _ in range(60_000):
            node = self.random.choice(list(self.nodes.values()))
            if not node.alive:
                if node.replica in self.newest.members:  # a second loss, found out later
                    self.lose(node, crash=True)
                continue
            kind = self.random.random()
            if kind < fault and (self.random.random() < 0.1 or self.halfway()):
                self.lose(node, crash=self.random.random() < 0.5)
            elif kind < 0.12:
                self.issue(node)
            elif kind < 0.15:
                self.hear(node)
            elif kind < 0.25:
                self.enter(node)
            elif kind < 0.27:
                self.grow()
            else:
                for _ in range(self.random.choice((1, 3, 10))):
                    self.step(node)
            if self.finished() and (self.boundary or len(self.newest.members) == self.count or kind < 0.01):
                break
        assert self.finished(), "the survivors did not come to an end"
        for member in self.newest.members:
            node = self.nodes[member]
            assert all(op.done for op in node.ops.values())


@pytest.fixture(scope="module")
def segments() -> dict[int, Segment]:
    return {m: Segment() for m in range(5)}


@pytest.mark.slow
def test_survivors_finish_with_equal_bytes_in_schedules_that_show_every_collective(
    segments: dict[int, Segment],
) -> None:
    """All can return, and those whose data one member gives, and no other, can fail for its loss; and tasks were of
    one chunk and of several, and went every way, through a tree also beside what was copied. One process plays all
    schedules, so that what they have shown is known."""
    can_fail = {"broadcast", "allgather", "gather", "scatter", "alltoall"}
    play(segments, range(150))
    play(segments, range(478, 479))  # the first in which something is copied beside a tree
    assert set(call_codes.KINDS) == DONE
    assert can_fail == LOST - {False}
    assert set(range(1, SPAN + 1)) == SPANS
    assert EVERY <= WAYS
    assert ("copy", "tree") in BESIDE


@pytest.mark.sweep
def test_survivors_finish_with_equal_bytes_in_more_schedules(segments: dict[int, Segment]) -> None:
    play(segments, range(150, 600))


def play(segments: dict[int, Segment], seeds: range) -> None:
    for seed in seeds:
        try:
            World(seed, segments).run()
        except BaseException:
            print(f"seed {seed}")
            raise
