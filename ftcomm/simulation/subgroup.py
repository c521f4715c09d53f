"""A subgroup at a simulated rank: `ftcomm.membership.derived`, driven as `SubgroupInternals` drives it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Stall
from ftcomm.control.actions import EnterView, Freeze
from ftcomm.control.blame import CHANGE
from ftcomm.control.data_plane import WaitsFor
from ftcomm.control.messages import Progress
from ftcomm.control.views import Address, View
from ftcomm.errors import FtcommError
from ftcomm.membership.derived import (
    AskMember,
    DerivedAction,
    DerivedMembership,
    FailGroup,
    Left,
    ReachMember,
    ReportStall,
    ReturnedElsewhere,
    SubgroupProgress,
    TellCaller,
)
from ftcomm.simulation.exchange import SimulatedExchange
from ftcomm.simulation.memory import CHUNK
from ftcomm.simulation.mirror import NoConnection
from ftcomm.simulation.network import SimulatedConnection
from ftcomm.simulation.promises import ELEMENTS, input_of
from ftcomm.transport.group_connection import ASK, ENTERED, GroupConnection
from ftcomm.transport.peer_cache import PeerCache

if TYPE_CHECKING:
    from ftcomm.simulation.rank import SimulatedRank

DATA = "data"  # what a connection is for that carries memory
_COUNTS = (1, 2 * ELEMENTS, 3 * ELEMENTS + 4)  # elements of an op, in turn
_INPUTS = 1000  # the inputs of a group go by numbers of their own
_LATER = 1e-6  # s, so that a time that is due is over in spite of rounding


class AcceptedEnd(NamedTuple):
    """The accepted end of a connection that was dialled for a group, in place of a socket. `came` has what has come
    before the group took it."""

    connection: SimulatedConnection
    came: Sequence[Any] = ()

    def close(self) -> None:
        self.connection.close(1)


class SimulatedSubgroup:
    """`number` tells its ops from those of other groups of the rank, `made` its segment from all before."""

    def __init__(self, rank: SimulatedRank, name: str, number: int, among: Collection[int], made: int) -> None:
        self.rank, self.name = rank, name
        self._number = number
        self._nonce = f"{rank.port:016x}{made:016x}"
        self.exchange = SimulatedExchange(
            rank,
            self._nonce,
            on_lost=lambda replica, epoch, reason: None,
            on_stall=rank.stalled_in_group,
            on_failed=rank.fail,
            group=name,
        )
        here = Address(f"host{rank.host}", rank.port % 65536, f"boot{rank.host}", rank.port, 0, self._nonce)
        known = None if rank.view is None else rank.next_boundary
        self.membership = DerivedMembership(rank.replica, among, here, rank.timeouts, known)
        self._over = False
        self._cache = PeerCache()
        self._asking: dict[SimulatedConnection, None] = {}
        self._due = float("inf")

    def call(self, step: int) -> Operation:
        """The op of a step."""
        inputs = _INPUTS * (1 + self._number) + step
        given = input_of(self.rank.replica, inputs, _COUNTS[step % len(_COUNTS)])
        op = Operation(given.copy(), "float32", "sum", CHUNK)
        self.exchange.submit(op, inputs)
        return op

    def job_entered(self, view: View) -> None:
        """A view of the job is in force."""
        self._do(self.membership.job_entered(view))

    def take(self, call: GroupConnection) -> bool:
        """Does what `ftcomm.groups.communicator.Communicator.take` does."""
        if call.what in (ASK, ENTERED):
            if not self.membership.accepts(call):
                return False
            self._do(self.membership.asked(call))
            self.rank.goes_on_in_group()
        elif call.instance == self._nonce:
            self.exchange.attach(call.sock.connection, call.member, call.epoch, call.nonce)  # type: ignore[attr-defined]
        else:
            call.sock.close()
        return True

    def waiting(self) -> WaitsFor | None:
        stall = self.exchange.exchange.waiting(self.rank.timeouts.beat)
        if stall is not None:
            return WaitsFor(stall.op, stall.waiting_on)
        missing = self.membership.missing()
        return WaitsFor(CHANGE, missing) if missing and self._is_needed() else None

    @property
    def left(self) -> Left:
        exchange = self.exchange.exchange
        return Left(exchange.returned, exchange.taken, self.membership.is_fresh)

    def end(self, error: FtcommError) -> None:
        """End the group: it is closed, or the rank cannot go on."""
        if self._over:
            return
        self._do(self.membership.close())
        self._over = True
        self._hang_up()
        self.exchange.end(error)
        self._cache.close()

    # -- what the membership wants -----------------------------------------------------------------------------------

    def _happens(self, what: Callable[..., list[DerivedAction]], *args: Any) -> None:
        if not self._over:
            self._do(what(*args, self.rank.clock()))

    def _do(self, actions: list[DerivedAction]) -> None:
        for action in actions:
            match action:
                case Freeze(view):
                    self._freeze(view)
                case AskMember():
                    self._ask(action)
                case TellCaller(call, account):
                    if account is not None:
                        call.sock.connection.send(1, account)  # type: ignore[attr-defined]
                    call.sock.close()
                case ReachMember():
                    self._reach(action)
                case EnterView(view, progress):
                    self._enter(view, progress)
                case ReportStall(epoch, missing, lasted):
                    if self._is_needed():
                        self.rank.stalled_in_group(Stall(epoch, CHANGE, missing, lasted))
                case ReturnedElsewhere(ops):
                    self.exchange.exchange.returned_elsewhere(ops)
                case FailGroup(replica, ops):
                    raise AssertionError(
                        f"{self.rank.name} has called ops after the {ops} of {replica}, which has left"
                    )
        due = self.membership.due()
        if due < self._due:
            self._due = due
            self.rank.after(max(0.0, due - self.rank.clock()) + _LATER, self._tick)

    def _tick(self) -> None:
        self._due = float("inf")
        self._happens(self.membership.tick)

    def _is_needed(self) -> bool:
        return bool(self.exchange.inflight.ops) or self.rank.waits_for_groups

    def _hang_up(self) -> None:
        """Close the connections that ask other members."""
        asking, self._asking = self._asking, {}
        for connection in asking:
            connection.close(0)

    def _freeze(self, view: View) -> None:
        self._hang_up()
        self._cache.expect(view.epoch, view.replicas)
        self.exchange.freeze(lambda: self._quiesced(view.epoch))

    def _quiesced(self, epoch: int) -> None:
        if not self._over and self.membership.wants(epoch):
            self.rank.promises.holds(self.exchange)
            self._happens(self.membership.quiesced, epoch, self.exchange.exchange.progress())

    def _ask(self, ask: AskMember) -> None:
        epoch, replica = ask.view.epoch, ask.member.replica

        def opened(connection: SimulatedConnection) -> None:
            if self._over or not self.membership.is_current(epoch):
                connection.close(0)
                return
            self._asking[connection] = None
            connection.receive[0] = lambda account: told(connection, account)
            connection.closed[0] = lambda reason: closed(connection)

        def told(connection: SimulatedConnection, said: SubgroupProgress | Left) -> None:
            self._asking.pop(connection, None)
            connection.close(0)
            if isinstance(said, Left):
                flight = self.exchange.inflight
                self._happens(self.membership.left, epoch, replica, said, flight.returned, flight.issued)
            else:
                self._happens(self.membership.told, epoch, replica, said)

        def closed(connection: SimulatedConnection) -> None:
            if connection in self._asking:
                del self._asking[connection]
                failed(None)

        def failed(reason: NoConnection | None) -> None:
            self._happens(self.membership.unanswered, epoch, replica)

        what = ENTERED if ask.entered else ASK
        self._dial(ask.member.ranks[self.rank.index], what, self.rank.incarnation, epoch, ask.there, opened, failed)

    def _reach(self, reach: ReachMember) -> None:
        epoch, replica, nonce = reach.view.epoch, reach.member.replica, reach.address.nonce
        there = reach.member.ranks[self.rank.index]
        if reach.severed:
            self._cache.severed(epoch, replica)
        if self._cache.find(epoch, replica, nonce) is not None:
            self._has_reached(epoch, replica)
            return
        owner = self.rank.exchange_on_host(there.pid, nonce)
        if owner is not None:
            owner.onlookers[self.exchange] = None
            self._cache.add(epoch, replica, owner.memory)
            self._has_reached(epoch, replica)
            return

        def opened(connection: SimulatedConnection) -> None:
            mirror = self.exchange.mirror(connection, replica, epoch, nonce)
            if self._over or not self._cache.add(epoch, replica, mirror):
                mirror.close()
            else:
                self._has_reached(epoch, replica)

        def failed(reason: NoConnection | None) -> None:
            self._happens(self.membership.unreachable, epoch, replica)

        self._dial(there, DATA, nonce, epoch, "", opened, failed)

    def _has_reached(self, epoch: int, replica: int) -> None:
        self.rank.after(0.0, self._happens, self.membership.reached, epoch, replica)

    def _enter(self, view: View, progress: dict[int, Progress]) -> None:
        self.rank.promises.enters_group(self.rank, self.name, view, progress)
        self._cache.enter(view.epoch)
        resumed = self.exchange.enter(view, 0, self._cache.peers, progress)
        asks = self.membership.entered(view.epoch)
        self.rank.say("enters view %s in %s, of %s: %s", view.epoch, self.name, view.replicas, resumed)
        self.rank.goes_on_in_group()
        self._do(asks)

    def _dial(
        self,
        there: Address,
        what: str,
        instance: str,
        epoch: int,
        nonce: str,
        opened: Callable[[SimulatedConnection], object],
        failed: Callable[[NoConnection], object],
    ) -> None:
        """`nonce` is that of the segment there, if it is known."""

        since, made = self.rank.closed_groups.since(self.name), self.membership.made or 0

        def accept(target: Any, connection: SimulatedConnection) -> bool:
            end: Any = AcceptedEnd(connection)
            target.deal(
                GroupConnection(
                    self.name, what, self.rank.replica, instance, end, epoch, self._nonce, nonce, made, since
                )
            )
            return True

        self.rank.network.dial(self.rank, there.pid, accept, opened, failed, awaits_mute=True)
