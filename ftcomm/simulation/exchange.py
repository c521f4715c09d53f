"""The exchange of a simulated rank in one group: that of the product, with virtual time in place of its threads.

Who calls an op drives it, or the worker does, as chance has it. A thread begins, goes on for some steps and leaves,
each at a time of its own, and sleeps where it pauses:

    BLOCKED  until a word may have been raised, an interrupt, or a tick
    PARKED   until the driver says that something has changed, and to look how long it has waited

The memory of members of the same host is read directly, also that of the dead.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from ftcomm.collective.core import NOTHING, RETURNED, ExchangeCore, StepOutcome
from ftcomm.collective.driver import ENDED, PARKED, Pause
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.inflight import Resumed
from ftcomm.collective.operation import Operation
from ftcomm.collective.placement import group_view
from ftcomm.collective.plan import GroupView
from ftcomm.collective.threads import Threads, Worker
from ftcomm.collective.watchdog import Stall
from ftcomm.control import messages as m
from ftcomm.control.running_time import LOOK
from ftcomm.control.views import Address, View
from ftcomm.errors import CollectiveTimeout, FtcommError, TransportError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.settings.tuning import EVER, MEMBERS, Tuning
from ftcomm.simulation.memory import CHUNK, TinyMemory
from ftcomm.simulation.mirror import Glance, Mirror, Pump, TinySocket
from ftcomm.simulation.network import SimulatedConnection
from ftcomm.transport.base import OnLost, Peer, Poller
from ftcomm.transport.tcp.writer import TcpMirrorWriter

if TYPE_CHECKING:
    from ftcomm.simulation.rank import SimulatedRank
    from ftcomm.sync.futex import Waiter

_reducer = Reducer()  # scratch memory, used within one advance


class Way(enum.Enum):
    """The way that the all-reduces of a view go that have more than one chunk."""

    ONE_SHOT = enum.auto()
    TWO_SHOT = enum.auto()
    RING = enum.auto()
    HIERARCHICAL = enum.auto()

    @property
    def tuning(self) -> Tuning:
        one_shot = ((MEMBERS, {Way.ONE_SHOT: EVER, Way.TWO_SHOT: 0}.get(self, CHUNK)),)
        others = ((MEMBERS, CHUNK),)
        return Tuning(one_host=one_shot, hosts=one_shot, ring=others, two_levels=others)


class PacedCore(ExchangeCore):
    """Does so many steps in a row; then another process gets the processor."""

    left = 0
    moved = False  # whether anything was done, since that was set to False
    tries_at_once: Callable[[], bool]
    on_returned: Callable[[Operation], object]

    def at_once(self, op: Operation) -> bool:
        done = self.tries_at_once() and super().at_once(op)
        if done:
            self.moved = True
            self.on_returned(op)
        return done

    def step(self) -> StepOutcome:
        if not self.left:
            return NOTHING
        op = self.member.inflight.ops[0]
        did = super().step()
        if did is not NOTHING:
            self.left -= 1
            self.moved = True
        if did is RETURNED:
            self.on_returned(op)
        return did

    def wait(self) -> bool:
        came = bool(self.left) and super().wait()
        self.moved = self.moved or came
        return came

    def blocked(self) -> Stall | None:
        return super().blocked() if self.left else None


class PacedExchange(Exchange):
    core_type = PacedCore
    core: PacedCore


class CheckedMutex:
    """A lock where there is one thread: who would wait for it would do so for ever."""

    held = False

    def acquire(self) -> None:
        assert not self.held, "a thread waits for a lock that it has"
        self.held = True

    def release(self) -> None:
        assert self.held
        self.held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class VirtualThreads(Threads, Worker):
    """Stands for the process of `exchange`; the condition and the worker, too."""

    def __init__(self, exchange: SimulatedExchange) -> None:
        self._exchange = exchange
        self.mutex = CheckedMutex()  # type: ignore[assignment]
        self.changed = self  # type: ignore[assignment]
        self.clock = exchange.rank.clock

    def waiter(self, words: memoryview, asleep: int) -> Waiter:
        return Glance(words, asleep, self._exchange.kick)

    def poller(self, peers: Collection[Peer], waiter: Waiter) -> Poller | None:
        mirrors = [peer for peer in peers if isinstance(peer, Mirror)]
        return Pump(mirrors) if mirrors else None

    def worker(self, name: str) -> Worker:
        return self

    def kick(self, drive: Callable[[None], None]) -> RuntimeError | None:
        self._exchange.drive(None)
        return None

    def end(self) -> None:
        """Do nothing any more."""

    def notify_all(self) -> None:
        self._exchange.wake(PARKED)


class SimulatedExchange:
    """`group` is empty for that of all, and `me` the number of the member; None: that of its replica. See
    `ftcomm.collective.exchange.Exchange` for the callbacks."""

    def __init__(
        self,
        rank: SimulatedRank,
        nonce: str,
        *,
        on_lost: OnLost,
        on_stall: Callable[[Stall], object],
        on_failed: Callable[[FtcommError], object],
        group: str = "",
        me: int | None = None,
    ) -> None:
        self.rank, self.group = rank, group
        self.me = rank.replica if me is None else me
        self.memory = TinyMemory(self.me, nonce=nonce, members=rank.replicas)
        self._asleep: Pause | None = None  # why the thread that drives sleeps; None: it does not, or there is none
        self._drives = False
        self._until: Operation | None = None  # for which op
        self._on_lost, self._on_stall, self._on_failed = on_lost, on_stall, on_failed
        timeouts = rank.timeouts
        self.exchange = PacedExchange(
            self.me,
            self.memory,  # type: ignore[arg-type]
            deadline_floor=timeouts.op_floor,
            deadline_ceiling=timeouts.op,
            give_up=timeouts.give_up,
            on_stall=self._stalled,
            on_lost=on_lost,
            on_failed=self._failed,
            reducer=_reducer,
            threads=VirtualThreads(self),
        )
        self.core = self.exchange.core
        self.core.tries_at_once = lambda: rank.world.random.random() < 0.5
        self.core.on_returned = self._returned
        self.inflight = self.exchange.member.inflight
        self.onlookers: dict[SimulatedExchange, None] = {}  # of others, who read this memory
        self._inputs: dict[int, int] = {}  # op -> the number that its inputs go by, where it is another one

    def submit(self, op: Operation, inputs: int | None = None) -> None:
        """Somebody calls an op."""
        if self.rank.world.random.random() < 0.5:
            self.exchange.submit(op)
        elif self.exchange.driver.admit(op):
            self.drive(op)
        if inputs is not None:
            self._inputs[op.number] = inputs

    def input_of(self, op: Operation) -> int:
        """The number that its inputs go by."""
        return self._inputs.get(op.number, op.number)

    # -- views -------------------------------------------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], object]) -> None:
        self.exchange.freeze(lambda: self.rank.busy(0.0002 * self.rank.world.random.random(), quiesced))

    def enter(self, view: View, index: int, peers: Mapping[int, Peer], progress: Mapping[int, m.Progress]) -> Resumed:
        """A view, of whose members the addresses at `index` are those of the memories."""
        plan = self._plan(view, {member.replica: member.ranks[index] for member in view.members})
        self.rank.promises.reordered |= bool(plan.ring or plan.hosts or plan.tree)
        ops = list(self.inflight.ops)
        resumed = self.exchange.enter(plan, peers, progress)
        self.rank.promises.copies += resumed.copied
        for op in ops:
            if op.done:
                self._returned(op)
        return resumed

    def _plan(self, view: View, members: Mapping[int, Address]) -> GroupView:
        """Returns the plan of a view. Chance has it how its large all-reduces go, the same for all members."""
        chance = random.Random(f"{self.rank.world.seed} {self.group} {view.epoch}")
        ways = [way for way in Way if way is not Way.RING or not self.group]  # no subgroup has a ring
        way = chance.choice(ways)
        tuning = way.tuning
        if self.rank.world.trees:
            points, fan = ((MEMBERS, EVER),), chance.choice((1, 2, 3, 8))
            tuning = dataclasses.replace(tuning, tree=points, tree_on_one_host=points, tree_fan=fan)
        if way is Way.HIERARCHICAL:  # by rows, too, as many members go
            tuning = dataclasses.replace(tuning, slices=chance.choice((1, 2, 4, tuning.slices)))
        plan = group_view(
            view.epoch,
            self.me,
            members,
            view.contributing,
            ring=way is Way.RING,
            hierarchical=way is Way.HIERARCHICAL,
            tuning=tuning,
        )
        return dataclasses.replace(plan, alike=way is not Way.TWO_SHOT)

    def part(self, error: BaseException) -> None:
        self.exchange.part(error)

    def end(self, error: BaseException) -> None:
        self.exchange.fail(error)

    # -- between hosts -----------------------------------------------------------------------------------------------

    def mirror(self, connection: SimulatedConnection, replica: int, epoch: int, nonce: str) -> Mirror:
        """Makes a mirror of the memory of a member that was dialled."""
        sock = TinySocket(connection, 0)
        mirror = Mirror(replica, epoch, sock, self._on_lost, self.memory.layout)
        mirror.nonce = nonce

        def news() -> None:
            if sock.over:
                mirror.attend()
            self.kick()

        sock.on_news = news
        return mirror

    def attach(self, connection: SimulatedConnection, replica: int, epoch: int, nonce: str) -> None:
        """A member has dialled that reads this memory."""
        sock = TinySocket(connection, 1)
        sock.on_room = self.kick
        self.exchange.admit(TcpMirrorWriter(sock.protected(), replica, epoch, nonce))

    # -- the thread that drives ----------------------------------------------------------------------------------------

    def drive(self, until: Operation | None) -> None:
        """A thread that calls `until`, or the worker, is to drive."""
        assert not self._drives, "two threads drive"
        self._drives, self._until, self._asleep = True, until, None
        self._soon(self._turn, self.exchange.driver.begin)

    def kick(self) -> None:
        """Let the thread look, since there may be something to do."""
        if self._asleep is not PARKED:
            self.wake(self._asleep)

    def wake(self, pause: Pause | None) -> None:
        """Let the thread go on, if that is why it sleeps."""
        if self._asleep is pause is not None:
            self._asleep = None
            self._soon(self._turn, self.exchange.driver.go)

    def _soon(self, call: Callable[..., object], *args: object) -> None:
        rank = self.rank
        chance = rank.world.random.random()
        rank.world.after(rank.pace * (0.1 + 8 * chance**4) * rank.slow, rank, call, *args)

    def _turn(self, drive: Callable[[Operation | None], Pause]) -> None:
        rank, core, ops = self.rank, self.core, self.inflight.ops
        core.left, core.moved = 1 if rank.burst == 1 else rank.world.random.randint(1, rank.burst), False
        pause = drive(self._until)
        if pause is ENDED:
            self._soon(self._leave)
        elif core.left:
            self._asleep = pause
            if self.exchange.driver.deadline is not None:
                rank.after(LOOK, self.wake, PARKED)
        else:
            self._soon(self._turn, self.exchange.driver.go)
        if core.moved:
            if rank.world.armed and ops and self._halfway(ops[0]):
                rank.world.after(3 * rank.pace * rank.world.random.random(), None, rank.world.armed.pop())
            for other in self.onlookers:
                other.kick()

    def _leave(self) -> None:
        self._drives = False
        if not self.exchange.driver.leave(self._until):
            self._drives = True
            self._soon(self._turn, self.exchange.driver.go)

    def _halfway(self, op: Operation) -> bool:
        """Whether this is a moment for a fault: some of `op` is FINAL, not all of it, or not at every member."""
        finals = op.finals
        return finals[0] is not None and (finals[-1] is None or self.rank.world.random.random() < 0.2)

    def _returned(self, op: Operation) -> None:
        self.rank.promises.returned(self, op)
        self.rank.goes_on_after(op)

    def _stalled(self, stall: Stall) -> None:
        self.rank.say("op %s%s stalls, waiting on %s", stall.op, self.group and f" of {self.group}", stall.waiting_on)
        self._on_stall(stall)

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, CollectiveTimeout | TransportError):
            raise error
        self._on_failed(error)
