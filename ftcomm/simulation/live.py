"""One member, live: the objects of the product, called one step at a time, saved and loaded between the calls."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.inflight import Inflight
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import Slot
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE, Task
from ftcomm.collective.stream import Stream
from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import node as n
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View
from ftcomm.errors import ExpelledError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.simulation.memory import CHUNK, TinyMemory
from ftcomm.simulation.states import attributes, freeze, thaw
from ftcomm.sync.futex import Waiter
from ftcomm.transport.segment import ASLEEP, SLOTS

MOST_MEMBERS = 8
MOST_CHUNKS = 100  # of all ops: so many inputs of a member can be told apart


class Broken(Exception):
    """What the check is there to find: a promise that does not hold, said in a sentence."""


class SteppedStream(Stream):
    """Goes through one stage at a time, and reads one peer's word at a time when it looks whether an op may return.

    `stages` are those that `advance` may go through; "first" is a post of a chunk that is not FINAL here.
    """

    stages: frozenset[str] = frozenset()
    seen = 0  # peers whose TAKEN words were found good, in the look that is under way

    def advance(self) -> bool:
        pipeline, stages, moved = self.pipeline, self.stages, False
        if stages & {"post", "first"}:
            op = pipeline.to_post()
            if op is not None and ("post" in stages or op.finals[op.tasks[op.next].chunk] is None):  # type: ignore[union-attr]
                self.post(op)
                moved = True
        if "arrive" in stages and (slot := pipeline.to_arrive()) is not None:
            pipeline.arrive(slot)
            moved = True
        if "step" in stages:
            for slot in pipeline.to_step():
                self.step(slot)
                moved = True
        if "take" in stages and (slot := pipeline.to_take()) is not None:
            self.take(slot)
            moved = True
        return moved

    def look(self, op: Operation) -> int:
        """The peers, from the first on, whose words a look at them one after the other finds good."""
        if not 0 <= op.end <= self.pipeline.taken:
            return 0
        behind = self.pipeline.taken_by_all.behind(op.end)
        return self.pipeline.peers.index(behind[0]) if behind else len(self.pipeline.peers)

    def stable(self, op: Operation) -> bool:
        if not self.seen:
            return super().stable(op)
        peers = self.pipeline.peers
        if any(peers.index(peer) >= self.seen for peer in self.pipeline.taken_by_all.behind(op.end)):
            return False
        self.seen = 0  # this look is over; the next begins with the first of them again
        if self.checksums is not None:
            self.checksums.compare(op.end)
        return True


class Rest:
    """What of an object does not change, so that it need not be saved: all but what its class names as `STATE`."""

    def __init__(self, of: Any) -> None:
        self._of = {name: id(value) for name, value in vars(of).items() if name not in of.STATE}

    def check(self, of: Any) -> None:
        """Raises `TypeError` for what has changed all the same."""
        state = frozenset(of.STATE)
        for name, value in vars(of).items():
            if name not in state and self._of.get(name) != id(value):
                raise TypeError(f"{type(of).__name__}.{name} changes, and is not named in {type(of).__name__}.STATE")


Resumption = Callable[[Inflight, GroupView], None]  # may spoil what is left to do, in a mutation


@dataclasses.dataclass(frozen=True)
class Group:
    """What is the same in all states: who calls what."""

    members: int = 3
    ops: int = 2
    chunks: int = 2
    one_host: bool = True  # one-shot; else two-shot, since members on several hosts always are
    atomic: bool = False
    verify: bool = False  # fingerprints of the results are compared, and never differ

    @property
    def chunk(self) -> int:
        """Bytes. In two-shot each member has a shard of each chunk, a cache line."""
        return CHUNK if self.one_host else CHUNK * self.members

    @property
    def elements(self) -> int:
        """int64 in a chunk."""
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
        group: Group,
        memories: Mapping[int, TinyMemory],
        stream: type[SteppedStream],
        quiesces: bool,
        spoil: Resumption,
        atomic: bool,
    ) -> None:
        self.replica, self.group, self.memories = replica, group, memories
        self._stream_type, self._quiesces, self._spoil = stream, quiesces, spoil
        self._atomic = atomic
        address = Address("host", 1, "boot", replica, 0, f"{replica:032x}")
        self._node: n.Node | None = n.Node(replica, 0, 1, f"life-{replica}", address, Timeouts.derive())
        self._saved_node: Hashable = None  # if `_node` is None: most steps do not need it
        self.flight = Inflight()
        self.stream: SteppedStream | None = None
        self.frozen = True
        self.pending: tuple[View, dict[int, m.Progress]] | None = None  # a `Resume` that is yet to be carried out
        self._waiter = Waiter(memories[replica].words, ASLEEP, 0)
        self._reducer = Reducer()
        self._streams: dict[GroupView, SteppedStream] = {}
        self._rests: dict[int, tuple[Any, Rest]] = {}  # of what is live now
        self._operations: dict[int, Operation] = {}  # by number; the caller's buffers stay where they are
        self._content: dict[tuple[tuple[int, ...], int, int], bytes] = {}
        # What came of the last call:
        self.up: list[m.Message] = []  # for the coordinator
        self.out: list[tuple[int, m.Message]] = []  # for other members
        self.returned: list[tuple[int, Hashable]] = []  # (op, what its caller got)
        self.entered: View | None = None
        self.failed = False

    @property
    def node(self) -> n.Node:
        if self._node is None:
            self._node = thaw(self._saved_node)
        return self._node

    # -- as a value ------------------------------------------------------------------------------------------------

    def save(self) -> Hashable:
        stream: Hashable = None
        ops = self.flight.ops
        if self.stream is not None:
            live, pipeline = self.stream, self.stream.pipeline
            slots = [pipeline.slots[index % SLOTS] for index in range(pipeline.taken, pipeline.posted)]
            for slot in slots:
                if all(slot.op is not op for op in ops):
                    raise Broken(f"the stream of {self.replica} still works on op {slot.op.number}, which has returned")
            self._check_rest(pipeline)
            stream = (
                live.view,
                live.seen,
                (pipeline.posted, pipeline.arrived, pipeline.taken),
                tuple(op.number for op in pipeline.unposted),
                tuple((slot.op.number, tuple(freeze(getattr(slot, name)) for name in Slot.STATE)) for slot in slots),
                None if live.checksums is None else self._state(live.checksums),
            )
        return (
            self._saved_node if self._node is None else freeze(self._node),
            attributes(self.flight, {"ops"}),
            tuple((op.number, op.array.tobytes(), self._state(op)) for op in ops),
            stream,
            self.frozen,
            None if self.pending is None else (self.pending[0], freeze(self.pending[1])),
        )

    def _state(self, of: Any) -> tuple[Hashable, ...]:
        self._check_rest(of)
        return tuple(freeze(getattr(of, name)) for name in of.STATE)

    def _check_rest(self, of: Any) -> None:
        known = self._rests.get(id(of))
        if known is None or known[0] is not of:
            self._rests[id(of)] = of, Rest(of)
        else:
            known[1].check(of)

    def load(self, saved: Any) -> None:
        self._saved_node, flight, ops, stream, self.frozen, pending = saved
        self._node = None
        for name, value in flight:
            setattr(self.flight, name, thaw(value))
        self.pending = None if pending is None else (pending[0], thaw(pending[1]))
        self.flight.ops = deque(self._operation(*op) for op in ops)
        self.stream = None
        if stream is None:
            return
        view, seen, counters, unposted, slots, compared = stream
        by_number = {op.number: op for op in self.flight.ops}
        self.stream = live = self._streams[view]
        live.seen, pipeline = seen, live.pipeline
        pipeline.posted, pipeline.arrived, pipeline.taken = counters
        if live.checksums is not None:
            for name, value in zip(live.checksums.STATE, compared, strict=True):
                setattr(live.checksums, name, thaw(value))
        pipeline.unposted = deque(by_number[number] for number in unposted)
        pipeline.slots = [Slot() for _ in range(SLOTS)]
        for index, (number, state) in enumerate(slots, start=pipeline.taken):
            slot = pipeline.slots[index % SLOTS]
            slot.index, slot.op = index, by_number[number]
            for name, value in zip(Slot.STATE, state, strict=True):
                setattr(slot, name, thaw(value))
            slot.algorithm, slot.task = pipeline.algorithms.of_task(slot.op, slot.task)
            pipeline.bind(slot)

    def _operation(self, number: int, content: bytes, state: Any) -> Operation:
        op = self._operations[number]
        for name, value in zip(op.STATE, state, strict=True):
            setattr(op, name, thaw(value))
        op.array[:] = np.frombuffer(content, np.int64)
        op._latch.acquire(blocking=False)  # as it is until the op is done
        return op

    # -- what it does ----------------------------------------------------------------------------------------------

    def issue(self) -> str:
        """The caller calls its next op."""
        number = self.flight.issued
        if number >= self.group.ops:
            return ""
        op = self.group.operation(self.replica, number, self._atomic)
        self._operations[number] = op
        self.flight.add(op)
        if self.stream is not None:
            self.stream.pipeline.unposted.append(op)
        return f"calls op {number}"

    def advance(self, *stages: str) -> str:
        """One task through the first of `stages` that is possible."""
        stream = self.stream
        if stream is None or self.frozen:
            return ""
        before, pipeline = self._finals(), stream.pipeline
        counts = (pipeline.posted, pipeline.arrived, pipeline.taken)
        task = pipeline.slots[pipeline.taken % SLOTS].task if pipeline.taken < pipeline.posted else None
        copies = isinstance(task, Task) and task.holder != REDUCE
        unposted = len(pipeline.unposted)
        stream.stages = frozenset(stages)
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
        return f"posts task {counts[0]}" if pipeline.posted > counts[0] else "reduces its shard"

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
        if stream is None or self.frozen or not self.flight.ops or not stream.stable(self.flight.ops[0]):
            return ""
        op = self.flight.ops[0]
        self.flight.return_first()
        stream.seen = 0
        return self._returns(op)

    def _returns(self, op: Operation) -> str:
        """From here on the caller may do with its buffer what it likes, so it is no part of any state."""
        if op.error is not None:
            raise Broken(f"op {op.number} raised {op.error!r} at {self.replica}")
        self._check(op)
        if None in op.finals:
            raise Broken(f"op {op.number} returned at {self.replica} with chunks that are INPUT")
        if self.group.atomic and len(set(op.finals)) > 1:
            raise Broken(f"op {op.number} is atomic, and returned at {self.replica} with the sums of {op.finals}")
        numbers = tuple(op.array[:: self.group.elements].tolist())
        self.returned.append((op.number, (op.array.tobytes(), numbers, op.spans())))
        op.array[:] = -1
        return f"returns op {op.number} = {', '.join(map(str, numbers))}"

    def hear(self, message: m.Message) -> str:
        """A message of the coordinator. A change of view stops the exchange, and the others are told."""
        self._do(self.node.from_up(message))
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
        """Carry out a `Resume`, as `ftcomm.engine` and `Exchange.resume` do."""
        if self.pending is None:
            return ""
        (view, progress), self.pending = self.pending, None
        if not self.node.wants(view):
            return f"has no use for view {view.epoch} any more"
        plan = GroupView(view.epoch, self.replica, view.replicas, view.contributing, self.group.one_host)
        stream = self._stream_type(
            plan,
            self.memories[self.replica],  # type: ignore[arg-type]
            {replica: self.memories[replica] for replica in view.replicas if replica != self.replica},  # type: ignore[misc]
            self._waiter,
            self._reducer,
            lambda *args: None,
            self._diverged if self.group.verify else None,
        )
        self._streams[plan] = stream
        if self.stream is None:
            self.flight.number_from(progress)
        in_flight = list(self.flight.ops)
        resumed = self.flight.resume(progress, plan.contributors)
        self._spoil(self.flight, plan)
        stream.pipeline.unposted.extend(self.flight.ops)
        self.stream, self.frozen, self.entered = stream, False, view
        said = [self._returns(op) for op in in_flight if op.done]
        self._do(self.node.resumed(view))
        left = f"{resumed.copied} chunks to copy, {resumed.reduced} to reduce again" if resumed.ops else "no op open"
        return "; ".join([f"enters view {view.epoch} of {_names(view.replicas)}, {left}", *said])

    def _diverged(self, divergence: Divergence) -> None:
        raise Broken(f"a false alarm at {self.replica}: {divergence}")

    def _do(self, actions: list[n.Action]) -> None:
        for action in actions:
            if isinstance(action, n.Up):
                self.up.append(action.message)
            elif isinstance(action, n.ToPeer):
                self.out.append((action.replica, action.message))
            elif isinstance(action, act.Freeze):
                self.frozen = self.frozen or self._quiesces
                self.pending = None
                if self.stream is not None:
                    self.stream.seen = 0
                progress = m.Progress(0, (), fresh=True) if self.stream is None else self.flight.progress()
                self._do(self.node.quiesced(action.view.epoch, progress))
            elif isinstance(action, act.Resume):
                self.pending = (action.view, dict(action.progress))
            elif isinstance(action, act.Failed):
                self.failed = True
                self.flight.abandon(ExpelledError(action.reason))
                if self.stream is not None:
                    self.stream.close()
                self.stream, self.frozen, self.pending = None, True, None

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
                raise Broken(
                    f"chunk {chunk} of op {op.number} at {self.replica} should be "
                    f"{'its input' if who is None else 'the sum of ' + _names(who)}, {_values(want)}, "
                    f"and is {_values(there)}"
                )

    def wrong(self) -> str:
        """Promise 2: what is neither INPUT nor FINAL, "" if nothing is. A member that was expelled may hold such."""
        try:
            for op in self.flight.ops:
                self._check(op)
        except Broken as broken:
            return str(broken)
        return ""

    def _holds(self) -> str:
        ops = [
            f"op {op.number} " + " ".join("INPUT" if who is None else f"FINAL({_names(who)})" for who in op.finals)
            for op in self.flight.ops
        ]
        return "; ".join([f"{self.flight.returned} ops returned", *ops])


def _names(who: tuple[int, ...]) -> str:
    return "+".join(map(str, who))


def _values(content: bytes) -> str:
    return ", ".join(map(str, dict.fromkeys(np.frombuffer(content, np.int64).tolist())))
