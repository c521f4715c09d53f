"""One member, live: the objects of the product, called one step at a time, saved and loaded between the calls."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.core import RETURNED, ExchangeCore
from ftcomm.collective.gate import Gate
from ftcomm.collective.inflight import Inflight
from ftcomm.collective.member import GroupMember
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import Pipeline, Slot
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE
from ftcomm.collective.stream import Stream
from ftcomm.collective.watchdog import Watchdog
from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.leader import ToCoordinator
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.rank_with_leader import InProcessAction, RankWithLeader
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View
from ftcomm.errors import RemovedError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.settings.tuning import EVER, Tuning
from ftcomm.simulation.memory import CHUNK, TinyMemory
from ftcomm.simulation.promises import BrokenPromise
from ftcomm.simulation.states import References, freeze, is_plain, thaw
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import ASLEEP, SLOTS

MOST_MEMBERS = 8
MOST_CHUNKS = 100  # of all ops: so many inputs of a member can be told apart


class SteppedGate(Gate):
    """Looks at one peer after the other: in a look that is under way the words of the first `seen` were good, and they
    are not looked at again."""

    __slots__ = ("seen",)

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.seen = 0

    def is_open(self, count: int) -> bool:
        if not self.seen:
            return super().is_open(count)
        behind = self.behind(count)
        return all(peer not in behind for peer in self.peers[self.seen :])


class SteppedPipeline(Pipeline):
    """Goes through one stage at a time, with one task. `stages` are those that it may go through; "first" is a post of
    a chunk that is not FINAL here."""

    gate = SteppedGate
    stages: frozenset[str] = frozenset()

    def to_post(self) -> Operation | None:
        op = super().to_post() if self.stages & {"post", "first"} else None
        if op is None or "post" in self.stages:
            return op
        task = op.tasks[op.next]
        return op if op.schedule is None and op.finals[task.chunk] is None else None

    def to_arrive(self) -> Slot | None:
        return super().to_arrive() if "arrive" in self.stages else None

    def to_gather(self) -> Slot | None:
        before = self.gathered
        slot = super().to_gather() if "gather" in self.stages else None
        if slot is None:
            self.gathered = before  # to have searched is no step
        return slot

    def to_announce(self) -> Slot | None:
        before = self.announced
        slot = super().to_announce() if "announce" in self.stages else None
        if slot is None:
            self.announced = before
        return slot

    def to_settle(self) -> Iterator[tuple[int, int]]:
        if "settle" in self.stages:
            yield from super().to_settle()

    def to_step(self) -> Iterator[Slot]:
        yield from itertools.islice(super().to_step(), int("step" in self.stages))

    def to_take(self) -> Slot | None:
        return super().to_take() if "take" in self.stages else None


class SteppedStream(Stream):
    """Goes through one stage at a time, and reads one peer's word at a time when it looks whether an op may return."""

    pipeline_type: type[Pipeline] = SteppedPipeline
    pipeline: SteppedPipeline

    @property
    def gate(self) -> SteppedGate:
        gate = self.pipeline.taken_by_all
        assert isinstance(gate, SteppedGate)
        return gate

    @property
    def seen(self) -> int:
        """Peers whose TAKEN words were found good, in the look that is under way."""
        return self.gate.seen

    @seen.setter
    def seen(self, seen: int) -> None:
        self.gate.seen = seen

    def look(self, op: Operation) -> int:
        """The peers, from the first on, whose words a look at them one after the other finds good."""
        if not 0 <= op.end <= self.pipeline.taken or (self.pipeline.place is not None and op.end in self.pipeline.ends):
            return 0  # by the tree members learn of others step by step in any case
        behind = self.gate.behind(op.end)
        return self.gate.peers.index(behind[0]) if behind else len(self.gate.peers)


# Of the product's objects: what is saved apart, what tells of time, and what is found again.
# Of an op: where it is in the recording, which decides nothing, and the bytes that `kept` shows.
_RECORDED = frozenset(("record", "kept_memory"))
_APART = frozenset(("inflight", "rosters", "stream", "view", "peers", "watch", "recorded_change"))
_APART_OF_PIPELINE = frozenset(("unposted", "slots", "stages", "stepped", "course", "courses"))

Resumption = Callable[[Inflight[Operation], GroupView], None]  # may spoil what is left to do, in a mutation


@dataclasses.dataclass(frozen=True)
class CheckedGroup:
    """The part that is the same in all states: who calls what."""

    members: int = 3
    ops: int = 2
    chunks: int = 2
    one_host: bool = True  # one-shot; else two-shot, since members on several hosts always are
    atomic: bool = False
    verify: bool = False  # fingerprints of the results are compared, and never differ
    tree: int = 0  # the most children of a member of the tree through which ops of one chunk go; 0: there is none

    @property
    def chunk(self) -> int:
        """Bytes. In two-shot each member has a slice of each chunk, a cache line."""
        return CHUNK if self.one_host else CHUNK * self.members

    @property
    def tuning(self) -> Tuning:
        points = ((MOST_MEMBERS, EVER if self.tree else 0),)
        return Tuning(tree=points, tree_on_one_host=points, tree_fan=max(1, self.tree))

    @property
    def elements(self) -> int:
        """The number of int64 in a chunk."""
        return self.chunk // 8

    def input(self, member: int, op: int, chunk: int) -> int:
        """A different number for each; a sum of those of one chunk shows in its digits who is in it."""
        return int(MOST_CHUNKS**member * (1 + op * self.chunks + chunk))

    def content(self, who: tuple[int, ...], op: int, chunk: int) -> bytes:
        return np.full(self.elements, sum(self.input(member, op, chunk) for member in who), np.int64).tobytes()

    def operation(self, member: int, op: int, atomic: bool) -> Operation:
        array = np.repeat([self.input(member, op, chunk) for chunk in range(self.chunks)], self.elements)
        made = Operation(array.astype(np.int64), "int64", "sum", self.chunk, atomic=atomic)
        if made.kept is not None:
            made.kept[:] = 0  # else what the memory held before would tell states apart
        return made


class Live:
    """One member, live: its machines, its ops, its stream."""

    def __init__(
        self,
        replica: int,
        group: CheckedGroup,
        memories: Mapping[int, TinyMemory],
        stream: type[SteppedStream],
        quiesces: bool,
        spoil: Resumption,
        atomic: bool,
    ) -> None:
        self.replica, self.group, self.memories = replica, group, memories
        self._quiesces, self._spoil = quiesces, spoil
        self._atomic = atomic
        address = Address("host", 1, "boot", replica, 0, f"{replica:032x}")
        rank = n.RankNode(replica, 0, address, Timeouts.derive())
        leader = LeaderNode(replica, f"life-{replica}", 1, Timeouts.derive())
        self._with_leader: RankWithLeader | None = RankWithLeader(rank, leader)
        self._saved: Hashable = None  # if `_joined` is None: most steps do not need it
        waiter, watch = Waiter(memories[replica].words, ASLEEP, 0), Watchdog(1.0, 1.0, 1.0, lambda: 0.0)
        self.member = GroupMember[Operation](replica, watch)
        self.core = ExchangeCore(
            self.member,
            memories[replica],  # type: ignore[arg-type]
            waiter,
            Reducer(),
            on_lost=lambda *lost: None,
            on_divergence=self._diverged if group.verify else None,
        )
        self.core.stream_type = stream
        self.pending: tuple[View, dict[int, m.Progress]] | None = None  # an `EnterView` that is yet to be carried out
        self._streams: dict[GroupView, SteppedStream] = {}
        self._references = References()
        self._operations: dict[int, Operation] = {}  # by number; the caller's buffers stay where they are
        self._content: dict[tuple[tuple[int, ...], int, int], bytes] = {}
        # What came of the last call:
        self.up: list[m.Message] = []  # for the coordinator
        self.out: list[tuple[int, m.Message]] = []  # for other members
        self.returned: list[tuple[int, Hashable]] = []  # (op, what its caller got)
        self.entered: View | None = None
        self.failed = False

    @property
    def with_leader(self) -> RankWithLeader:
        if self._with_leader is None:
            self._with_leader = thaw(self._saved)
        return self._with_leader

    @property
    def node(self) -> n.RankNode:
        return self.with_leader.rank

    @property
    def flight(self) -> Inflight[Operation]:
        return self.member.inflight

    @property
    def stream(self) -> SteppedStream | None:
        stream = self.core.stream
        assert stream is None or isinstance(stream, SteppedStream)
        return stream

    @property
    def frozen(self) -> bool:
        return self.member.frozen

    # -- as a value ------------------------------------------------------------------------------------------------

    def save(self) -> Hashable:
        save, member, ops = self._references.save, self.member, self.flight.ops
        return (
            self._saved if self._with_leader is None else freeze(self._with_leader),
            save(self.core, _APART),
            save(member, _APART),
            save(member.inflight, ("ops",)),
            save(member.rosters),
            tuple((op.number, save(op, _RECORDED)) for op in ops),
            None if self.stream is None else self._save_stream(self.stream),
            None if self.pending is None else (self.pending[0], freeze(self.pending[1])),
        )

    def _save_stream(self, stream: SteppedStream) -> Hashable:
        save, pipeline, ops = self._references.save, stream.pipeline, self.flight.ops
        slots = [pipeline.slots[index % SLOTS] for index in range(pipeline.taken, pipeline.posted)]
        for slot in slots:
            if all(slot.op is not op for op in ops):
                raise BrokenPromise(
                    f"the stream of {self.replica} still works on op {slot.op.number}, which has returned"
                )
        save(pipeline.algorithms)  # they refer to the same as ever
        op = next(iter(pipeline.unposted), None)
        if op is not None and op.next and pipeline.course.algorithm is not pipeline.algorithms.of(op):
            raise BrokenPromise(
                f"the stream of {self.replica} goes on with op {op.number} by the algorithm of another one"
            )
        return (
            stream.view,
            stream.seen,
            save(stream),
            save(stream.publisher),
            save(pipeline, _APART_OF_PIPELINE),
            tuple(op.number for op in pipeline.unposted),
            tuple((slot.op.number, _save_slot(slot)) for slot in slots),
            None if stream.checksums is None else save(stream.checksums),
        )

    def load(self, saved: Any) -> None:
        self._saved, core, member, flight, rosters, ops, stream, pending = saved
        self._with_leader = None
        load = self._references.load
        load(self.core, core, _APART)
        load(self.member, member, _APART)
        load(self.flight, flight, ("ops",))
        load(self.member.rosters, rosters)
        self.pending = None if pending is None else (pending[0], thaw(pending[1]))
        self.flight.ops = deque(self._operation(*op) for op in ops)
        self.core.stream = self.member.view = None
        if stream is not None:
            self._load_stream(*stream)

    def _load_stream(self, view: GroupView, seen: int, *saved: Any) -> None:
        of, publisher, decided, unposted, slots, sums = saved
        load, by_number = self._references.load, {op.number: op for op in self.flight.ops}
        self.core.stream = live = self._streams[view]
        self.member.view = view
        live.seen, pipeline = seen, live.pipeline
        load(live, of)
        load(live.publisher, publisher)
        load(pipeline, decided, _APART_OF_PIPELINE)
        if live.checksums is not None:
            load(live.checksums, sums)
        pipeline.unposted = deque(by_number[number] for number in unposted)
        if pipeline.unposted:
            op = pipeline.unposted[0]
            pipeline.course = pipeline.course_of(op)
        pipeline.slots, pipeline.stepped = pipeline.empty_slots(), pipeline.taken
        for index, (number, state) in enumerate(slots, start=pipeline.taken):
            slot = pipeline.slots[index % SLOTS]
            op = by_number[number]
            for name, value in state:
                setattr(slot, name, thaw(value))
            pipeline.bind(slot, op, slot.task, pipeline.course_of(op))

    def _operation(self, number: int, state: Any) -> Operation:
        op = self._operations[number]
        self._references.load(op, state, _RECORDED)
        return op

    # -- what it does ----------------------------------------------------------------------------------------------

    def issue(self) -> str:
        """The caller calls its next op."""
        number = self.flight.issued
        if number >= self.group.ops:
            return ""
        op = self.group.operation(self.replica, number, self._atomic)
        self._operations[number] = op
        self.core.submit(op)
        return f"calls op {number}"

    def advance(self, *stages: str) -> str:
        """One task through the first of `stages` that is possible."""
        stream = self.stream
        if stream is None or self.frozen:
            return ""
        before, pipeline = self._finals(), stream.pipeline
        counts = (pipeline.posted, pipeline.arrived, pipeline.taken)
        met = self._met(pipeline)
        task = pipeline.slots[pipeline.taken % SLOTS].task if pipeline.taken < pipeline.posted else None
        copies = task is not None and task.holder != REDUCE
        unposted = len(pipeline.unposted)
        pipeline.stages = frozenset(stages)
        if not stream.advance():
            return "has nothing left to do of an op" if len(pipeline.unposted) < unposted else ""
        said = [
            f"{'copies' if copies else 'reduces'} chunk {chunk} of op {number}, now FINAL: the sum of {_names(who)}"
            for (number, chunk), who in self._finals().items()
            if who is not None and before[number, chunk] != who
        ]
        if pipeline.taken > counts[2]:
            return "; ".join(said) or "is done with a task"
        if pipeline.arrived > counts[1]:
            return f"sees task {counts[1]} posted by all"
        if pipeline.posted > counts[0]:
            return f"posts task {counts[0]}"
        if self._met(pipeline) == met:
            return "reduces its slice"
        return "knows of {}/{} tasks posted and of {}/{} taken below it/by all".format(*self._met(pipeline))

    @staticmethod
    def _met(pipeline: Pipeline) -> tuple[int, ...]:
        if pipeline.place is None:
            return ()
        return pipeline.gathered, pipeline.announced, pipeline.taken_below, pipeline.settled

    def _finals(self) -> dict[tuple[int, int], tuple[int, ...] | None]:
        return {(op.number, chunk): who for op in self.flight.ops for chunk, who in enumerate(op.finals)}

    def look(self) -> str:
        """Begin to look whether the first op may return: some peers' words are good, that of the next is not yet."""
        stream = self.stream
        if stream is None or self.frozen or not self.flight.ops:
            return ""
        good = stream.look(self.flight.ops[0])
        others = len(stream.pipeline.peers)
        if not 0 < good < others:
            return ""
        stream.seen = good
        return f"looks whether op {self.flight.ops[0].number} may return, and has seen {good} of {others}"

    def finish(self) -> str:
        """The first op returns, if all members are known to hold it."""
        stream = self.stream
        if stream is None or self.frozen or not self.flight.ops:
            return ""
        op = self.flight.ops[0]
        stream.pipeline.stages = frozenset()
        if self.core.step() is not RETURNED:
            return ""
        stream.seen = 0  # this look is over; the next begins with the first of them again
        return self._returns(op)

    def _returns(self, op: Operation) -> str:
        """Return the op to its caller, who may do with the buffer what it likes from here on, so that it is no part of
        any state."""
        if op.error is not None:
            raise BrokenPromise(f"op {op.number} raised {op.error!r} at {self.replica}")
        self._check(op)
        if None in op.finals:
            raise BrokenPromise(f"op {op.number} returned at {self.replica} with chunks that are INPUT")
        if self.group.atomic and len(set(op.finals)) > 1:
            raise BrokenPromise(
                f"op {op.number} is atomic, and returned at {self.replica} with the sums of {op.finals}"
            )
        numbers = tuple(op.array[:: self.group.elements].tolist())
        self.returned.append((op.number, (op.array.tobytes(), numbers, op.spans())))
        op.array[:] = -1
        return f"returns op {op.number} = {', '.join(map(str, numbers))}"

    def hear(self, message: m.Message) -> str:
        """A message of the coordinator. A change of view stops the exchange, and the others are told."""
        self._do(self.with_leader.leader.from_coordinator(message))
        if isinstance(message, m.NewView):
            if self.failed:
                return f"learns that it is not in view {message.view.epoch}, and fails its ops"
            if self.out or self.pending is not None:
                return f"hears of view {message.view.epoch} and tells what it holds: {self._holds()}"
            return f"hears of view {message.view.epoch}"
        return f"is told: {getattr(message, 'reason', type(message).__name__)}"

    def told(self, message: m.Message) -> str:
        """A message of another member."""
        self._do(self.node.from_peer(message, 0.0))
        return f"is told what {getattr(message, 'replica', '?')} holds"

    def enter(self) -> str:
        """Carry out an `EnterView`, as `ftcomm.groups.data_plane` and `Exchange.enter` do."""
        if self.pending is None:
            return ""
        (view, progress), self.pending = self.pending, None
        if not self.node.wants(view):
            return f"has no use for view {view.epoch} any more"
        one_host, tuning = self.group.one_host, self.group.tuning
        plan = GroupView(view.epoch, self.replica, view.replicas, view.contributing, one_host, tuning=tuning)
        peers: dict[int, Peer] = {x: self.memories[x] for x in view.replicas if x != self.replica}
        in_flight = list(self.flight.ops)
        resumed, error = self.core.enter(plan, peers, progress)
        if error is not None:
            raise error
        self._spoil(self.flight, plan)
        assert self.stream is not None
        self._streams[plan], self.entered = self.stream, view
        said = [self._returns(op) for op in in_flight if op.done]
        self._do(self.node.entered(view))
        left = f"{resumed.copied} chunks to copy, {resumed.reduced} to reduce again" if resumed.ops else "no op open"
        return "; ".join([f"enters view {view.epoch} of {_names(view.replicas)}, {left}", *said])

    def _diverged(self, divergence: Divergence) -> None:
        raise BrokenPromise(f"a false alarm at {self.replica}: {divergence}")

    def _do(self, actions: Sequence[InProcessAction]) -> None:
        for action in self.with_leader.carry(actions):
            if isinstance(action, ToCoordinator):
                self.up.append(action.message)
            elif isinstance(action, n.ToPeer):
                self.out.append((action.replica, action.message))
            elif isinstance(action, act.Freeze):
                if self._quiesces:
                    self.member.freeze()
                self.pending = None
                if self.stream is not None:
                    self.stream.seen = 0
                self._do(self.node.quiesced(action.view.epoch, self.core.progress()))
            elif isinstance(action, act.EnterView):
                self.pending = (action.view, dict(action.progress))
            elif isinstance(action, act.Failed):
                self.failed = True
                self.member.fail(RemovedError(action.reason))
                self.core.abandon()
                self.core.stream, self.member.frozen, self.pending = None, True, None

    # -- promise 2 -------------------------------------------------------------------------------------------------

    def _check(self, op: Operation) -> None:
        content, size = op.array.tobytes(), self.group.chunk
        for chunk, who in enumerate(op.finals):
            key = ((self.replica,) if who is None else who, op.number, chunk)
            want = self._content.get(key)
            if want is None:
                want = self._content[key] = self.group.content(*key)
            there = content[chunk * size : (chunk + 1) * size]
            if there != want:
                raise BrokenPromise(
                    f"chunk {chunk} of op {op.number} at {self.replica} should be "
                    f"{'its input' if who is None else 'the sum of ' + _names(who)}, {_values(want)}, "
                    f"and is {_values(there)}"
                )

    def wrong(self) -> str:
        """Promise 2: what is neither INPUT nor FINAL, "" if nothing is. A member that was removed may hold such."""
        try:
            for op in self.flight.ops:
                self._check(op)
        except BrokenPromise as broken:
            return str(broken)
        return ""

    def _holds(self) -> str:
        ops = [
            f"op {op.number} " + " ".join("INPUT" if who is None else f"FINAL({_names(who)})" for who in op.finals)
            for op in self.flight.ops
        ]
        return "; ".join([f"{self.flight.returned} ops returned", *ops])


def _save_slot(slot: Slot) -> Hashable:
    """Returns what `Pipeline.bind` does not make again of the op and the task."""
    known = ((name, getattr(slot, name)) for name in Slot.__slots__ if name != "views")
    return tuple((name, freeze(value)) for name, value in known if is_plain(value))


def _names(who: tuple[int, ...]) -> str:
    return "+".join(map(str, who))


def _values(content: bytes) -> str:
    return ", ".join(map(str, dict.fromkeys(np.frombuffer(content, np.int64).tolist())))
