"""A static group at a simulated rank: `ftcomm.membership.static`, driven as `ftcomm.groups.static_internals` drives it.

A link is a simulated connection, over which the members say what they say in the product; memory is read directly
within a host, and by mirrors between hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Stall
from ftcomm.control.data_plane import WaitsFor
from ftcomm.control.messages import Progress
from ftcomm.control.running_time import RunningTime
from ftcomm.control.views import Address, View
from ftcomm.errors import ArgumentError, FtcommError, TransportError
from ftcomm.groups.communicator import END_NOTICED
from ftcomm.groups.static_pairs import LOOK
from ftcomm.membership.static import (
    DOUBT,
    EPOCH,
    End,
    FailOps,
    LastMessage,
    MemberHello,
    Said,
    StaticAction,
    StaticMembership,
    TellMember,
)
from ftcomm.simulation.exchange import SimulatedExchange
from ftcomm.simulation.memory import CHUNK
from ftcomm.simulation.mirror import Mirror, NoConnection
from ftcomm.simulation.network import SimulatedConnection
from ftcomm.simulation.promises import ELEMENTS, input_of
from ftcomm.simulation.subgroup import DATA, AcceptedEnd
from ftcomm.transport.group_connection import LINK, GroupConnection
from ftcomm.transport.peer_cache import PeerCache

if TYPE_CHECKING:
    from ftcomm.simulation.rank import SimulatedRank

_PAUSE = 0.02  # s before the next attempt to reach a member
_COUNTS = (1, 2 * ELEMENTS, 3 * ELEMENTS + 4)  # elements of an op, in turn
_INPUTS = 100_000  # the inputs of static groups go by numbers of their own
_LAST = 50_000  # the ops that are in flight when a group is closed, in place of steps


class StaticLink(NamedTuple):
    """This member's end of a connection to another one."""

    connection: SimulatedConnection
    end: int

    def close(self) -> None:
        self.connection.close(self.end)


class SimulatedStaticGroup:
    """The ranks with the index of `rank` in the members of `view`, made at a boundary. `made` tells its segment from
    all before."""

    def __init__(self, rank: SimulatedRank, name: str, view: View, made: int) -> None:
        self.rank, self.name = rank, name
        self.me = view.replicas.index(rank.replica)
        self.places: Sequence[Address] = [member.ranks[rank.index] for member in view.members]
        nonce = f"{rank.port:016x}{made:016x}"
        self.exchange = SimulatedExchange(
            rank,
            nonce,
            on_lost=self._severed,
            on_stall=self._stalled,
            on_failed=lambda error: self._do(self.membership.failed(error)),
            group=name,
            me=self.me,
        )
        names = [f"rank {i} (replica {replica})" for i, replica in enumerate(view.replicas)]
        members = hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()
        here = Address(f"host{rank.host}", rank.port % 65536, f"boot{rank.host}", rank.port, 0, nonce)
        self.membership = StaticMembership(name, self.me, names, MemberHello(members, here), view.replicas)
        self.is_running = False
        self._called: Operation | None = None  # last
        self._meets = True
        self._links: dict[int, StaticLink] = {}
        self._heard: list[tuple[int, Said | None]] = []  # while the group is not there yet
        self._parted: set[int] = set()  # have said that they end, or have ended
        self._cache = PeerCache()
        self._looks = False
        self._ran = RunningTime(DOUBT / 10)

    def begin(self, view: View, seconds: float) -> None:
        """Meet the others, within so many seconds."""
        self.job_entered(view)
        for member in range(self.me):
            self._dial_link(member)
        self.rank.after(seconds, self._deadline)
        self._met()

    def call(self, step: int) -> Operation:
        """The op of a step."""
        inputs = _INPUTS + step
        op = Operation(input_of(self.me, inputs, _COUNTS[step % len(_COUNTS)]).copy(), "float32", "sum", CHUNK)
        self._called = op
        self.exchange.submit(op, inputs)
        return op

    def close(self, ops: int, most: int) -> Generator[float, None, None]:
        """Call `ops` ops, as all members do, and leave when `most` of them have returned, with the others in flight."""
        last = self.exchange.inflight.returned + most
        for number in range(ops if self.is_running and self.membership.error is None else 0):
            self.call(_LAST + number)
        while self.membership.error is None and self.exchange.inflight.returned < last and not self.rank.gone:
            yield self.rank.pace
        error = FtcommError("it was closed")
        self.membership.parts()
        self.exchange.part(error)
        until = self.rank.clock() + END_NOTICED
        while self.exchange.inflight.ops and self.rank.clock() < until:
            yield LOOK
        self.exchange.end(error)
        while self.exchange.inflight.ops:
            yield LOOK
        left = self.exchange.exchange
        self._do(self.membership.leaves(error, left.returned, left.taken))

    def job_entered(self, view: View) -> None:
        """A view of the job is in force."""
        self._do(self.membership.job_entered(view))

    def saw_end(self, process: SimulatedRank) -> None:
        """A process of this host has ended, whose memory this member reads."""
        for member, peer in self._cache.of(EPOCH).items():
            if peer.shares_memory and self.places[member].pid == process.port:
                self._do(self.membership.lost(member, "its process died"))

    def break_data(self, replica: int, ends: tuple[int, ...]) -> None:
        """See `SimulatedRank.break_data`."""
        there = [rank for rank in self.membership.roster if self.membership.replicas_of((rank,)) == (replica,)]
        for peer in (self.exchange.exchange.member.peers.get(rank) for rank in there):
            if isinstance(peer, Mirror):
                peer.reset(ends)

    def waiting(self) -> WaitsFor | None:
        stall = self.exchange.exchange.waiting(self.rank.timeouts.beat)
        return None if stall is None else WaitsFor(stall.op, self.membership.replicas_of(stall.waiting_on))

    def take(self, call: GroupConnection) -> bool:
        """Does what `ftcomm.groups.static_internals.StaticGroupInternals.take` does."""
        connection = call.sock.connection  # type: ignore[attr-defined]
        if call.member not in self.membership.roster:
            call.sock.close()
        elif call.what == LINK:
            if not self._meets:
                return False
            link = StaticLink(connection, 1)
            self._greet(call.member, link)
            for said in call.sock.came:  # type: ignore[attr-defined]
                self._said(call.member, link, said)
        elif call.instance == self.exchange.memory.nonce:
            self.exchange.attach(connection, call.member, call.epoch, call.nonce)
        else:
            call.sock.close()
        return True

    def process_of(self, member: int) -> SimulatedRank:
        process = self.rank.network.listeners[self.places[member].pid]
        assert isinstance(process, type(self.rank))
        return process

    # -- the meeting -------------------------------------------------------------------------------------------------

    def _dial_link(self, member: int) -> None:
        if not self._meets:
            return

        def opened(connection: SimulatedConnection) -> None:
            if self._meets:
                self._greet(member, StaticLink(connection, 0))
            else:
                connection.close(0)

        self._dial(member, LINK, "", opened, lambda reason: self._again(member))

    def _again(self, member: int) -> None:
        self.rank.after(_PAUSE, self._dial_link, member)

    def _greet(self, member: int, link: StaticLink) -> None:
        connection, end = link
        connection.receive[end] = lambda said: self._said(member, link, said)
        connection.closed[end] = lambda reason: self._link_ended(member, link)
        connection.send(end, self.membership.hello)

    def _said(self, member: int, link: StaticLink, said: Said) -> None:
        known = self._links.get(member)
        if known == link:
            self._hears(member, said)
        elif self._meets and isinstance(said, MemberHello):
            if known is not None:  # it has called again, and means the newer one
                known.close()
            self._links[member] = link
            try:
                self.membership.came(member, said)
            except ArgumentError as error:
                self._do(self.membership.failed(error))
            else:
                self._met()
        else:
            link.close()

    def _link_ended(self, member: int, link: StaticLink) -> None:
        if self._links.get(member) == link:
            self._hears(member, None)
        elif self._meets and link.end == 0:
            self._again(member)

    def _deadline(self) -> None:
        if self._meets:
            self._do(self.membership.failed(TransportError(self.membership.absent(0.0, {}))))

    def _met(self) -> None:
        if not self._meets or self.membership.missing():
            return
        self._meets = False
        self._cache.expect(EPOCH, self.membership.roster)
        heard, self._heard = self._heard, []
        for member, said in heard:
            self._hears(member, said)
        self._reach()

    def _reach(self) -> None:
        """Reach one member after the other, then begin."""
        if self.membership.is_over:
            return
        view = self.membership.view()
        for member in view.replicas:
            address = view.members[member].ranks[0]
            if member == self.me or self._cache.find(EPOCH, member, address.nonce) is not None:
                continue
            owner = self.rank.exchange_on_host(address.pid, address.nonce)
            if owner is None:
                self._dial_data(member, address.nonce)
                return
            owner.onlookers[self.exchange] = None
            self._cache.add(EPOCH, member, owner.memory)
            owner.rank.watchers[self.rank] = None
        self._cache.enter(EPOCH)
        self.exchange.enter(view, 0, self._cache.peers, dict.fromkeys(view.replicas, Progress(0, ())))
        self.rank.say("begins with %s of %s", self.name, [place.pid for place in self.places])
        self.is_running = True
        self.rank.wake("static", None)

    def _dial_data(self, member: int, nonce: str) -> None:
        def opened(connection: SimulatedConnection) -> None:
            mirror = self.exchange.mirror(connection, member, EPOCH, nonce)
            if self.membership.is_over or not self._cache.add(EPOCH, member, mirror):
                mirror.close()
            else:
                self._reach()

        def failed(reason: NoConnection) -> None:
            self._do(self.membership.failed(TransportError(f"cannot reach rank {member}: {reason}")))

        self._dial(member, DATA, nonce, opened, failed)

    def _dial(self, member: int, what: str, instance: str, opened: Any, failed: Any) -> None:
        def accept(target: Any, connection: SimulatedConnection) -> bool:
            end: Any = AcceptedEnd(connection, [])
            connection.receive[1] = end.came.append
            target.deal(GroupConnection(self.name, what, self.me, instance, end, EPOCH, self.exchange.memory.nonce))
            return True

        self.rank.network.dial(self.rank, self.places[member].pid, accept, opened, failed, awaits_mute=True)

    # -- what is heard, and the end ----------------------------------------------------------------------------------

    def _hears(self, member: int, said: Said | None) -> None:
        """Hear one message of a member, or (None) that its link has ended."""
        if self._meets:
            self._heard.append((member, said))
        elif member not in self._parted:
            if said is None or isinstance(said, LastMessage):
                self._parted.add(member)
            lost = self.membership.lost(member, "its connection was closed") if said is None else []
            self._do(lost if said is None else self.membership.said(member, said))

    def _severed(self, member: int, epoch: int, why: str) -> None:
        self.membership.severed(member, why)
        self._settle()

    def _settle(self) -> None:
        if self.membership.waits and not self._looks:
            self._looks = True
            self.rank.after(LOOK, self._look)

    def _look(self) -> None:
        """Hear first what has come until now, also while the process was stopped."""
        self.rank.after(0.0, self._looked, self.rank.clock())

    def _looked(self, heard: float) -> None:
        self._looks = False
        self._do(self.membership.look(self.exchange.inflight.returned, self._ran.at(heard)))

    def _stalled(self, stall: Stall) -> None:
        seconds = self.rank.timeouts.op
        if self.exchange.exchange.member.watch.unmoved >= seconds:
            self._do(self.membership.gives_up(stall.op, stall.waiting_on, seconds))

    def _do(self, actions: list[StaticAction]) -> None:
        for action in actions:
            match action:
                case FailOps(error):
                    self.rank.say("%s: %s", self.name, error)
                    self.rank.promises.fails_static(self)
                    ops = list(self.exchange.inflight.ops)
                    self.exchange.end(error)
                    self._await_failures(ops)
                case TellMember(member, said):
                    link = self._links[member]
                    link.connection.send(link.end, said)
                case End(error, last):
                    self.rank.say("%s: %s", self.name, error)
                    self.rank.promises.ends_static(self, last)
                    self._meets = self.is_running = False
                    for link in self._links.values():
                        link.connection.send(link.end, last)
                        link.close()
                    self.exchange.end(error)
                    self._cache.close()
                    self.rank.wake("static", None)
        self._settle()
        if self.membership.error is not None:
            self._wake_script()

    def _await_failures(self, ops: Sequence[Operation]) -> None:
        """Check what becomes of the ops that were in flight when another member had left."""
        if not all(op.done for op in ops):
            self.rank.after(LOOK, self._await_failures, ops)
            return
        for op in ops:
            if op.error is not None:
                self.rank.promises.fails_in_static(self.exchange, op)

    def _wake_script(self) -> None:
        """Let the script go on if it waits for an op that has failed, as soon as who drives it has let go."""
        op = self._called
        if op is not None and op.done:
            self.rank.goes_on_after(op)
        elif op is not None:
            self.rank.after(LOOK, self._wake_script)
