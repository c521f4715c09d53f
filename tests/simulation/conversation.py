"""Membership histories as conversations: scripts whose expected output is what the state machines say to each other.

A file in `transcripts/` holds commands (`> kill 2`) and, beneath each, all that follows from it: which message goes
from whom to whom, which view is written down, what each rank does. Beneath `>> kill 2` nothing is shown. The production
machines (`Coordinator`, `LeaderNode`, `RankNode`) say every message of it; this module only carries their messages, in
the order in which they are sent, and lets time pass. The manner is that of etcd's raft library. Rewrite all files, or
some, after a change that is meant:

    .venv/bin/python -m tests.simulation.conversation [NAME...]

Replicas have a host each. A link that is cut delivers nothing until it is healed, and loses nothing, as TCP does. Ops
are abstract: one returns on a member when all members of its view run in that view and have called it. Signs of life
(`Heartbeat`, `Alive`, `Ping`) are sent and not shown.

In the output `1b` is the second life of replica 1, `1.0` its shard 0 where a replica has several, and `2*` a member
that catches up. `A B -> C: text` stands for one message from A and one from B.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ftcomm.control import actions as act
from ftcomm.control import coordinator as c
from ftcomm.control import coordinator_actions as ca
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.finishes import NO_FINISHES
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.probe_schedule import Probe, ProbeOutcome, ProbeReason
from ftcomm.control.rank_with_leader import InProcessAction, RankWithLeader
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Address, Member, View

FOLDER = Path(__file__).with_name("transcripts")
TIMEOUTS = Timeouts.derive(op=24.0)  # a heartbeat timeout of 1 s, a stall after 6 s at the earliest
DIAL = 1.0  # s after which a dial without any answer is given up
SIGNS_OF_LIFE = (m.Heartbeat, m.Alive, m.Ping)


@dataclasses.dataclass
class Line:
    sources: list[str]  # none: a moment
    targets: list[str]
    text: str
    times: int = 1

    def __str__(self) -> str:
        arrow = " -> " if self.targets else ""
        times = f" ({self.times} times)" if self.times > 1 else ""
        return (
            f"{' '.join(self.sources)}{arrow}{' '.join(self.targets)}{(self.sources and ': ') or ''}{self.text}{times}"
        )


class Rank:
    """One process: its `RankNode`, in rank 0 also the leader, and a script that runs
    `for step in steps: boundary(step); op()` up to its goal."""

    def __init__(self, replica: int, index: int, ranks: int, life: str, address: Address) -> None:
        self.replica, self.index, self.life = replica, index, life
        self.name = f"{life}.{index}" if ranks > 1 else life
        self.address = address
        self.node = n.RankNode(replica, index, address, TIMEOUTS)
        self.with_leader = RankWithLeader(self.node, LeaderNode(replica, life, ranks, TIMEOUTS)) if index == 0 else None
        self.alive, self.stopped = True, False
        self.state = "joining"  # preparing, computing, boundary, op, finished, left, failed
        self.goal = 0  # the script runs until it has finished the step before this one
        self.step = self.issued = self.returned = 0
        self.view: View | None = None  # that its exchange runs in; None while it is stopped for a change
        self.caught_up = False
        self.final = 0  # ops below it are FINAL everywhere, as an account of some member has shown
        self.conn: int | None = None  # of a leader, to the coordinator
        self.above: c.Coordinator | None = None  # which one that is
        self.links: dict[int, str] = {}  # replica -> the life to which there is a link; "" while it is down
        self.down: set[int] = set()  # replicas whose link could not be made again
        self.progressed = self.reported = 0.0

    @property
    def leader(self) -> LeaderNode:
        assert self.with_leader is not None
        return self.with_leader.leader

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped


class Conversation:
    """Carries out commands; what is said lies in `lines`, for `told` to take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at = "coordinator"  # the name of the host on which it runs
        self.coordinator: c.Coordinator | None = None
        self.views: list[View] = []  # what is written down
        self.finishes = NO_FINISHES  # and this
        self.lives: dict[str, list[Rank]] = {}
        self.current: dict[int, str] = {}  # replica -> its newest life
        self._ranks = 1
        self._replicas = 0
        self._coordinators = self._conns = 0
        self._queue: deque[tuple[str, str, Callable[[], None]]] = deque()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._cut: set[tuple[str, str]] = set()  # (from, to) of places between which nothing arrives
        self._dark: set[str] = set()  # places without power
        self._acknowledged: dict[tuple[str, str], float] = {}  # when a kernel last answered another place
        self._slow = False  # ops that are called do not return
        self._lines: list[Line] = []
        self._said_at = 0.0
        self._mute: dict[str, str] = {}
        self._found: dict[str, ProbeOutcome] = {}  # life -> what the coordinator found at its port last

    # -- what is said ----------------------------------------------------------------------------------------------

    def say(self, who: str, text: str, to: str = "") -> None:
        """Equal lines that follow each other, of several senders or to several receivers, become one."""
        if self.now - self._said_at > 1e-6:
            self._said_at = self.now
            self._lines.append(Line([], [], f"at {self.now:.1f} s"))
        last = self._lines[-1] if self._lines else None
        receivers = [to] if to else []
        if last is None or not last.sources or last.text != text:
            self._lines.append(Line([who], receivers, text))
        elif (last.sources, last.targets) == ([who], receivers):
            last.times += 1
        elif last.targets == receivers and who not in last.sources:
            last.sources.append(who)
        elif last.sources == [who] and to and last.targets and to not in last.targets:
            last.targets.append(to)
        else:
            self._lines.append(Line([who], receivers, text))

    def told(self) -> list[str]:
        """What was said since the last time. A moment in which the same is said as in the one before is only named."""
        moments: list[list[str]] = [[]]
        for line in self._lines:
            moments += [[]] * (not line.sources)
            moments[-1] = [*moments[-1], str(line)]
        self._lines = []
        shown: list[list[str]] = []
        for moment in moments:
            if shown and len(moment) > 1 and moment[1:] == shown[-1][1:]:
                shown[-1][0] += f", {moment[0].removeprefix('at ')}"
            else:
                shown.append(moment)
        return [line for moment in shown for line in moment]

    def message(self, who: str, to: str, message: m.Message, life: str) -> None:
        if isinstance(message, SIGNS_OF_LIFE):
            mute = getattr(message, "mute", "")
            if mute == self._mute.get(who, ""):
                return
            self._mute[who] = mute
        self.say(who, described(message, life), to)

    # -- commands --------------------------------------------------------------------------------------------------

    def carry_out(self, command: str) -> list[str]:
        name, *words = command.split()
        getattr(self, "do_" + name.replace("-", "_"))(*words)
        self._connect()
        self._settle()
        return self.told()

    def do_replicas(self, count: str, _of: str = "of", ranks: str = "1", _word: str = "") -> None:
        """`replicas 3` or `replicas 2 of 2 ranks`: a coordinator and so many replicas begin."""
        self._replicas, self._ranks = int(count), int(ranks)
        self._begin()
        for replica in range(self._replicas):
            self.do_start(str(replica))

    def do_start(self, replica: str) -> None:
        """A life of the replica begins, where the launcher would begin it."""
        number = int(replica)
        lives = sum(life.startswith(replica) for life in self.lives)
        life = replica + (chr(ord("a") + lives) if lives else "")
        self.current[number] = life
        self._dark.discard(replica)
        address = Address(f"host{replica}", 1, f"boot{replica}", lives + 1, 0, f"{number:016x}{lives:016x}")
        self.lives[life] = [Rank(number, index, self._ranks, life, address) for index in range(self._ranks)]
        for rank in self.lives[life]:
            if rank.with_leader is not None:
                self._do(rank, rank.with_leader.start())
            self._link_up(rank)

    def do_ready(self, replica: str) -> None:
        """The script of a joiner has come to its first boundary."""
        for rank in self._of(replica):
            rank.state = "ready"
            self._do(rank, rank.node.tell(m.Ready()))

    def do_caught_up(self, replica: str) -> None:
        """A joiner has the state of everybody; it says so at its next boundary."""
        for rank in self._of(replica):
            rank.caught_up = True

    def do_step(self, count: str = "1", *only: str) -> None:
        """All scripts, or those of some replicas, finish so many steps more."""
        self._slow = False
        self._go_on(int(count), only)

    def do_call(self, *only: str) -> None:
        """They pass the next boundary and call its op, which takes its time: it returns with the next `step 0`."""
        self._slow = True
        self._go_on(1, only)

    def do_finish(self, *replicas: str) -> None:
        """Scripts come to their end."""
        for replica in replicas:
            for rank in self._of(replica):
                rank.state = "finished"
                self._do(rank, rank.node.tell(m.Finished()))

    def do_kill(self, *names: str) -> None:
        """SIGKILL to replicas, or to single ranks (`kill 1.0`). Their kernels close what they had open."""
        for rank in [rank for name in names for rank in self._of(name)]:
            self._end(rank)

    def do_stop(self, replica: str) -> None:
        """SIGSTOP: its processes do nothing, their kernels still answer."""
        for rank in self._of(replica):
            rank.stopped = True

    def do_continue(self, replica: str) -> None:
        for rank in self._of(replica):
            rank.stopped = False

    def do_power_off(self, place: str) -> None:
        """A host is gone: nothing answers there any more, and nothing is closed."""
        self._dark.add(place)
        if place == self.at:
            self.coordinator = None
        else:
            for rank in self._of(place):
                rank.alive = False

    def do_cut(self, one: str, how: str, other: str) -> None:
        """`cut 0 <-> 2`, or `cut 0 -> 2` for one way. `all` stands for all other places."""
        for a, b in self._pairs(one, other):
            self._cut |= {(a, b)} if how == "->" else {(a, b), (b, a)}

    def do_heal(self) -> None:
        self._cut.clear()

    def do_reset(self, one: str, _and: str, other: str) -> None:
        """A connection is reset, by a firewall that was restarted, say. `reset 1 and coordinator`."""
        if other == self.at:
            for rank in self._of(one):
                self._hang_up(rank)
        else:
            for rank in self._of(one):
                rank.links[int(other)] = ""
            for rank in self._of(other):
                rank.links[int(one)] = ""

    def do_leave(self, replica: str) -> None:
        """SIGTERM: the replica leaves at a boundary."""
        for rank in self._of(replica):
            self._do(rank, rank.node.tell(m.Leave()))

    def do_drain(self) -> None:
        assert self.coordinator is not None
        self._do_coordinator(self.coordinator.drain())

    def do_restart(self, _what: str = "coordinator") -> None:
        """The coordinator's process dies and is started again with its store."""
        for life in self.lives.values():
            life[0].conn = None
        self._begin()

    def do_lose(self, _view: str, epoch: str) -> None:
        """The coordinator's store is set back to the views before this one."""
        self.views = [view for view in self.views if view.epoch < int(epoch)]

    def do_standby(self, _verb: str = "takes", _where: str = "over") -> None:
        """Another coordinator, on another host, has the job now, with the views in etcd."""
        self.at = "standby"
        self._begin()

    def do_wait(self, seconds: str, _unit: str = "s") -> None:
        """Time passes, a beat after the other."""
        self._connect()
        self._settle()
        end = self.now + float(seconds)
        while self.now < end - 1e-6:
            self.now += TIMEOUTS.beat
            self._tick()
            self._connect()
            self._settle()

    # -- time ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        for when, call in [entry for entry in self._later if entry[0] <= self.now]:
            self._later.remove((when, call))
            call()
        self._answer()
        for rank in self._all():
            if rank.runs and rank.state not in ("failed",):
                if rank.with_leader is not None:
                    self._do(rank, rank.with_leader.tick(self.now))
                else:
                    self._do(rank, rank.node.beat(self.now))
                    self._do(rank, rank.node.tick(self.now))
                self._look_at_stall(rank)
        if self.coordinator is not None:
            self._do_coordinator(self.coordinator.tick(self.now))

    def _answer(self) -> None:
        """The kernels acknowledge what came, whatever their processes do."""
        ranks = [rank for rank in self._all() if rank.alive]
        for rank in ranks:
            if rank.conn is not None and rank.above is self.coordinator:
                if self._open(self._place(rank), self.at):
                    self._acknowledged[rank.name, self.at] = self.now
                at = self._acknowledged.get((rank.name, self.at))
                if at is not None and self.coordinator is not None:
                    self.coordinator.acknowledged(rank.conn, at)
            elif rank.index and self._leader(rank).alive and rank.runs:
                self._do(rank, rank.node.up_acknowledged(self.now))
                self._do(self._leader(rank), self._leader(rank).leader.rank_acknowledged(rank.index, self.now))
            answers = {}
            for replica, life in rank.links.items():
                peer = self.lives[life][rank.index] if life else None
                if peer is not None and peer.alive and self._open(self._place(rank), self._place(peer)):
                    self._acknowledged[rank.name, peer.name] = self.now
                if peer is not None and (rank.name, peer.name) in self._acknowledged:
                    answers[replica] = self._acknowledged[rank.name, peer.name]
            if rank.runs:
                self._do(rank, rank.node.peers_acknowledged(answers))

    def _look_at_stall(self, rank: Rank) -> None:
        missing = self._waits_for(rank)
        if not missing or rank.view is None or self.now - rank.progressed <= TIMEOUTS.op_floor:
            return
        if self.now - rank.reported >= REPORT:
            rank.reported = self.now
            lasted = self.now - rank.progressed
            self._do(rank, rank.node.stalled(rank.view.epoch, rank.step, missing, lasted))

    # -- connections -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._coordinators += 1
        self._found.clear()
        self._dark.discard(self.at)
        self.coordinator = c.Coordinator(
            *(self._replicas, self._ranks, TIMEOUTS, self.views[-2:], self.now, self._coordinators),
            finishes=self.finishes,
        )
        if self._coordinators > 1:
            self.say(self.at, f"reads view {self.views[-1].epoch} from its store")

    def _connect(self) -> None:
        """Make the connections that there should be and are not."""
        for rank in self._all():
            if not rank.runs or rank.state in ("failed", "left"):
                continue
            if rank.index == 0 and rank.conn is None:
                self._link_up(rank)
            for replica, life in list(rank.links.items()):
                if not life:
                    self._link(rank, replica)

    def _link_up(self, rank: Rank) -> None:
        if rank.index:
            self._post(rank.name, self._leader(rank).name, lambda: self._do(rank, rank.node.up_opened()))
        elif self.coordinator is not None and self._open(self._place(rank), self.at):
            self._conns += 1
            rank.conn, rank.above = self._conns, self.coordinator
            self._do(rank, rank.leader.opened())

    def _link(self, rank: Rank, replica: int) -> None:
        """Dial a member of the view that the rank knows."""
        view = rank.node.machine.view
        member = view.member(replica) if view is not None else None
        if member is None:
            del rank.links[replica]
            return
        peer = self.lives[member.incarnation][rank.index]
        if not self._open(self._place(rank), self._place(peer)):
            return  # no answer: who is silent is found by that
        if not peer.alive:
            if replica not in rank.down:
                rank.down.add(replica)
                reason = "the link to it is down: connection refused"
                self._do(rank, rank.node.peer_lost(replica, view.epoch, reason, False))  # type: ignore[union-attr]
            return
        rank.links[replica] = member.incarnation
        self._do(rank, rank.node.peer_opened(replica))
        if replica in rank.down:
            rank.down.discard(replica)
            self._do(rank, rank.node.peer_back(replica))

    def _hang_up(self, leader: Rank) -> None:
        """The connection between a leader and the coordinator ends, for both."""
        conn, leader.conn = leader.conn, None
        machine = leader.above
        if conn is not None and machine is not None:

            def closed() -> None:
                if machine is self.coordinator:
                    self._do_coordinator(machine.disconnected(conn, self.now))

            self._post(leader.name, self.at, closed)
        if leader.runs:
            self._do(leader, leader.leader.lost())

    def _end(self, rank: Rank) -> None:
        """The process ends, and its kernel says so wherever it was connected."""
        if not rank.alive:
            return
        rank.alive = False
        if rank.index == 0:
            self._hang_up(rank)
        else:
            leader = self._leader(rank)

            def lost() -> None:
                self._do(leader, leader.leader.rank_lost(rank.index, "its process has ended"))

            self._post(rank.name, leader.name, lost)
        for other in self._all():
            if other.links.get(rank.replica) == rank.life and other.index == rank.index:
                other.links[rank.replica] = ""

    def _probe(self, probe: Probe) -> None:
        """What the coordinator finds at the port of a rank."""
        machine = self.coordinator
        rank = next(x for ranks in self.lives.values() for x in ranks if x.address == probe.address)
        outcome = ProbeOutcome.UNREACHABLE
        if self._open(self._place(rank), self.at):
            lives = ProbeOutcome.ANSWERED if rank.runs else ProbeOutcome.MUTE
            outcome = lives if rank.alive else ProbeOutcome.REFUSED

        def told() -> None:
            if machine is None or machine is not self.coordinator:
                return
            if probe.why is ProbeReason.ACCUSED:
                self.say(
                    self.at, f"asks {rank.name}: {'it answers' if outcome is ProbeOutcome.ANSWERED else 'no answer'}"
                )
            elif probe.why is ProbeReason.SEARCH and self._found.get(rank.life) != outcome:
                self._found[rank.life] = outcome
                self.say(self.at, f"dials {rank.life}: {outcome.value}")
            self._do_coordinator(machine.probed(probe, outcome, self.now))
            if outcome is ProbeOutcome.ANSWERED and probe.call:
                self.say(self.at, "tells it where the coordinator is", rank.name)
                rank.conn = None
                self._link_up(rank)

        if outcome is ProbeOutcome.UNREACHABLE or (outcome is ProbeOutcome.MUTE and probe.why is ProbeReason.ACCUSED):
            self._later.append((self.now + DIAL, told))
        else:
            self._post(self.at, self.at, told)

    # -- carrying ----------------------------------------------------------------------------------------------------

    def _post(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        self._queue.append((source, target, deliver))

    def _settle(self) -> None:
        """Deliver, and let scripts and ops go on, until nothing moves."""
        while True:
            entry = next((entry for entry in self._queue if self._arrives(entry)), None)
            if entry is not None:
                self._queue.remove(entry)
                entry[2]()
                continue
            if not any([self._script(rank) for rank in self._all()]):
                return

    def _arrives(self, entry: tuple[str, str, Callable[[], None]]) -> bool:
        source, target, _ = entry
        if self._stopped(target):
            return False
        a, b = self._place_of(source), self._place_of(target)
        return (a, b) not in self._cut and b not in self._dark

    def _to_coordinator(self, leader: Rank, message: m.Message) -> None:
        conn, machine = leader.conn, leader.above
        if conn is None or machine is None:
            return  # what matters is said again when the connection is there
        self.message(leader.name, self.at, message, leader.life)

        def deliver() -> None:
            if machine is self.coordinator:
                self._do_coordinator(machine.receive(conn, message, self.now))

        self._post(leader.name, self.at, deliver)

    def _do_coordinator(self, actions: list[ca.CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, ca.Persist):
                view = action.view
                assert not self.views or view.epoch > self.views[-1].epoch, "an epoch was used again"
                self.views.append(view)
                self.say(self.at, f"writes {members(view)}, {since(view)}: {shortened(view.why)}")
            elif isinstance(action, ca.Send):
                leader = self._connected(action.conn)
                if leader is not None:
                    self._send(self.at, leader, action.message)
            elif isinstance(action, ca.Close):
                leader = self._connected(action.conn)
                if leader is not None:
                    leader.conn = None
                    self.say(self.at, f"closes the connection of {leader.name}")
            elif isinstance(action, Probe):
                self._probe(action)
            elif isinstance(action, ca.Log):
                if action.kind != "view":
                    said = ", ".join(f"{key} {shortened(str(value))}" for key, value in action.fields.items())
                    self.say(self.at, f"logs {action.kind}: {said}" if said else f"logs {action.kind}")
            elif isinstance(action, ca.StoreFinishes):
                self.finishes = action.finishes
                lives = ", ".join(str(replica) for replica, _ in action.finishes.lives)
                self.say(self.at, f"writes who has finished: {lives or 'nobody'}")
            elif isinstance(action, ca.Unfit):
                self.say(self.at, f"ends, and leaves the job alone: {shortened(action.reason)}")
                self.coordinator = None
            else:
                self.say(
                    self.at, f"the job has failed: {shortened(action.failed)}" if action.failed else "the job has ended"
                )

    def _send(self, source: str, leader: Rank, message: m.Message) -> None:
        conn = leader.conn
        self.message(source, leader.name, message, leader.life)

        def deliver() -> None:
            if leader.alive and leader.conn == conn:
                self._do(leader, leader.leader.from_coordinator(message))

        self._post(source, leader.name, deliver)

    def _do(self, rank: Rank, actions: Sequence[InProcessAction]) -> None:
        if not rank.alive:
            return
        for action in actions if rank.with_leader is None else rank.with_leader.carry(actions):
            if isinstance(action, ToCoordinator):
                self._to_coordinator(rank, action.message)
            elif isinstance(action, act.ToLeader):
                self._carry(rank, self._leader(rank), action.message, up=True)
            elif isinstance(action, ToRank):
                self._carry(rank, self.lives[rank.life][action.shard], action.message, up=False)
            elif isinstance(action, n.ToPeer):
                self._to_peer(rank, action.replica, action.message)
            elif isinstance(action, act.Freeze):
                self._freeze(rank, action.view)
            elif isinstance(action, act.EnterView):
                self._post(rank.name, rank.name, lambda a=action: self._enter(rank, a))  # type: ignore[misc]
            elif isinstance(action, n.LookAtWaits):
                self._do(rank, rank.node.waits(rank.step, self._waits_for(rank)))
            elif isinstance(action, act.Passed):
                self._passed(rank, action.left)
            elif isinstance(action, act.Known):
                rank.state = "preparing"
                self.say(rank.name, f"preparing, as if in {members(action.view)}")
            elif isinstance(action, act.Failed):
                rank.state = "failed"
                self.say(rank.name, f"ended: {shortened(action.reason)}")
                self._end(rank)

    def _carry(self, source: Rank, target: Rank, message: m.Message, *, up: bool) -> None:
        """Between a leader and the other ranks of its replica."""
        if not target.alive:
            return
        self.message(source.name, target.name, message, source.life)

        def deliver() -> None:
            if up:
                self._do(target, target.leader.from_rank(source.index, message, self.now))
            else:
                self._do(target, target.node.from_up(message))

        self._post(source.name, target.name, deliver)

    def _to_peer(self, rank: Rank, replica: int, message: m.Message) -> None:
        life = rank.links.get(replica)
        if not life:
            return  # what matters is said again when the link is there
        peer = self.lives[life][rank.index]
        self.message(rank.name, peer.name, message, rank.life)
        self._post(rank.name, peer.name, lambda: self._do(peer, peer.node.from_peer(message, self.now)))

    # -- a rank: its exchange and its script -------------------------------------------------------------------------

    def _freeze(self, rank: Rank, view: View) -> None:
        self.say(rank.name, f"stopped for epoch {view.epoch}")
        rank.view = None
        wanted = {member.replica: member.incarnation for member in view.members if member.replica != rank.replica}
        rank.links = {replica: life for replica, life in rank.links.items() if life and wanted.get(replica) == life}
        rank.down &= wanted.keys()
        for replica in wanted.keys() - rank.links.keys():
            rank.links[replica] = ""
            self._link(rank, replica)

        def quiet() -> None:
            ops = tuple(m.OpProgress(op, ()) for op in range(rank.returned, rank.issued))
            progress = m.Progress(rank.returned, ops, step=rank.node.machine.step)
            self._do(rank, rank.node.quiesced(view.epoch, progress))

        self._post(rank.name, rank.name, quiet)

    def _enter(self, rank: Rank, action: act.EnterView) -> None:
        if not rank.node.wants(action.view):
            return
        view = rank.view = action.view
        if not rank.node.machine.ran:
            rank.step = rank.issued = rank.returned = view.step or 0
            rank.goal = max(self._newest(member.replica, rank.index).goal for member in view.members)
            rank.state = "computing"
        rank.progressed = self.now
        rank.final = max(progress.returned for progress in action.progress.values())
        self.say(rank.name, f"running in epoch {view.epoch}" + (f", in op {rank.step}" if rank.state == "op" else ""))
        self._do(rank, rank.node.entered(view))

    def _passed(self, rank: Rank, left: bool) -> None:
        if left:
            rank.state = "left"
            self.say(rank.name, f"left the job at the boundary of step {rank.step}")
            self._do(rank, rank.node.tell(m.Finished()))
        elif rank.state == "boundary":
            rank.state, rank.issued, rank.progressed = "op", rank.step + 1, self.now
            self.say(rank.name, f"passed the boundary of step {rank.step}, op called")

    def _script(self, rank: Rank) -> bool:
        """The script of a rank goes on to its next wait; whether it did."""
        if not rank.runs or rank.view is None:
            return False
        if rank.state == "computing" and rank.step < rank.goal:
            if rank.caught_up and rank.replica not in rank.view.contributing:
                self._do(rank, rank.node.tell(m.CaughtUp(rank.step)))
            rank.state = "boundary"
            self._do(rank, rank.node.boundary(rank.step))
            if rank.state == "boundary":
                self.say(rank.name, f"at the boundary of step {rank.step}")
            return True
        if rank.state != "op" or self._slow or self._waits_for(rank):
            return False
        self.say(rank.name, f"op {rank.step} returned")
        rank.returned = rank.step = rank.step + 1
        rank.state = "computing"
        return True

    def _waits_for(self, rank: Rank) -> tuple[int, ...]:
        """Who keeps the op that the rank is in from returning: those who are not in it, or else those who wait for
        them, as an op returns when all members are known to hold all of it."""
        view = rank.view
        if rank.state != "op" or view is None or rank.step < rank.final:
            return ()
        peers = {member.replica: self.lives[member.incarnation][rank.index] for member in view.members}

        def missed(by: Rank) -> tuple[int, ...]:
            def there(peer: Rank) -> bool:
                same = peer.view is not None and peer.view.epoch == view.epoch and peer.issued > rank.step
                return same and peer.runs and self._open(self._place(by), self._place(peer))

            return tuple(replica for replica, peer in peers.items() if not there(peer))

        return missed(rank) or tuple(replica for replica, peer in peers.items() if missed(peer))

    def _go_on(self, steps: int, only: tuple[str, ...]) -> None:
        for rank in self._all():
            scripted = rank.alive and rank.state in ("computing", "boundary", "op", "joining")
            if scripted and (not only or rank.life in only or str(rank.replica) in only):
                rank.goal += steps

    # -- look-ups ------------------------------------------------------------------------------------------------------

    def _all(self) -> list[Rank]:
        return [rank for replica in sorted(self.current) for rank in self.lives[self.current[replica]]]

    def _of(self, name: str) -> list[Rank]:
        replica, _, index = name.partition(".")
        ranks = self.lives[self.current[int(replica)] if replica.isdigit() else replica]
        return [ranks[int(index)]] if index else ranks

    def _newest(self, replica: int, index: int) -> Rank:
        return self.lives[self.current[replica]][index]

    def _leader(self, rank: Rank) -> Rank:
        return self.lives[rank.life][0]

    def _connected(self, conn: int) -> Rank | None:
        leaders = (ranks[0] for ranks in self.lives.values() if ranks[0].above is self.coordinator)
        return next((leader for leader in leaders if leader.conn == conn), None)

    def _place(self, rank: Rank) -> str:
        return str(rank.replica)

    def _place_of(self, name: str) -> str:
        return name if name in ("coordinator", "standby") else name.partition(".")[0].rstrip("abcdefgh")

    def _stopped(self, name: str) -> bool:
        if name in ("coordinator", "standby"):
            return False
        life, _, index = name.partition(".")
        return self.lives[life][int(index or 0)].stopped

    def _open(self, one: str, other: str) -> bool:
        """Whether packets go both ways, so that a kernel can answer."""
        return not {(one, other), (other, one)} & self._cut and not {one, other} & self._dark

    def _pairs(self, one: str, other: str) -> list[tuple[str, str]]:
        places = [self.at, *map(str, sorted(self.current))]
        return [(one, place) for place in places if place != one] if other == "all" else [(one, other)]


# -- how messages and views read -----------------------------------------------------------------------------------


def members(view: View) -> str:
    who = " ".join(f"{x.incarnation}{'' if x.contributing else '*'}" for x in view.members)
    return f"view {view.epoch} ({who or 'nobody'})"


def since(view: View) -> str:
    return f"from step {view.step} on" if view.proposal else "at once"


HIDDEN = {"ranks", "timeouts", "address", "incarnation", "contributors", "rosters", "epoch_of", "lasted"}


def shortened(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def described(message: m.Message, life: str) -> str:
    """The fields that say something, in words; those at their defaults, and who it is from, do not."""
    info = msgspec.structs.fields(message)
    parts = []
    for field in info:
        value = getattr(message, field.name)
        own = field.name == "replica" and str(value) == life.rstrip("abcdefgh")
        if field.name in HIDDEN or own or (value == field.default and not isinstance(value, View)):
            continue
        parts.append(worded(field.name, value))
    text = ", ".join(part for part in parts if part)
    return type(message).__name__ + (f"({text})" if text else "")


def worded(name: str, value: object) -> str:
    if isinstance(value, View):
        return members(value)
    if name == "view":
        return "no view"
    if isinstance(value, m.Progress):
        parts = ["has run nothing"] if value.fresh else [f"ops returned: {value.returned}"]
        return ", ".join([*parts, *(f"in op {op.number}" for op in value.ops)])
    if isinstance(value, bool):
        return name.replace("_", " ") if value else f"not {name.replace('_', ' ')}"
    if isinstance(value, tuple) and value and isinstance(value[0], Member):
        return f"{name} {' '.join(member.incarnation for member in value)}"
    if isinstance(value, tuple):
        return f"{name.replace('_', ' ')} {' '.join(map(str, value)) or 'nobody'}"
    if name == "proposal" and isinstance(value, int):
        return f"proposal {value >> 32}"
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, enum.Enum):
        return str(value.value)
    return f"{name.replace('_', ' ')} {value}"


# -- files ---------------------------------------------------------------------------------------------------------


def played(text: str) -> str:
    """The transcript `text` with all that is said anew: commands and comments stay, the rest follows from them."""
    conversation = Conversation()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith((">", ">>")):
            quiet, command = line.startswith(">>"), line.lstrip("> ")
            lines += ["", line] if lines and lines[-1].startswith("  ") else [line]
            said = conversation.carry_out(command)
            lines += [] if quiet else ["  " + words for words in said]
        elif line.startswith("#"):
            if lines and not lines[-1].startswith("#") and lines[-1]:
                lines.append("")
            lines.append(line)
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.txt")):
        if not names or path.stem in names:
            before = path.read_text()
            after = played(before)
            path.write_text(after)
            print(f"{path.name}: {'as before' if after == before else 'rewritten'}")


if __name__ == "__main__":
    main(sys.argv[1:])
