"""One member, live: the objects of the product, called one step at a time, saved and loaded between the calls."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from ftcomm.collective.divergence import Alarm, Divergence
from ftcomm.collective.flight import Flight
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.stream import Stream, _Slot
from ftcomm.control import messages as m
from ftcomm.control import node as n
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View
from ftcomm.errors import ExpelledError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.kernels.wait import Waiter
from ftcomm.simulation.memory import CHUNK, TinyMemory
from ftcomm.simulation.states import attributes, freeze, thaw
from ftcomm.transport.segment import ASLEEP, POSTED, SLOTS, TAKEN

_OF_STREAM = {  # constant, or derived from the view, or saved in another way
    *("view", "memories", "_low", "_high", "_segment", "_own", "_peers", "_words", "_tokens", "_lanes", "_readers"),
    *("contributors", "_express", "_sole", "_contributes", "_pair", "_mine_first", "_waiter", "_reducer", "_alarm"),
    *("_carrier", "_route", "_awaited", "_looked_at", "_far", "_straight", "_place", "_detail", "_last"),
    *("_hearsay", "_left", "_right", "_relayed", "_served"),
    *("_lines", "_on_lost", "unposted", "_ring", "stages", "seen"),
}
_OF_OPERATION = {"array", "dtype", "op", "count", "call", "elements", "itemsize", "atomic", "_latch"}
_OF_ALARM = {"_own", "_words", "_all_taken", "_on_divergence"}
_OF_FLIGHT = {"ops"}
_OF_SLOT = {"op", "here", "lane", "needs"}

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

    def _may_post(self) -> bool:
        if not self.stages & {"post", "first"} or not super()._may_post():
            return False
        op = self.unposted[0]
        return "post" in self.stages or op.finals[op.tasks[op.next].chunk] is None

    def _may_take(self) -> bool:
        return "take" in self.stages and super()._may_take()

    def _all(self, word: int, count: int) -> bool:
        if word == POSTED and "arrive" not in self.stages:
            return False
        if word != TAKEN or not self.seen:
            return self._matches(word, count)
        words = self._words
        self._words = words[self.seen :]
        try:
            good = self._matches(word, count)
        finally:
            self._words = words
        if good:
            self.seen = 0  # this look is over; the next begins with the first of them again
        return good

    def _matches(self, word: int, count: int) -> bool:
        """What the product says of the words of all others that were not seen yet."""
        return super()._all(word, count)

    def look(self, op: Operation) -> int:
        """The peers, from the first on, whose words a look at them one after the other finds good."""
        if not 0 <= op.end <= self.taken:
            return 0
        words, good = self._words, 0
        try:
            while good < len(words):
                self._words = words[good : good + 1]
                if not self._matches(TAKEN, op.end):
                    break
                good += 1
        finally:
            self._words = words
        return good


Resumption = Callable[[Flight, GroupView], None]  # may spoil what is left to do, in a mutation


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
        if made._kept is not None:
            made._kept[:] = 0  # else what the memory held before would tell states apart
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
        self.flight = Flight()
        self.stream: SteppedStream | None = None
        self.frozen = True
        self.pending: tuple[View, dict[int, m.Progress]] | None = None  # a `Resume` that is yet to be carried out
        self._waiter = Waiter(memories[replica].words, ASLEEP, 0)
        self._reducer = Reducer()
        self._streams: dict[GroupView, SteppedStream] = {}
        self._alarms: dict[GroupView, Alarm | None] = {}  # a stream that is closed lets go of its own
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
            live = self.stream
            slots = [live._ring[index % SLOTS] for index in range(live.taken, live.posted)]
            for slot in slots:
                if all(slot.op is not op for op in ops):
                    raise Broken(f"the stream of {self.replica} still works on op {slot.op.number}, which has returned")
            stream = (
                live.view,
                live.seen,
                attributes(live, _OF_STREAM),
                tuple(op.number for op in live.unposted),
                tuple((slot.op.number, tuple((x, freeze(getattr(slot, x))) for x in _MORE_OF_SLOT)) for slot in slots),
                None if live._alarm is None else attributes(live._alarm, _OF_ALARM),
            )
        return (
            self._saved_node if self._node is None else freeze(self._node),
            attributes(self.flight, _OF_FLIGHT),
            tuple((op.number, op.array.tobytes(), attributes(op, _OF_OPERATION)) for op in ops),
            stream,
            self.frozen,
            None if self.pending is None else (self.pending[0], freeze(self.pending[1])),
        )

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
        view, seen, others, unposted, slots, compared = stream
        by_number = {op.number: op for op in self.flight.ops}
        self.stream = live = self._streams[view]
        for name, value in others:
            setattr(live, name, thaw(value))
        live.seen = seen
        live._alarm = None if compared is None else self._alarms[view]
        for name, value in compared or ():
            setattr(live._alarm, name, thaw(value))
        live.unposted = deque(by_number[number] for number in unposted)
        live._ring = [_Slot() for _ in range(SLOTS)]
        for index, (number, rest) in enumerate(slots, start=live.taken):
            slot = live._ring[index % SLOTS]
            for name, value in rest:
                setattr(slot, name, thaw(value))
            slot.op = op = by_number[number]
            start = slot.task.chunk * op.elements
            slot.here = op.array[start : start + slot.span * op.elements]
            slot.needs = ()
            slot.lane = live.lane(op.dtype, op.wire, len(slot.here), live.staging(index))

    def _operation(self, number: int, content: bytes, others: Any) -> Operation:
        op = self._operations[number]
        constant = {name: value for name, value in op.__dict__.items() if name in _OF_OPERATION}
        op.__dict__ = {**constant, **{name: thaw(value) for name, value in others}}
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
            self.stream.unposted.append(op)
        return f"calls op {number}"

    def advance(self, *stages: str) -> str:
        """One task through the first of `stages` that is possible."""
        stream = self.stream
        if stream is None or self.frozen:
            return ""
        before = self._finals()
        counts = (stream.posted, stream.arrived, stream.taken)
        copies = stream.taken < stream.posted and stream._ring[stream.taken % SLOTS].task.holder >= 0
        unposted = len(stream.unposted)
        stream.stages = frozenset(stages)
        if not stream.advance():
            return "has nothing left to do of an op" if len(stream.unposted) < unposted else ""
        said = [
            f"{'copies' if copies else 'reduces'} chunk {chunk} of op {number}, now FINAL: the sum of {_names(who)}"
            for (number, chunk), who in self._finals().items()
            if who is not None and before[number, chunk] != who
        ]
        if stream.taken > counts[2]:
            return "; ".join(said) or "is done with a task"
        if stream.arrived > counts[1]:
            return f"sees task {counts[1]} posted by all{'' if self.group.one_host else ', and reduces its shard'}"
        return f"posts task {counts[0]}"

    def _finals(self) -> dict[tuple[int, int], tuple[int, ...] | None]:
        return {(op.number, chunk): who for op in self.flight.ops for chunk, who in enumerate(op.finals)}

    def look(self) -> str:
        """Begin to look whether the first op may return: some peers' words are good, that of the next is not yet."""
        stream = self.stream
        if stream is None or self.frozen or not self.flight.ops:
            return ""
        good = stream.look(self.flight.ops[0])
        if not 0 < good < len(stream._words):
            return ""
        stream.seen = good
        return f"looks whether op {self.flight.ops[0].number} may return, and has seen {good} of {len(stream._words)}"

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
        self._streams[plan], self._alarms[plan] = stream, stream._alarm
        if self.stream is None:
            self.flight.number_from(progress)
        in_flight = list(self.flight.ops)
        resumed = self.flight.resume(progress, plan.contributors)
        self._spoil(self.flight, plan)
        stream.unposted.extend(self.flight.ops)
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
            elif isinstance(action, n.Freeze):
                self.frozen = self.frozen or self._quiesces
                self.pending = None
                if self.stream is not None:
                    self.stream.seen = 0
                progress = m.Progress(0, (), fresh=True) if self.stream is None else self.flight.progress()
                self._do(self.node.quiesced(action.view.epoch, progress))
            elif isinstance(action, n.Resume):
                self.pending = (action.view, dict(action.progress))
            elif isinstance(action, n.Failed):
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


_MORE_OF_SLOT = tuple(name for name in _Slot.__slots__ if name not in _OF_SLOT)


def _names(who: tuple[int, ...]) -> str:
    return "+".join(map(str, who))


def _values(content: bytes) -> str:
    return ", ".join(map(str, dict.fromkeys(np.frombuffer(content, np.int64).tolist())))
