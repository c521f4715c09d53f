"""A simulated process: one rank, with all that is pure of the product in it, driven as the product drives it.

    Node                      as `ftcomm.control.agent` drives it: links, ticks, Freeze and Resume
    ExchangeCore              as `ftcomm.collective.driver` does: step after step, frozen and resumed, its waits watched
    TcpMirror and its writer  between hosts, on sockets that are simulated, see `ftcomm.simulation.mirror`
    script                    the user's loop, see `ftcomm.simulation.script`

The memory of members of the same host is read directly, also that of the dead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ftcomm.collective.core import MOVED, RETURNED, ExchangeCore
from ftcomm.collective.inflight import Inflight
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.stream import Stream
from ftcomm.collective.watchdog import Watchdog
from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import node as n
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Member, View
from ftcomm.errors import CollectiveTimeout, ExpelledError, FtcommError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.simulation.memory import TinyMemory
from ftcomm.simulation.mirror import Glance, Mirror, Pump, TinySocket
from ftcomm.simulation.network import REFUSED, Connection, Link, Network
from ftcomm.simulation.promises import Promises
from ftcomm.simulation.world import Process, World
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import ASLEEP
from ftcomm.transport.tcp.writer import TcpMirrorWriter

COORDINATOR = 1  # its port

_reducer = Reducer()  # scratch memory, used within one advance


class Gone(Exception):
    """What the script of a rank gets that cannot go on."""


class Rank(Process):
    def __init__(
        self,
        world: World,
        network: Network,
        promises: Promises,
        *,
        replica: int,
        index: int,
        ranks: int,
        host: int,
        incarnation: str,
        port: int,
        leader_port: int,
        timeouts: Timeouts,
        burst: int,
        pace: float,
        on_exit: Callable[[Rank, int], object],
    ) -> None:
        super().__init__(world, f"{incarnation}/{index}" if ranks > 1 else incarnation, host)
        self.network, self.promises = network, promises
        self.replica, self.index, self.incarnation, self.port = replica, index, incarnation, port
        self.timeouts = timeouts
        self.burst, self.pace = burst, pace  # tasks in a row at most, and s that they take
        self.memory = TinyMemory(replica, nonce=f"{port:032x}")
        self.core = ExchangeCore(
            replica,
            self.memory,  # type: ignore[arg-type]
            Glance(self.memory.words, ASLEEP, 0),
            _reducer,
            Watchdog(timeouts.op_floor, timeouts.op, timeouts.give_up, self.clock),
            on_lost=self.data_lost,
            poller=lambda peers: Pump(mirrors) if (mirrors := [p for p in peers if isinstance(p, Mirror)]) else None,
        )
        self.gone = ""  # why this rank cannot go on
        self.left = self.finishing = False
        self.holds_state = False
        self.view: View | None = None  # that the script stands in
        address = Address(f"host{host}", port % 65536, f"boot{host}", port, 0, f"{port:032x}")
        self.node = n.Node(replica, index, ranks, incarnation, address, timeouts)
        self._leader_port = leader_port
        self._on_exit = on_exit
        self._up: Link | None = None
        self._ranks: dict[int, Connection] = {}
        self._parked = True
        self._parked_since = 0.0
        self._driving = False
        self._fresh: Operation | None = None  # that the driver, who has just called it, tries to do in one go
        self._kept: dict[str, Peer] = {}
        self._reached: dict[int, dict[int, Peer]] = {}
        self._epoch = -1
        self.onlookers: dict[Rank, None] = {}  # who reads our memory
        # Links to the other members, and an eye on their processes, as `ftcomm.control.peers.Peers`.
        self._links: dict[int, tuple[str, Link]] = {}
        self._down: set[int] = set()
        self._linked: View | None = None
        self._reaching: tuple[int, ...] = ()  # whose memory we are about to reach
        self._watched: dict[int, Rank | None] = {}  # None: it has ended
        self.watchers: dict[Rank, None] = {}
        # The script.
        self.script: Generator[Any, Any, None] | None = None
        self._awaits: Any = "known"
        self.serves: Callable[[Connection, dict[str, Any]], bool] = lambda connection, fields: False

    @property
    def flight(self) -> Inflight:
        return self.core.inflight

    @property
    def stream(self) -> Stream | None:
        return self.core.stream

    def start(self) -> None:
        self.say("starts on host %s", self.host)
        self._do(self.node.start())
        if self.node.leader is not None:
            self._up = self._link_up(COORDINATOR, "leader", {})
        else:
            self._up = self._link_up(self._leader_port, "rank", {"rank": self.index})
        self._tick()

    def _link_up(self, port: int, purpose: str, fields: dict[str, Any]) -> Link:
        return Link(
            self.network,
            self,
            port,
            lambda target, connection: target.accepts(connection, purpose, fields),  # type: ignore[attr-defined]
            on_open=lambda: self._do(self.node.up_opened()),
            on_message=lambda message: self._do(self.node.from_up(message)),
            on_down=lambda reason, ended: self._do(
                self.node.up_lost(
                    f"the way up is lost: {reason}",
                    not ended and reason == REFUSED,
                    self.network.listeners[port].host == self.host,
                )
            ),
        )

    def break_up_link(self) -> None:
        if self._up is not None:
            self._up.break_()

    def break_links(self, replica: int) -> None:
        if replica in self._links:
            self._links[replica][1].break_()

    def accepts(self, connection: Connection, purpose: str, fields: dict[str, Any]) -> bool:
        if purpose == "member":
            connection.receive[1] = lambda message: self._from_peer(connection, message)
            return True
        if purpose == "rank" and self.node.leader is not None:
            rank = fields["rank"]
            self._ranks[rank] = connection
            connection.receive[1] = lambda message: self._do(self.node.from_rank(rank, message, self.clock()))
            connection.closed[1] = lambda reason: self._rank_lost(rank, connection, reason)
            return True
        if purpose == "data":
            return self._attach(connection, fields["replica"], fields["epoch"], fields["nonce"])
        return purpose == "state" and self.serves(connection, fields)

    def _from_peer(self, connection: Connection, message: m.Message) -> None:
        self._do(self.node.from_peer(message, self.clock()))
        later = self.node.passed_by(message)
        if later is not None:
            connection.send(1, later)

    def _rank_lost(self, rank: int, connection: Connection, reason: str) -> None:
        if self._ranks.get(rank) is connection:  # else it is here again, by another one
            del self._ranks[rank]
            self._seek(rank, reason)

    def _seek(self, rank: int, why: str) -> None:
        """As `ftcomm.control.agent`: whether a rank of ours has ended whose connection has."""
        leader = self.node.leader
        there = None if leader is None else leader.addresses.get(rank)
        if rank in self._ranks or self._up is None:
            return
        if there is None:
            self._do(self.node.rank_lost(rank, why))
            return

        def told(outcome: str) -> None:
            if rank in self._ranks or self._up is None:
                return
            if outcome == "ended":
                self._do(self.node.rank_lost(rank, why))
                return
            if outcome == "refused":
                self._do(self.node.rank_refused(rank, why))
            if outcome == "answered":
                self._do(self.node.rank_acknowledged(rank, self.clock()))
            self.after(self.timeouts.beat, self._seek, rank, why)

        self.network.knock(self, there.pid, told)

    def _tick(self) -> None:
        self.after(self.timeouts.beat, self._tick)
        if self.gone:
            return
        self._look()
        self._do(self.node.tick(self.clock()))
        self._look_at_stall()

    def _look(self) -> None:
        """Whose kernels answer, before anything more is sent to them."""
        now = self.clock()
        above = None if self._up is None else self._up.unanswered()
        if above is not None:
            self._do(self.node.up_acknowledged(now - above))
        for rank, connection in self._ranks.items():
            seconds = connection.unanswered(1)
            if seconds is not None:
                self._do(self.node.rank_acknowledged(rank, now - seconds))
        peers = {replica: link.unanswered() for replica, (_, link) in self._links.items()}
        known = {replica: seconds for replica, seconds in peers.items() if seconds is not None}
        for replica in [replica for replica in sorted(self._down) if known.get(replica) == 0.0]:
            self._back(replica)
        self._do(self.node.peers_acknowledged({replica: now - seconds for replica, seconds in known.items()}))
        self._do(self.node.reaching(self._reaching))

    # -- what the node wants -----------------------------------------------------------------------------------------

    def _do(self, actions: list[n.Action]) -> None:
        for action in actions:
            kind = type(action)
            if kind is n.Up:
                if self._up is not None:
                    self._up.send(action.message)  # type: ignore[union-attr]
            elif kind is n.Down:
                if action.rank in self._ranks:  # type: ignore[union-attr]
                    self._ranks[action.rank].send(1, action.message)  # type: ignore[union-attr]
            elif kind is n.ToPeer:
                known = self._links.get(action.replica)  # type: ignore[union-attr]
                if known is not None:
                    known[1].send(action.message)  # type: ignore[union-attr]
            elif kind is act.Freeze:
                self._freeze(action.view)  # type: ignore[union-attr]
            elif kind is act.Resume:
                self._reach(action.view, action.progress)  # type: ignore[union-attr]
            elif kind is n.LookAtWaits:
                stall = None if self.core.frozen else self.core.watch.waiting(self.timeouts.beat)
                op, waiting_on = (0, ()) if stall is None else (stall.op, stall.waiting_on)
                self._do(self.node.waits(op, waiting_on))
            elif kind is act.Known:
                self._wake("known", None)
            elif kind is act.Passed:
                self.left = action.left  # type: ignore[union-attr]
                self._wake("boundary", action.view)  # type: ignore[union-attr]
                if self.left:
                    self._wake("join", None)  # sent away before it was in any view
            elif kind is n.Acked:
                self._wake("ack", True)
            elif kind is act.Failed:
                self._end(action.reason)  # type: ignore[union-attr]

    def _end(self, reason: str) -> None:
        if self.gone:
            return
        self.gone = reason
        self.say("cannot go on: %s", reason)
        if self._up is not None:
            self._up.close()
            self._up = None
        self._fail(ExpelledError(reason))

    def _fail(self, error: FtcommError) -> None:
        """The engine ends, and the script hears of it when it waits for something."""
        self.gone = self.gone or str(error)
        self.core.fail(error)
        self.core.abandon()
        self._parked = True
        if self._awaits is not None:
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

    def _link(self, member: Member) -> Link:
        def opened() -> None:
            self._do(self.node.peer_opened(member.replica))
            self._back(member.replica)

        def down(reason: str, ended: bool) -> None:
            if ended:
                return  # it proves nothing; that it cannot be made again would
            self._down.add(member.replica)
            self._lost(member, f"the link to it is down: {reason}", proof=False)

        return Link(
            self.network,
            self,
            member.ranks[self.index].pid,
            lambda target, connection: target.accepts(connection, "member", {}),  # type: ignore[attr-defined]
            on_open=opened,
            on_message=lambda message: self._do(self.node.from_beside(message)),
            on_down=down,
            rough=self.network.weather.rough > 0,
        )

    def _back(self, replica: int) -> None:
        if replica in self._down:
            self._down.discard(replica)
            self._do(self.node.peer_back(replica))

    def _lost(self, member: Member, reason: str, *, proof: bool) -> None:
        view = self._linked
        if view is not None and view.has(member.replica, member.incarnation):
            self._do(self.node.peer_lost(member.replica, view.epoch, reason, proof))

    def data_lost(self, replica: int, epoch: int, reason: str) -> None:
        self._do(self.node.peer_lost(replica, epoch, reason, proof=False))

    def _watch_processes(self, view: View) -> None:
        """The end of a process of this host is an event."""
        for replica, memory in self._reached_of(view.epoch).items():
            member = view.member(replica)
            if not memory.shares_memory or member is None or replica in self._watched:
                continue
            process = self.network.listeners[member.ranks[self.index].pid]
            assert isinstance(process, Rank)
            if not process.alive:
                self._lost(member, "no such process", proof=True)
                continue
            self._watched[replica] = process
            process.watchers[self] = None

    def saw_end(self, process: Rank) -> None:
        if self._watched.get(process.replica) is process and not self.gone:
            self._watched[process.replica] = None
            view = self._linked
            member = view.member(process.replica) if view is not None else None
            if member is not None and member.incarnation == process.incarnation:
                self._lost(member, "its process ended", proof=True)

    # -- changing the view -------------------------------------------------------------------------------------------

    def _freeze(self, view: View) -> None:
        self.say("hears of %s", described(view))
        self._connect(view)
        self.core.freeze()
        self.busy(0.0002 * self.world.random.random(), self._quiesced, view)

    def _quiesced(self, view: View) -> None:
        if self.core.frozen and not self._parked:
            self._parked, self._parked_since = True, self.clock()
        if self.node.machine.view is not view or self.gone:
            return
        self.promises.holds(self)
        progress = self.core.progress()
        self.say("stands still: %s", progress)
        self._do(self.node.quiesced(view.epoch, progress))

    def _nonces(self, view: View) -> set[str]:
        return {member.ranks[self.index].nonce for member in view.members}

    def _reached_of(self, epoch: int) -> dict[int, Peer]:
        return self._reached.setdefault(epoch, {})

    def _reach(self, view: View, progress: dict[int, m.Progress]) -> None:
        """One member after the other, as `ftcomm.engine.Engine.reach`; a failure is told, and tried again."""
        if not self.node.wants(view) or self.gone:
            return
        reached = self._reached_of(view.epoch)
        nonces = self._nonces(view)
        self._kept = {nonce: peer for nonce, peer in self._kept.items() if peer.shares_memory or nonce in nonces}
        for member in view.members:
            replica, there = member.replica, member.ranks[self.index]
            if replica == self.replica or replica in reached:
                continue
            known = self._kept.get(there.nonce)
            if known is not None and not known.shares_memory and (self._epoch < 0 or not known.serves(view.epoch)):
                known = None
            process = self.network.listeners[there.pid]
            assert isinstance(process, Rank)
            if known is None and process.host == self.host and process.alive:
                known = self._kept[there.nonce] = process.memory
            if known is not None:
                reached[replica] = known
                continue
            self._dial_data(view, replica, there, progress)
            return
        self._watch_processes(view)
        if self.node.wants(view):
            self._enter(view, progress)

    def _dial_data(self, view: View, replica: int, there: Address, progress: dict[int, m.Progress]) -> None:
        fields = {"replica": self.replica, "epoch": view.epoch, "nonce": f"{self.port:032x}"}

        def opened(connection: Connection) -> None:
            self._reaching = ()
            if view.epoch <= self._epoch or replica in self._reached_of(view.epoch) or self.gone:
                connection.close(0)
                return
            sock = TinySocket(connection, 0)
            mirror = Mirror(replica, view.epoch, sock, self.data_lost)  # type: ignore[arg-type]
            mirror.nonce = there.nonce

            def news() -> None:
                if sock.over:
                    mirror.attend()
                self.kick()

            sock.on_news = news
            self._reached_of(view.epoch)[replica] = self._kept[there.nonce] = mirror
            self._reach(view, progress)

        def failed(reason: str) -> None:
            self._reaching = ()
            if self.node.wants(view) and not self.gone:
                self._do(self.node.unreachable(view.epoch, replica, reason))
                self.after(self.timeouts.beat, self._reach, view, progress)

        self._reaching = (replica,)
        self.network.dial(
            self,
            there.pid,
            lambda target, connection: target.accepts(connection, "data", fields),  # type: ignore[attr-defined]
            opened,
            failed,
            patient=True,
        )

    def _enter(self, view: View, progress: dict[int, m.Progress]) -> None:
        self.promises.enters(self, view, progress)
        self._epoch = view.epoch
        peers = self._reached.pop(view.epoch)
        over = [self._reached.pop(epoch) for epoch in sorted(self._reached) if epoch < view.epoch]
        for peer in (peer for reached in over for peer in reached.values()):
            if all(peer is not kept for kept in (*peers.values(), *self.core.peers.values())):
                peer.close()
        nonces = self._nonces(view)
        self._kept = {nonce: peer for nonce, peer in self._kept.items() if nonce in nonces}
        one_host = all(member.ranks[self.index].boot == f"boot{self.host}" for member in view.members)
        for member in view.members:
            process = self.network.listeners[member.ranks[self.index].pid]
            if process is not self and isinstance(process, Rank) and peers[member.replica] is process.memory:
                process.onlookers[self] = None
        alike = len(view.members) % 2 == 0  # so that there are views of both kinds
        plan = GroupView(view.epoch, self.replica, view.replicas, view.contributing, one_host, alike=alike)
        first, ops, self._fresh = self.stream is None, list(self.flight.ops), None
        resumed, error = self.core.enter(plan, peers, progress)
        if error is not None:
            raise error
        self._parked = False
        self.say("enters %s: %s", described(view), resumed)
        self.promises.copies += resumed.copied
        for op in ops:
            if op.done:
                self._returned(op)
        self.core.welcome(self.core.due())
        self._do(self.node.resumed(view))
        if first:
            self._wake("known", view)
            self._wake("join", view)
        self.kick()

    # -- the exchange ------------------------------------------------------------------------------------------------

    def _attach(self, connection: Connection, replica: int, epoch: int, life: str) -> bool:
        sock = TinySocket(connection, 1)
        sock.on_room = self.kick
        self.core.admit(TcpMirrorWriter(sock, replica, epoch, life))  # type: ignore[arg-type]
        self.kick()
        return True

    def submit(self, op: Operation) -> None:
        self.core.submit(op)
        alone = len(self.flight.ops) == 1 and not self.core.frozen
        self._fresh = op if alone and self.world.random.random() < 0.5 else None
        self.kick()

    def kick(self) -> None:
        """There may be something to do."""
        if not self._driving and not self._parked and self.flight.ops:
            self._driving = True
            world = self.world
            chance = world.random.random()
            world.after(self.pace * (0.1 + 8 * chance**4) * self.slow, self, self._drive)

    def _drive(self) -> None:
        self._driving = False
        core, stream = self.core, self.stream
        if self._parked or stream is None:
            return
        core.welcome(core.due())
        left = 1 if core.frozen or self.burst == 1 else self.world.random.randint(1, self.burst)
        ops = self.flight.ops
        moved = False
        fresh, self._fresh = self._fresh, None
        if fresh is not None and not core.frozen and core.at_once(fresh):
            self._returned(fresh)
            moved = True
        while ops:
            if not left:
                self.kick()
                break
            left -= 1
            op = ops[0]
            did = core.step()
            if did is RETURNED:
                self._returned(op)
            elif did is not MOVED and not stream.wait(op):
                break
            moved = True
        if moved:
            if self.world.armed and ops and self._halfway(ops[0]):
                self.world.after(3 * self.pace * self.world.random.random(), None, self.world.armed.pop())
            for rank in self.onlookers:
                rank.kick()

    def _halfway(self, op: Operation) -> bool:
        """The moment for a fault: some of it is FINAL, not all, or not everywhere."""
        finals = op.finals
        return finals[0] is not None and (finals[-1] is None or self.world.random.random() < 0.2)

    def _returned(self, op: Operation) -> None:
        self.promises.returned(self, op)
        if self._awaits is op:
            self._awaits = None
            self.after(0.0, self.proceed, None)

    def _look_at_stall(self) -> None:
        ops = self.flight.ops
        stream = self.stream
        if not ops or stream is None:
            return
        if self._parked:
            if self.clock() - self._parked_since > self.timeouts.give_up:
                self._failed(CollectiveTimeout("no view was agreed upon in time"))
            return
        if self.core.frozen:
            return
        if not stream.wait(ops[0]) and stream.missing(ops[0]):
            try:
                stall = self.core.blocked()
            except FtcommError as error:
                self._failed(error)
                return
            if stall is not None:
                self.say("op %s stalls, waiting on %s", stall.op, stall.waiting_on)
                self._do(self.node.stalled(*stall))
        self.kick()

    def _failed(self, error: FtcommError) -> None:
        self._fail(error)
        self._do(self.node.failed(str(error)))

    # -- the script --------------------------------------------------------------------------------------------------

    def run(self, script: Generator[Any, Any, None]) -> None:
        self.script = script
        self._awaits = "begin"
        self.proceed(None)

    def _wake(self, what: str, value: object) -> None:
        if self._awaits == what:
            self._awaits = None
            self.after(0.00001, self.proceed, value)

    def awaken(self) -> None:
        """What the script polls for may be there."""
        self._wake("news", None)

    def proceed(self, value: object) -> None:
        """The script goes on to its next wait."""
        script = self.script
        if script is None:
            return
        self._awaits = None
        try:
            while True:
                wish = script.throw(Gone(self.gone)) if self.gone and not self.finishing else script.send(value)
                value = None
                if type(wish) is float:
                    self.busy(wish, self.proceed, None)
                    return
                if isinstance(wish, Operation):
                    if wish.done:
                        continue
                elif isinstance(wish, tuple):  # the boundary of a step
                    self._awaits = "boundary"
                    self._do(self.node.boundary(wish[1]))
                    return
                self._awaits = wish
                return
        except StopIteration:
            self.exit(0)
        except Gone as gone:
            self.say("ends: %s", gone)
            self.exit(1)

    def exit(self, code: int) -> None:
        self.script = None
        self._on_exit(self, code)


def described(view: View) -> str:
    who = " ".join(f"{x.incarnation}{'' if x.contributing else '*'}" for x in view.members)
    return f"view {view.epoch} ({who}; step {view.step}; {view.why})"
