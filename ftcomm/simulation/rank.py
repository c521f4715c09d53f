"""A simulated process: one rank, with all that is pure of the product in it, driven as the product drives it.

RankNode                  as `ftcomm.control.control_thread` drives it: links, ticks, Freeze and EnterView
LeaderNode                if there is no other rank, as `ftcomm.control.leader_driver` drives it; else see
                          `ftcomm.simulation.leader`
ExchangeCore              see `ftcomm.simulation.exchange`: one of the group of all, and one of each subgroup
DerivedMembership         of a subgroup, see `ftcomm.simulation.subgroup`
StaticMembership          of a static group, see `ftcomm.simulation.static`
TcpMirror and its writer  between hosts, on sockets that are simulated, see `ftcomm.simulation.mirror`
script                    the user's loop, see `ftcomm.simulation.script`

All of a history belongs to one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Stall
from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.data_plane import WaitsFor
from ftcomm.control.failed_dials import Cause
from ftcomm.control.leader import ToCoordinator
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.rank_with_leader import InProcessAction, RankWithLeader
from ftcomm.control.replica_reports import RESUMED
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Member, View
from ftcomm.errors import FtcommError, RemovedError
from ftcomm.membership.derived import Left
from ftcomm.simulation.attacker import Attack
from ftcomm.simulation.exchange import SimulatedExchange
from ftcomm.simulation.leader import COORDINATOR
from ftcomm.simulation.mirror import Mirror, NoConnection
from ftcomm.simulation.network import SimulatedConnection, SimulatedLink, SimulatedNetwork
from ftcomm.simulation.promises import Promises
from ftcomm.simulation.static import SimulatedStaticGroup
from ftcomm.simulation.subgroup import SimulatedSubgroup
from ftcomm.simulation.world import Process, World
from ftcomm.transport.closed_groups import ClosedGroups
from ftcomm.transport.group_connection import EARLY, GroupConnection
from ftcomm.transport.peer_cache import PeerCache

LEADERLESS = 1.0  # s in which a coordinator that is there hears that a leader has ended


class RankEnded(Exception):
    """Raised in the script of a rank that cannot go on."""


class SimulatedRank(Process):
    def __init__(
        self,
        world: World,
        network: SimulatedNetwork,
        promises: Promises,
        *,
        replicas: int,
        replica: int,
        index: int,
        ranks: int,
        host: int,
        incarnation: str,
        port: int,
        leader_port: int,
        agent_port: int | None = None,
        timeouts: Timeouts,
        burst: int,
        pace: float,
        on_exit: Callable[[SimulatedRank, int], object],
    ) -> None:
        super().__init__(world, f"{incarnation}/{index}" if ranks > 1 else incarnation, host)
        self.network, self.promises = network, promises
        self.replica, self.index, self.incarnation, self.port = replica, index, incarnation, port
        self.replicas = replicas  # of the job
        self.timeouts = timeouts
        self.burst, self.pace = burst, pace  # tasks in a row at most, and s that they take
        nonce = f"{port:032x}"
        self.exchange = SimulatedExchange(
            self, nonce, on_lost=self.data_lost, on_stall=self._stalled, on_failed=self.fail
        )
        self.exchanges = {nonce: self.exchange}  # by the nonce of their memories
        self.groups: dict[str, SimulatedSubgroup] = {}
        self.statics: dict[str, SimulatedStaticGroup] = {}
        self.waits_for_groups = False
        self._made = 0  # groups
        self.next_boundary = 0  # as of `Internals`
        self.closed_groups: ClosedGroups[Left] = ClosedGroups()
        self._calls_for_groups: list[GroupConnection] = []  # that are not made yet
        self.gone = ""  # why this rank cannot go on
        self.left = self.finishing = False
        self.unheard_by: tuple[int, ...] = ()  # members to which its last messages are lost when it leaves (a fault)
        self.holds_state = False
        self.view: View | None = None  # that the script stands in
        address = Address(f"host{host}", port % 65536, f"boot{host}", port, 0, nonce)
        self.node = n.RankNode(replica, index, address, timeouts)
        # In shard 0. If there are others, it belongs to a process of its own.
        self.leader = LeaderNode(replica, incarnation, ranks, timeouts) if index == 0 else None
        self._with_leader = RankWithLeader(self.node, self.leader) if self.leader is not None and ranks == 1 else None
        self._leader_port = leader_port
        self._above = leader_port if agent_port is None else agent_port
        self._on_exit = on_exit
        self._up: SimulatedLink | None = None
        self._cache = PeerCache()
        self._entered: View | None = None  # what subgroups are told of
        # Links to the other members, and an eye on their processes, as `ftcomm.control.peers.Peers`.
        self._links: dict[int, tuple[str, SimulatedLink]] = {}
        self._down: set[int] = set()
        self._linked: View | None = None
        self._reaching: tuple[int, ...] = ()  # members whose memory is about to be reached
        self._watched: dict[int, SimulatedRank | None] = {}  # None: it has ended
        self.watchers: dict[SimulatedRank, None] = {}
        # The script.
        self.script: Generator[Any, Any, None] | None = None
        self.awaits: Any = "known"  # what the script waits for
        self.serves: Callable[[SimulatedConnection, dict[str, Any]], bool] = lambda connection, fields: False

    def start(self) -> None:
        self.say("starts on host %s", self.host)
        if self._with_leader is None:
            self._up = self._link_up(self._above)
        else:
            self.do(self._with_leader.start())
            self._up = self._link_to_coordinator(self._with_leader.leader)
        self._tick()

    def _link_to_coordinator(self, leader: LeaderNode) -> SimulatedLink:
        return SimulatedLink(
            self.network,
            self,
            COORDINATOR,
            lambda target, connection: target.accepts(connection, "leader", {}),  # type: ignore[attr-defined]
            on_open=lambda: self.do(leader.opened()),
            on_message=lambda message: self.do(leader.from_coordinator(message)),
            on_down=lambda reason, ended: self.do(leader.lost()),
        )

    def _link_up(self, port: int) -> SimulatedLink:
        fields = {"shard": self.index}
        return SimulatedLink(
            self.network,
            self,
            port,
            lambda target, connection: target.accepts(connection, "rank", fields),  # type: ignore[attr-defined]
            on_open=lambda: self.do(self.node.up_opened()),
            on_message=lambda message: self.do(self.node.from_up(message)),
            on_down=self._up_lost,
        )

    def _up_lost(self, reason: NoConnection, ended: bool) -> None:
        refused = not ended and reason is NoConnection.REFUSED
        here = self.network.listeners[self._above].host == self.host
        lost = f"the way up is lost: {reason}", refused, here
        has_begun = self.node.machine.incarnation and not self.node.has_finished
        if self._above != self._leader_port and refused and has_begun:
            if self._up is not None:
                self._up.close()
            self._tell_end("its host agent has ended", lambda: self.do(self.node.host_agent_ended(lost[0])))
        else:
            self.do(self.node.up_lost(*lost))

    def break_up_link(self) -> None:
        if self._up is not None:
            self._up.break_()

    def break_links(self, replica: int) -> None:
        if replica in self._links:
            self._links[replica][1].break_()

    def _lose_last_messages(self) -> None:
        for replica in self.unheard_by:
            if replica in self._links:
                self.say("what it said to replica %s is lost with the connection", replica)
                self._links[replica][1].lose()

    def break_data(self, replica: int, ends: tuple[int, ...]) -> None:
        """The connection by which this one reads `replica`, at its own end (0), at the other one (1), or at both. In
        static groups, too."""
        peer = self.exchange.exchange.member.peers.get(replica)
        if isinstance(peer, Mirror):
            peer.reset(ends)
        for group in self.statics.values():
            group.break_data(replica, ends)

    def attack_data(self, replica: int, how: Attack) -> bool:
        """Let the attacker do so on the path by which this rank reads `replica`. False if there is no connection."""
        peer = self.exchange.exchange.member.peers.get(replica)
        if not isinstance(peer, Mirror) or peer.ended:
            return False
        peer.attack(how)
        return True

    def accepts(self, connection: SimulatedConnection, purpose: str, fields: dict[str, Any]) -> bool:
        if purpose == "member":
            connection.receive[1] = lambda message: self._from_peer(connection, message)
            return True
        if purpose == "data":
            self.exchange.attach(connection, fields["replica"], fields["epoch"], fields["nonce"])
            return True
        return purpose == "state" and self.serves(connection, fields)

    def _from_peer(self, connection: SimulatedConnection, message: m.Message) -> None:
        self.do(self.node.from_peer(message, self.clock()))
        later = self.node.passed_by(message)
        if later is not None:
            connection.send(1, later)

    def leader_ended(self, why: str = "its leader has ended") -> None:
        """End with the leader, as `ControlThread` does in shard 0, which tells the coordinator; or with the host agent,
        in the first rank there."""
        if self.gone or self._up is None:
            return
        self._up.close()
        self._up = None
        self._tell_end(why, lambda: self.do(self.node.failed(why)))

    def _tell_end(self, why: str, then: Callable[[], object]) -> None:
        """Tell the coordinator that this replica ends, which no leader can by now."""
        told = list[bool]()

        def end(*_: object) -> None:
            if not told:
                told.append(True)
                then()

        def tell(target: Process, connection: SimulatedConnection) -> bool:
            target.leaderless(self.replica, self.node.machine.incarnation, why)  # type: ignore[attr-defined]
            return False

        self.network.dial(self, COORDINATOR, tell, end, end)
        self.after(LEADERLESS, end)

    def _tick(self) -> None:
        self.after(self.timeouts.beat, self._tick)
        if self.gone:
            return
        self._look()
        if self._with_leader is not None:
            self.do(self._with_leader.tick(self.clock()))
        else:
            self.do(self.node.beat(self.clock()))
            self.do(self.node.tick(self.clock()))
        self.exchange.exchange.wake()
        for group in self._of_some():
            group.exchange.kick()

    def _look(self) -> None:
        """Look whose kernels answer, before anything more is sent to them."""
        now = self.clock()
        above = None if self._up is None else self._up.unanswered()
        if above is not None and self._with_leader is None:
            self.do(self.node.up_acknowledged(now - above))
        peers = {replica: link.unanswered() for replica, (_, link) in self._links.items()}
        known = {replica: seconds for replica, seconds in peers.items() if seconds is not None}
        for replica in [replica for replica in sorted(self._down) if known.get(replica) == 0.0]:
            self._back(replica)
        self.do(self.node.peers_acknowledged({replica: now - seconds for replica, seconds in known.items()}))
        self.do(self.node.reaching(self._reaching))

    # -- what the node wants -----------------------------------------------------------------------------------------

    def do(self, actions: Sequence[InProcessAction]) -> None:
        """Carry out what a node wants."""
        for action in actions if self._with_leader is None else self._with_leader.carry(actions):
            match action:
                case act.ToLeader(message) | ToCoordinator(message):
                    if self._up is not None:
                        self._up.send(message)
                case n.ToPeer(replica, message):
                    known = self._links.get(replica)
                    if known is not None:
                        known[1].send(message)
                case act.Freeze(view):
                    self._freeze(view)
                case act.EnterView(view, progress):
                    self._reach(view, progress)
                case n.LookAtWaits():
                    self.do(self.node.waits(*self._waiting()))
                case act.Known():
                    self.wake("known", None)
                case n.WaitOn(_, away):
                    for exchange in {self.exchange, *self.exchanges.values()}:
                        exchange.exchange.coordinator_away(away)
                case n.HandWaits(seconds):
                    self.exchange.exchange.member.watch.hand_waits(seconds)
                case act.Passed():
                    self.left = action.left
                    if self.left:
                        self._lose_last_messages()
                    self.wake("boundary", action.view)
                    if self.left:
                        self.wake("join", None)  # sent away before it was in any view
                case act.GoOn():
                    self.wake("join", None)
                case n.Acked():
                    self.wake("ack", True)
                case act.Failed(reason):
                    self._end(reason)

    def _end(self, reason: str) -> None:
        if self.gone:
            return
        self.gone = reason
        self.say("cannot go on: %s", reason)
        if self._up is not None:
            self._up.close()
            self._up = None
        self._end_all(RemovedError(reason))

    def fail(self, error: FtcommError) -> None:
        """An exchange cannot go on."""
        self._end_all(error)
        self.do(self.node.failed(str(error)))

    def _end_all(self, error: FtcommError) -> None:
        """The engine ends, and the script hears of it when it waits for something."""
        self.gone = self.gone or str(error)
        self.exchange.end(error)
        for group in self.groups.values():
            group.end(error)
        if self.awaits is not None:
            self.after(0.0001, self.proceed, None)

    # -- links to the other members ----------------------------------------------------------------------------------

    def _connect(self, view: View) -> None:
        self._linked = view
        for replica, (incarnation, link) in list(self._links.items()):
            if not view.has(replica, incarnation):
                link.close()
                del self._links[replica]
                self._down.discard(replica)
        for replica, process in list(self._watched.items()):
            if process is None or not view.has(replica, process.incarnation):
                del self._watched[replica]
                if process is not None:
                    process.watchers.pop(self, None)
        for member in view.members:
            if member.replica != self.replica and member.replica not in self._links:
                self._links[member.replica] = (member.incarnation, self._link(member))

    def _link(self, member: Member) -> SimulatedLink:
        def opened() -> None:
            self.do(self.node.peer_opened(member.replica))
            self._back(member.replica)

        def down(reason: NoConnection, ended: bool) -> None:
            if ended:
                return  # it proves nothing; that it cannot be made again would
            self._down.add(member.replica)
            self._lost(member, f"the link to it is down: {reason}", proof=False)

        return SimulatedLink(
            self.network,
            self,
            member.ranks[self.index].pid,
            lambda target, connection: target.accepts(connection, "member", {}),  # type: ignore[attr-defined]
            on_open=opened,
            on_message=lambda message: self.do(self.node.peer_answered(message)),
            on_down=down,
            rough=self.network.conditions.rough > 0,
        )

    def _back(self, replica: int) -> None:
        if replica in self._down:
            self._down.discard(replica)
            self.do(self.node.peer_back(replica))

    def _lost(self, member: Member, reason: str, *, proof: bool) -> None:
        view = self._linked
        if view is not None and view.has(member.replica, member.incarnation):
            self.do(self.node.peer_lost(member.replica, view.epoch, reason, proof))

    def data_lost(self, replica: int, epoch: int, reason: str) -> None:
        self.do(self.node.severed(replica, epoch, reason, self.clock()))

    def _process_of(self, member: Member) -> SimulatedRank:
        process = self.network.listeners[member.ranks[self.index].pid]
        assert isinstance(process, SimulatedRank)
        return process

    def _watch_processes(self, view: View) -> None:
        """The end of a process of this host is an event."""
        for replica, memory in self._cache.of(view.epoch).items():
            member = view.member(replica)
            if not memory.shares_memory or member is None or replica in self._watched:
                continue
            process = self._process_of(member)
            if not process.alive:
                self._lost(member, "no such process", proof=True)
                continue
            self._watched[replica] = process
            process.watchers[self] = None

    def saw_end(self, process: SimulatedRank) -> None:
        for group in list(self.statics.values()):
            group.saw_end(process)
        if self._watched.get(process.replica) is process and not self.gone:
            self._watched[process.replica] = None
            view = self._linked
            member = view.member(process.replica) if view is not None else None
            if member is not None and member.incarnation == process.incarnation:
                self._lost(member, "its process ended", proof=True)

    # -- changing the view -------------------------------------------------------------------------------------------

    def _freeze(self, view: View) -> None:
        self.say("hears of %s", described(view))
        self.promises.knows(self, view)
        self._connect(view)
        for group in self.groups.values():
            group.exchange.exchange.job_changes()
        self.exchange.exchange.job_changes()
        self.exchange.freeze(lambda: self._quiesced(view))

    def _quiesced(self, view: View) -> None:
        if self.node.machine.view is not view or self.gone:
            return
        self.promises.holds(self.exchange)
        progress = self.exchange.exchange.progress()
        self.say("stands still: %s", progress)
        self.do(self.node.quiesced(view.epoch, progress, self.exchange.exchange.member.watch.awaited))

    def _reach(self, view: View, progress: dict[int, m.Progress], reached: int = 0) -> None:
        """Reach one member after the other, as `LocalDataPlane.reach` does; tell a failure, and try again. The first so
        many are `reached`."""
        if not self.node.wants(view) or self.gone:
            return
        if not reached:
            self._cache.expect(view.epoch, view.replicas)
            for replica in (x for x in view.replicas if self.replica in progress[x].severed):
                self._cache.severed(view.epoch, replica)
        for number, member in enumerate(view.members[reached:], reached + 1):
            replica, there = member.replica, member.ranks[self.index]
            if replica == self.replica or self._cache.find(view.epoch, replica, there.nonce) is not None:
                continue
            process = self._process_of(member)
            if process.host != self.host or not process.alive:
                self._dial_data(view, replica, there, progress, number)
                return
            self._cache.add(view.epoch, replica, process.exchange.memory)
        self._watch_processes(view)
        if self.node.wants(view):
            self._enter(view, progress)

    def _dial_data(
        self, view: View, replica: int, there: Address, progress: dict[int, m.Progress], number: int
    ) -> None:
        fields = {"replica": self.replica, "epoch": view.epoch, "nonce": f"{self.port:032x}"}

        def opened(connection: SimulatedConnection) -> None:
            self._reaching = ()
            mirror = self.exchange.mirror(connection, replica, view.epoch, there.nonce)
            if self.gone or not self._cache.add(view.epoch, replica, mirror):
                mirror.close()
            else:
                self._reach(view, progress, number)

        def failed(reason: NoConnection) -> None:
            self._reaching = ()
            if self.node.wants(view) and not self.gone:
                self.do(self.node.unreachable(view.epoch, replica, str(reason), Cause.OTHER, self.clock()))
                self.after(self.timeouts.beat, self._reach, view, progress)

        self._reaching = (replica,)
        self.network.dial(
            self,
            there.pid,
            lambda target, connection: target.accepts(connection, "data", fields),  # type: ignore[attr-defined]
            opened,
            failed,
            awaits_mute=True,
        )

    def _enter(self, view: View, progress: dict[int, m.Progress]) -> None:
        self.promises.enters(self, view, progress)
        self.promises.left_behind(self, view, [self._process_of(member) for member in self.promises.leavers(view)])
        self._cache.enter(view.epoch)
        peers = self._cache.peers
        for member in view.members:
            process = self._process_of(member)
            if process is not self and peers[member.replica] is process.exchange.memory:
                process.exchange.onlookers[self.exchange] = None
        first = self.exchange.core.stream is None
        self._entered = view
        for group in self._of_some():
            group.job_entered(view)
        resumed = self.exchange.enter(view, self.index, peers, progress)
        self.say("enters %s: %s", described(view), resumed)
        report = m.Report(RESUMED, {"shard": self.index, "epoch": view.epoch, "told_ms": 0.0, "resume_ms": 0.0})
        self.do(self.node.entered(view, None if first else report))
        if first:
            self.wake("known", view)
            self.wake("join", view)

    # -- what waits --------------------------------------------------------------------------------------------------

    def _waiting(self) -> WaitsFor:
        stall = self.exchange.exchange.waiting(self.timeouts.beat)
        if stall is not None:
            return WaitsFor(stall.op, stall.waiting_on)
        waits = (group.waiting() for group in self._of_some())
        return next((wait for wait in waits if wait is not None), WaitsFor(0, ()))

    def _stalled(self, stall: Stall) -> None:
        self.do(self.node.stalled(*stall))

    def stalled_in_group(self, stall: Stall) -> None:
        """Report a stall as `ftcomm.groups.group.Group` does: a rank has one at a time."""
        member = self.exchange.exchange.member
        if member.frozen or member.watch.waiting(0) is None:
            self._stalled(stall)

    # -- subgroups ---------------------------------------------------------------------------------------------------

    def make_group(self, name: str, number: int, among: tuple[int, ...]) -> None:
        """Make a subgroup. It is entered when its members in the view in force have made it, too."""
        self._made += 1
        group = self.groups[name] = SimulatedSubgroup(self, name, number, among, self._made)
        self.exchanges[group.exchange.memory.nonce] = group.exchange
        if self._entered is not None:
            group.job_entered(self._entered)
        self._deal_again()

    def _of_some(self) -> list[SimulatedSubgroup | SimulatedStaticGroup]:
        """Returns all groups but that of all."""
        return [*self.groups.values(), *self.statics.values()]

    def make_static(self, name: str, view: View, seconds: float) -> SimulatedStaticGroup:
        """Make a static group of the members of `view`, who have so many seconds to come."""
        self._made += 1
        group = self.statics[name] = SimulatedStaticGroup(self, name, view, self._made)
        self.exchanges[group.exchange.memory.nonce] = group.exchange
        group.begin(self._entered or view, seconds)
        self._deal_again()
        return group

    def close_static(self, name: str) -> Generator[float, None, None]:
        group, seed = self.statics[name], self.world.seed
        ops = random.Random(f"{seed} {name}").choice((0, 1, 12))
        yield from group.close(ops, random.Random(f"{seed} {name} {self.name}").randint(0, ops))
        del self.statics[name], self.exchanges[group.exchange.memory.nonce]

    def _deal_again(self) -> None:
        calls, self._calls_for_groups = self._calls_for_groups, []
        for call in calls:
            self.deal(call)

    def close_group(self, name: str) -> None:
        group = self.groups.pop(name)
        group.end(FtcommError("it was closed"))
        nonce = group.exchange.memory.nonce
        del self.exchanges[nonce]
        before = self.next_boundary if group.left.fresh else 0
        self.closed_groups.add(name, group.membership.segments(), group.left, before)
        self._deal_again()

    def deal(self, call: GroupConnection) -> None:
        """Deal with a connection as `ftcomm.transport.router.ConnectionRouter` does: it is for a group, which may be
        still to come."""
        group: SimulatedSubgroup | SimulatedStaticGroup | None = self.groups.get(call.group)
        group = group or self.statics.get(call.group)
        left = self.closed_groups.answer(call)
        if left is not None:
            call.sock.connection.send(1, left)  # type: ignore[attr-defined]
            call.sock.close()
            return
        if group is not None and group.take(call):
            return
        if call.what in EARLY:
            self._calls_for_groups.append(call)
        else:
            call.sock.close()

    def exchange_on_host(self, port: int, nonce: str) -> SimulatedExchange | None:
        """Returns the exchange of a process that lives on this host."""
        process = self.network.listeners[port]
        assert isinstance(process, SimulatedRank)
        return process.exchanges.get(nonce) if process.host == self.host and process.alive else None

    def goes_on_in_group(self) -> None:
        """A group has entered a view."""
        self.wake("group", None)

    # -- the script --------------------------------------------------------------------------------------------------

    def run(self, script: Generator[Any, Any, None]) -> None:
        self.script = script
        self.awaits = "begin"
        self.proceed(None)

    def wake(self, what: str, value: object) -> None:
        """The script goes on with `value`, if it awaits `what`."""
        if self.awaits == what:
            self.awaits = None
            self.after(0.00001, self.proceed, value)

    def goes_on_after(self, op: Operation) -> None:
        """Let the script go on if it waits for `op`, which has returned."""
        if self.awaits is op:
            self.awaits = None
            self.after(0.0, self.proceed, None)

    def awaken(self) -> None:
        """Let the script look, since what it polls for may be there."""
        self.wake("news", None)

    def proceed(self, value: object) -> None:
        """The script goes on to its next wait."""
        script = self.script
        if script is None:
            return
        self.awaits = None
        try:
            while True:
                wish = script.throw(RankEnded(self.gone)) if self.gone and not self.finishing else script.send(value)
                value = None
                if type(wish) is float:
                    self.busy(wish, self.proceed, None)
                    return
                if isinstance(wish, Operation):
                    if wish.done:
                        continue
                elif isinstance(wish, tuple):  # the boundary of a step
                    self.awaits = "boundary"
                    self.do(self.node.boundary(*wish[1:]))
                    return
                self.awaits = wish
                return
        except StopIteration:
            self.exit(0)
        except RankEnded as gone:
            self.say("ends: %s", gone)
            self.exit(1)

    def exit(self, code: int) -> None:
        self.script = None
        self._on_exit(self, code)


def described(view: View) -> str:
    who = " ".join(f"{x.incarnation}{'' if x.contributing else '*'}" for x in view.members)
    return f"view {view.epoch} ({who}; step {view.step}; {view.why})"
