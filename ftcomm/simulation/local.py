"""Finds what one member can do, computed once for each of its states and of what it sees, by running the product.

A member reads nothing but its own state, the memories of the others, and messages. So its steps are a function of
these, and the same answer holds in all the states of the group that have them in common: a hundred thousand calls of
the product answer for tens of millions of steps of the group.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

from ftcomm.control import coordinator as c
from ftcomm.control import coordinator_actions as ca
from ftcomm.control import messages as m
from ftcomm.control.leader import ToCoordinator
from ftcomm.control.probe_schedule import Probe, ProbeOutcome, ProbeReason
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import View
from ftcomm.errors import FtcommError
from ftcomm.simulation.live import CheckedGroup, Live
from ftcomm.simulation.memory import TinyMemory
from ftcomm.simulation.mutations import Mutation
from ftcomm.simulation.promises import BrokenPromise
from ftcomm.simulation.states import freeze, load_memory, save_memory, thaw

STAGES = ("post", "gather", "announce", "arrive", "step", "take", "settle")
LOST = "its connection closed"  # also said of who is suspected, so that both are one state

PairNumber = int  # a member and its memory, numbered
PairNumbers = tuple[PairNumber, ...]


class StepKind(enum.Enum):
    """The kind of step that a member, or the coordinator, is about to do."""

    CALLS = "calls its next op"
    GOES_ON = "goes on with its tasks"
    LOOKS = "looks whether its first op may return"
    RETURNS = "returns its first op"
    ENTERS = "enters the view that all have told for"
    HEARS = "hears the coordinator"
    IS_TOLD = "hears another member"
    CRASHES = "crashes"
    DECIDES = "decides a view"


class Transition(NamedTuple):
    """A step that a member may do next, and what comes of it."""

    pair: PairNumber
    kind: StepKind
    text: str
    returned: tuple[tuple[int, int], ...] = ()  # (op, outcome)
    up: tuple[m.Message, ...] = ()
    out: tuple[tuple[int, m.Message], ...] = ()
    entered: View | None = None
    failed: bool = False
    broken: str = ""


class Numbering:
    """Gives equal values the same number, from 0 on."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def __len__(self) -> int:
        return len(self.values)

    def number(self, value: Hashable) -> int:
        found = self._numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


class Members:
    """The members of a group. `eager` are the stages that happen by themselves, see `exhaustive`."""

    def __init__(self, group: CheckedGroup, mutation: Mutation, eager: frozenset[str]) -> None:
        self.group = group
        self._eager = tuple(sorted(eager))
        self._stages = tuple(stage for stage in STAGES if stage not in eager)
        self._memories = {i: TinyMemory(i, group.chunk) for i in range(group.members)}
        atomic = group.atomic and mutation.atomic
        self.live = [
            Live(i, group, self._memories, mutation.stream, mutation.quiesces, mutation.spoil, atomic)
            for i in range(group.members)
        ]
        self._locals = Numbering()
        self._dead = self._locals.number("dead")
        self._contents = Numbering()
        self._loaded: dict[int, int] = {}  # member -> its memory, as it is now
        self._at: dict[int, int] = {}  # member -> its state as it is now, where that is one that has a number
        self.pairs = Numbering()
        self.outcomes = Numbering()
        # Of each pair:
        self.memory: list[int] = []
        self.dead: list[bool] = []
        self.looking: list[bool] = []  # in the middle of a look at the words of the others
        self.finished: list[int] = []  # the epoch in which it has returned all ops, 0 before
        self.wrong: list[str] = []  # what is neither INPUT nor FINAL
        self._reads: list[tuple[int, ...]] = []  # the members whose memories it looks at
        self._steps: dict[tuple[int, ...], list[Transition]] = {}
        self._settled: dict[tuple[int, ...], PairNumber] = {}
        self._heard: dict[tuple[PairNumber, int], Transition] = {}

    def new(self, i: int) -> PairNumber:
        return self._save(i)

    def crashed(self, pair: PairNumber) -> PairNumber:
        """Returns the state of a member that has crashed: it does nothing more, and its memory stays for those who map
        it."""
        crashed = self._pair(self._dead, self.memory[pair])
        if crashed == len(self._reads):
            self._reads.append(())
            self.finished.append(0)
            self.looking.append(False)
            self.wrong.append("")
        return crashed

    def steps(self, i: int, pair: PairNumber, memories: PairNumbers) -> list[Transition]:
        """Everything that member `i` can do of its own."""
        key = (pair, *[memories[j] for j in self._reads[pair]])
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._find_steps(i, pair, memories)
        return known

    def settle(self, i: int, pair: PairNumber, memories: PairNumbers) -> PairNumber:
        """Does what happens by itself, until nothing more does."""
        key = (pair, *[memories[j] for j in self._reads[pair]])
        known = self._settled.get(key)
        if known is None:
            self._load(i, pair, memories)
            known = self._settled[key] = self._save(i) if self._advance(i) else pair
        return known

    def hear(self, i: int, pair: PairNumber, message: m.Message, number: int, by_member: bool) -> Transition:
        """A message of the coordinator, or `by_member`; each message has its own `number`."""
        key = (pair, number)
        known = self._heard.get(key)
        if known is None:
            self._load(i, pair, ())
            live = self.live[i]
            kind, call = (StepKind.IS_TOLD, live.told) if by_member else (StepKind.HEARS, live.hear)
            known = self._heard[key] = self._step(i, False, kind, call, message)
            assert known is not None
        return known

    # -- running the product -----------------------------------------------------------------------------------------

    def _find_steps(self, i: int, pair: PairNumber, memories: PairNumbers) -> list[Transition]:
        live = self.live[i]
        if self.looking[pair]:
            calls: list[tuple[Any, ...]] = [(StepKind.RETURNS, live.finish)]
        else:
            calls = [
                (StepKind.CALLS, live.issue),
                *((StepKind.GOES_ON, live.advance, stage) for stage in self._stages),
                (StepKind.LOOKS, live.look),
                (StepKind.RETURNS, live.finish),
                (StepKind.ENTERS, live.enter),
            ]
        found = []
        for kind, call, *arguments in calls:
            self._load(i, pair, memories)
            step = self._step(i, bool(self._reads[pair]), kind, call, *arguments)
            if step.text:
                found.append(step)
        return found

    def _step(self, i: int, settles: bool, kind: StepKind, call: Any, *arguments: Any) -> Transition:
        """`settles`: what then happens by itself belongs to it. Only if it looks at no memory that the call did not."""
        live = self.live[i]
        live.up, live.out, live.returned, live.entered, live.failed = [], [], [], None, False
        before = self._at.pop(i)
        try:
            text = call(*arguments)
            if not text:
                self._at[i] = before  # a call that says nothing has changed nothing
                return Transition(-1, kind, "")
            if settles:
                self._advance(i)
            pair = self._save(i)
        except (BrokenPromise, FtcommError) as error:
            broken = str(error) if isinstance(error, BrokenPromise) else f"{type(error).__name__}: {error}"
            return Transition(-1, kind, kind.value, broken=broken)
        returned = tuple((op, self.outcomes.number(outcome)) for op, outcome in live.returned)
        return Transition(pair, kind, text, returned, tuple(live.up), tuple(live.out), live.entered, live.failed)

    def _advance(self, i: int) -> bool:
        """Returns whether there was anything to do."""
        live, moved = self.live[i], False
        if live.stream is not None and not live.stream.seen and self._eager:
            while live.advance(*self._eager):
                moved = True
        return moved

    def _load(self, i: int, pair: PairNumber, memories: PairNumbers) -> None:
        local, memory = self.pairs.values[pair]
        if self._at.get(i) != local:
            self.live[i].load(self._locals.values[local])
            self._at[i] = local
        for other, content in (*enumerate(memories), (i, memory)):
            if self._loaded.get(other) != content:
                load_memory(self._memories[other], self._contents.values[content])
                self._loaded[other] = content

    def _save(self, i: int) -> PairNumber:
        live = self.live[i]
        memory = self._contents.number(save_memory(self._memories[i]))
        self._loaded[i] = memory
        self._at[i] = self._locals.number(live.save())
        pair = self._pair(self._at[i], memory)
        if pair == len(self._reads):
            stream = live.stream
            runs = stream is not None and not live.frozen
            self._reads.append(stream.view.members if stream is not None and runs else ())
            done = runs and live.flight.returned == self.group.ops
            self.finished.append(stream.view.epoch if stream is not None and done else 0)
            self.looking.append(stream is not None and stream.seen > 0)
            self.wrong.append(live.wrong())
        return pair

    def _pair(self, local: int, memory: int) -> PairNumber:
        pair = self.pairs.number((local, memory))
        if pair == len(self.memory):
            self.memory.append(memory)
            self.dead.append(local == self._dead)
        return pair


class Decided(NamedTuple):
    coordinator: int
    views: tuple[View, ...]  # persisted by it, in order
    sent: tuple[tuple[int, m.Message], ...]


class Coordination:
    """The coordinator. Connections have the numbers of the replicas."""

    def __init__(self, group: CheckedGroup) -> None:
        self._values = Numbering()
        self._known: dict[tuple[int, Hashable], Decided] = {}
        live = c.Coordinator(group.members, 1, Timeouts.derive(), [], 0.0, 1)
        self.first = self._values.number((freeze(live), ()))

    def views(self, coordinator: int) -> tuple[View, ...]:
        views: tuple[View, ...] = self._values.values[coordinator][1]
        return views

    def receive(self, coordinator: int, replica: int, message: m.Message) -> Decided:
        return self._call(coordinator, ("receive", replica, message, 0.0))

    def closed(self, coordinator: int, replica: int) -> Decided:
        """A process has ended, and its connection with it."""
        return self._call(coordinator, ("disconnected", replica, 0.0))

    def suspected(self, coordinator: int, replica: int, by: int) -> Decided:
        member = self.views(coordinator)[-1].member(replica)
        assert member is not None
        return self.receive(coordinator, by, m.Suspect(replica, member.incarnation, LOST, True))

    def severed(self, coordinator: int, replica: int, by: int) -> Decided:
        view = self.views(coordinator)[-1]
        member = view.member(replica)
        assert member is not None
        return self.receive(coordinator, by, m.Severed(replica, member.incarnation, view.epoch, LOST))

    def _call(self, coordinator: int, event: tuple[Any, ...]) -> Decided:
        known = self._known.get((coordinator, event))
        if known is not None:
            return known
        saved, views = self._values.values[coordinator]
        live = thaw(saved)
        sent = []
        actions = deque(getattr(live, event[0])(*event[1:]))
        while actions:
            action = actions.popleft()
            if isinstance(action, Probe) and action.why is ProbeReason.ACCUSED:  # an error: the accused is cut off
                actions.extendleft(reversed(live.probed(action, ProbeOutcome.UNREACHABLE, 0.0)))
            elif isinstance(action, Probe) and action.why is ProbeReason.SEVERED:
                actions.extendleft(reversed(live.probed(action, ProbeOutcome.ANSWERED, 0.0)))
            elif isinstance(action, ca.Send):
                sent.append((action.conn, action.message))
            elif isinstance(action, ca.Persist):
                if views and action.view.epoch <= views[-1].epoch:
                    raise BrokenPromise(f"epoch {action.view.epoch} is used twice")
                views = (*views, action.view)
        decided = Decided(self._values.number((freeze(live), views)), views, tuple(sent))
        self._known[coordinator, event] = decided
        return decided


def opening(live: Live) -> list[m.Message]:
    """Returns what a member says to the coordinator first."""
    live.with_leader.start()
    return [action.message for action in live.with_leader.leader.opened() if isinstance(action, ToCoordinator)]
