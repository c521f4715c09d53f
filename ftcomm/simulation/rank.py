"""A simulated process: one rank, with all that is pure of the product in it, driven as the product drives it.

    Node                      as `ftcomm.control.agent` drives it: links, ticks, Freeze and Resume
    Inflight, Stream          as `ftcomm.collective.exchange` does: one advance after the other, frozen and resumed
    Watchdog                looked at on every tick
    script                    the user's loop, see `ftcomm.simulation.script`

The memory of members of the same host is read directly, also that of the dead. Between hosts a mirror is filled by
frames, as in `ftcomm.transport.tcp`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ftcomm.collective.inflight import Inflight
from ftcomm.collective.operation import Operation
from ftcomm.collective.pending import PendingReaders, is_current
from ftcomm.collective.plan import GroupView
from ftcomm.collective.stream import Interrupted, Stream
from ftcomm.collective.watchdog import Due, Watchdog
from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import node as n
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Member, View
from ftcomm.errors import CollectiveTimeout, ExpelledError, FtcommError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.simulation.memory import TinyMemory
from ftcomm.simulation.mirror import Feed, Mirror
from ftcomm.simulation.network import REFUSED, Connection, Link, Network
from ftcomm.simulation.promises import Promises
from ftcomm.simulation.world import Process, World
from ftcomm.sync.futex import Waiter
from ftcomm.transport.segment import ASLEEP

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
        self.flight = Inflight()
        self.memory = TinyMemory(replica)
        self.stream: Stream | None = None
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
        self._waiter = Waiter(self.memory.words, ASLEEP, 0)
        self._watch = Watchdog(timeouts.op_floor, timeouts.op, timeouts.give_up, self.clock)
        self._pending = PendingReaders()
        self._lives: dict[int, str] = {}
        self._stopping, self._parked = False, True
        self._parked_since = 0.0
        self._driving = False
        self._kept: dict[str, TinyMemory] = {}
        self._reached: dict[int, dict[int, TinyMemory]] = {}
        self._epoch = -1
        self._peers: dict[int, TinyMemory] = {}
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
                self.node.up_lost(f"the way up is lost: {reason}", not ended and reason == REFUSED)
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
            self._attach(Feed(fields["replica"], fields["epoch"], fields["nonce"], connection))
            return True
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
            if outcome in ("ended", "refused"):
                self._do(self.node.rank_lost(rank, why))
                return
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
                stall = None if self._stopping else self._watch.waiting(self.timeouts.beat)
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
        self.flight.abandon(error)
        for peer in self._peers.values():
            peer.close()
        self._pending.close()
        if self.stream is not None:
            self.stream.close()
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
        self._stopping = True
        for peer in self._peers.values():
            peer.quiet()
        self.busy(0.0002 * self.world.random.random(), self._quiesced, view)

    def _quiesced(self, view: View) -> None:
        if self._stopping and not self._parked:
            self._parked, self._parked_since = True, self.clock()
        if self.node.machine.view is not view or self.gone:
            return
        self.promises.holds(self)
        progress = m.Progress(0, (), fresh=True) if self.stream is None else self.flight.progress()
        self.say("stands still: %s", progress)
        self._do(self.node.quiesced(view.epoch, progress))

    def _nonces(self, view: View) -> set[str]:
        return {member.ranks[self.index].nonce for member in view.members}

    def _reached_of(self, epoch: int) -> dict[int, TinyMemory]:
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
            mirror = Mirror(self, replica, view.epoch, connection)
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
        for peer in (peer for reached in (*over, self._peers) for peer in reached.values()):
            if all(peer is not kept for kept in peers.values()):
                peer.close()
        for peer in peers.values():
            peer.enter(view.epoch)
        self._peers = peers
        self._lives = {member.replica: member.ranks[self.index].nonce for member in view.members}
        nonces = self._nonces(view)
        self._kept = {nonce: peer for nonce, peer in self._kept.items() if nonce in nonces}
        one_host = all(member.ranks[self.index].boot == f"boot{self.host}" for member in view.members)
        for member in view.members:
            process = self.network.listeners[member.ranks[self.index].pid]
            if process is not self and isinstance(process, Rank) and peers[member.replica] is process.memory:
                process.onlookers[self] = None
        alike = len(view.members) % 2 == 0  # so that there are views of both kinds
        plan = GroupView(view.epoch, self.replica, view.replicas, view.contributing, one_host, alike=alike)
        stream = Stream(
            plan,
            self.memory,  # type: ignore[arg-type]
            peers,  # type: ignore[arg-type]
            self._waiter,
            _reducer,
            self.data_lost,
        )
        first = self.stream is None
        if first:
            self.flight.number_from(progress)
        elif self.stream is not None:
            for reader in self.stream.close(self._lives):
                self._pending.bring_back(reader)
        self.stream = stream
        ops = list(self.flight.ops)
        resumed = self.flight.resume(progress, plan.contributors)
        stream.pipeline.unposted.extend(self.flight.ops)
        self._watch.disturbed(self.flight.issued)
        self._stopping = self._parked = False
        self.say("enters %s: %s", described(view), resumed)
        self.promises.copies += resumed.copied
        for op in ops:
            if op.done:
                self._returned(op)
        for reader in self._pending.take(view.epoch, self._lives):
            stream.welcome(reader)
        self._do(self.node.resumed(view))
        if first:
            self._wake("known", view)
            self._wake("join", view)
        self.kick()

    # -- the exchange ------------------------------------------------------------------------------------------------

    def _attach(self, feed: Feed) -> None:
        current = 0 if self.stream is None else self.stream.view.epoch
        if self.gone or (feed.epoch <= current and not is_current(feed, current, self._lives)):  # type: ignore[arg-type]
            feed.close()
            return
        self._pending.add(feed)  # type: ignore[arg-type]
        if self.stream is not None and not self._stopping:
            for reader in self._pending.take(current, self._lives):
                self.stream.welcome(reader)
            self.kick()

    def submit(self, op: Operation) -> None:
        if not self.flight.ops:
            self._watch.began = self.clock()
        self.flight.add(op)
        if self.stream is not None:
            self.stream.pipeline.unposted.append(op)
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
        stream = self.stream
        if self._parked or stream is None:
            return
        left = 1 if self._stopping or self.burst == 1 else self.world.random.randint(1, self.burst)
        ops = self.flight.ops
        moved = False
        try:
            while ops:
                if not left:
                    self.kick()
                    break
                left -= 1
                if stream.advance():
                    moved = True
                    continue
                op = ops[0]
                if not stream.stable(op):
                    break
                self._watch.returns(op)
                self.flight.return_first()
                self._returned(op)
                moved = True
        except Interrupted:
            pass
        if moved:
            self._watch.wait = None
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
        if self._stopping:
            return
        pipeline = stream.pipeline
        if pipeline.unposted or pipeline.taken < pipeline.posted or not stream.stable(ops[0]):
            missing = stream.missing(ops[0])
            if not missing:
                self.kick()
                return
            due = self._watch.waits(stream.view.epoch, ops[0], missing)
            if due is Due.REPORT:
                self.say("op %s stalls, waiting on %s", ops[0].number, missing)
                self._do(self.node.stalled(stream.view.epoch, ops[0].number, missing))
            elif due is Due.GIVE_UP:
                self._failed(CollectiveTimeout(f"op {ops[0].number} waited for {missing}"))
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
