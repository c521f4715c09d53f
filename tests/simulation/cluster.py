"""A whole job in one thread: the production state machines under a random schedule, with an abstract exchange.

Channels are first-in first-out like TCP, but any channel may be arbitrarily slow; connections break, replicas die and
come back, the coordinator dies and comes back with its stored views. One seed is one history.

The exchange is reduced to what the protocol relies on: an op returns on a member when all members of its view run in
that view and have issued it, and freezing takes its time.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable

from ftcomm.control import actions as act
from ftcomm.control import coordinator as c
from ftcomm.control import coordinator_actions as ca
from ftcomm.control import leader as lead
from ftcomm.control import member as mem
from ftcomm.control import messages as m
from ftcomm.control.finishes import NO_FINISHES
from ftcomm.control.probe_schedule import Probe, ProbeOutcome
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View

HEARTBEAT = 50.0  # units of virtual time
TIMEOUTS = Timeouts(HEARTBEAT, 4 * HEARTBEAT, 16 * HEARTBEAT)


@dataclasses.dataclass
class Rank:
    """One process: its machine, and the user's loop `for step in steps: boundary(step); op`."""

    machine: mem.Machine
    alive: bool = True
    epoch: int = 0  # of the view that its exchange runs in; 0 while frozen or never run
    view: View | None = None
    step: int = 0
    state: str = "init"  # init, preparing, ready, boundary, op, done, left, failed
    issued: int = 0
    returned: int = 0
    freezing: int = 0
    caught_up: bool = False


@dataclasses.dataclass
class Replica:
    number: int
    incarnation: str
    leader: lead.Leader
    ranks: list[Rank]
    alive: bool = True
    over: bool = False  # has left or finished; not to be started again
    conn: int | None = None  # to the coordinator


class Cluster:
    def __init__(self, seed: int, replicas: int, ranks: int, steps: int) -> None:
        self.random = random.Random(seed)
        self.n, self.w, self.steps = replicas, ranks, steps
        self.now = 0.0
        self.trace: list[str] = []
        self.views: list[View] = []  # the store
        self.finishes = NO_FINISHES  # the same
        self.lifetimes = 0
        self.coordinator: c.Coordinator | None = self._coordinator()
        self.conns = 0
        self.incarnations = 0
        self.replicas: dict[int, Replica] = {}
        self.channels: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        self.done = ""
        self.ran: dict[int, View] = {}  # epoch -> the view that was run in it
        self.ready: dict[str, set[int]] = {}  # incarnation -> ranks whose scripts may be waited for
        self.results: dict[int, tuple[int, tuple[int, ...]]] = {}  # step -> (epoch, members) where it returned first
        for number in range(replicas):
            self.start(number)

    # -- faults --------------------------------------------------------------------------------------------------

    def _coordinator(self) -> c.Coordinator:
        self.lifetimes += 1
        known = self.n, self.w, TIMEOUTS, self.views[-2:], self.now, self.lifetimes
        return c.Coordinator(*known, finishes=self.finishes)

    def start(self, number: int) -> None:
        self.incarnations += 1
        incarnation = f"{number}.{self.incarnations}"
        ranks = [Rank(mem.Machine(number)) for _ in range(self.w)]
        replica = Replica(number, incarnation, lead.Leader(number, incarnation, self.w, TIMEOUTS), ranks)
        self.replicas[number] = replica
        self._log(f"start {incarnation}")
        for rank in range(self.w):
            hello = m.Hello(rank, Address("sim", rank + 1, "boot", self.incarnations, 0, f"{self.incarnations:032x}"))
            self._post(self._name(replica, rank), self._name(replica, "L"), self._from_rank(replica, rank, hello))

    def kill(self, number: int) -> None:
        replica = self.replicas[number]
        self._log(f"kill {replica.incarnation}")
        replica.alive = False
        for rank in replica.ranks:
            rank.alive = False
        for key in [key for key in self.channels if any(end.startswith(replica.incarnation + "/") for end in key)]:
            if self.random.random() < 0.5:  # what was sent may or may not arrive
                del self.channels[key]
        self._hang_up(replica)

    def cut(self, number: int) -> None:
        """The connection between a leader and the coordinator breaks; the leader makes it again."""
        self._log(f"cut {number}")
        self._hang_up(self.replicas[number])

    def flap(self) -> None:
        """A link between two members breaks and comes back: messages are lost, then what matters is said again."""
        links = [key for key in self.channels if key[0].endswith(">")]
        if not links:
            return
        source, target = self.random.choice(links)
        del self.channels[source, target]
        replica = next((r for r in self.replicas.values() if source.startswith(r.incarnation + "/")), None)
        peer = next((r for r in self.replicas.values() if target.startswith(r.incarnation + "/")), None)
        if replica is None or peer is None or not (replica.alive and peer.alive):
            return
        self._log(f"flap {source} {target}")
        index = source[:-1].partition("/")[2]
        if index == "L":
            self._do_leader(replica, replica.leader.again(peer.number))
        else:
            self._do_member(replica, int(index), replica.ranks[int(index)].machine.again(peer.number))

    def leave(self, number: int) -> None:
        """SIGTERM to one replica: it leaves at a boundary, and stays away."""
        self._log(f"leave {number}")
        for rank in range(self.w):
            self._from_rank(self.replicas[number], rank, m.Leave())()

    def drain(self) -> None:
        self._log("drain")
        assert self.coordinator is not None
        self._do_coordinator(self.coordinator.drain())

    def restart_coordinator(self) -> None:
        self._log("restart coordinator")
        self.coordinator = self._coordinator()
        for replica in self.replicas.values():
            replica.conn = None
        for key in [key for key in self.channels if "C" in key]:
            del self.channels[key]

    def _hang_up(self, replica: Replica) -> None:
        conn, replica.conn = replica.conn, None
        self.channels.pop(("C", self._name(replica, "L")), None)
        if conn is not None and self.coordinator is not None:
            self._post(self._name(replica, "L"), "C", lambda: self._closed(conn))

    def _closed(self, conn: int) -> None:
        if self.coordinator is not None:
            self._do_coordinator(self.coordinator.disconnected(conn, self.now))

    # -- the schedule --------------------------------------------------------------------------------------------

    def choices(self) -> list[Callable[[], None]]:
        """Everything that can happen next."""
        options: list[Callable[[], None]] = []
        for queue in self.channels.values():
            if queue:
                options.append(lambda queue=queue: queue.popleft()())
        for replica in self.replicas.values():
            if not replica.alive:
                continue
            if replica.conn is None and self.coordinator is not None and not replica.leader.finished:
                options.append(lambda replica=replica: self._connect(replica))
            for index, rank in enumerate(replica.ranks):
                if self._can_move(rank):
                    options.append(lambda replica=replica, index=index: self._move(replica, index))
        return options

    def tick(self) -> None:
        self.now += HEARTBEAT / 10
        for replica in self.replicas.values():
            if replica.alive:
                for index, rank in enumerate(replica.ranks):
                    replica.leader.from_rank(index, m.Heartbeat(rank.machine.step))
                self._do_leader(replica, replica.leader.tick(self.now))
        if self.coordinator is not None:
            self._do_coordinator(self.coordinator.tick(self.now))

    def _connect(self, replica: Replica) -> None:
        join = replica.leader.join()
        if join is None:
            return
        self.conns += 1
        replica.conn = self.conns
        self._log(f"connect {replica.incarnation} epoch {join.epoch}")
        self._to_coordinator(replica, join)

    def _can_move(self, rank: Rank) -> bool:
        if not rank.alive or rank.state in ("done", "left", "failed", "boundary", "ready"):
            return rank.alive and rank.freezing > 0
        return True

    def _move(self, replica: Replica, index: int) -> None:
        """The user's code, or the engine's quiescing, goes one step."""
        rank = replica.ranks[index]
        if rank.freezing and (rank.state != "op" or self.random.random() < 0.5):
            epoch, rank.freezing = rank.freezing, 0
            rank.epoch = 0
            progress = m.Progress(rank.returned, tuple(m.OpProgress(n, ()) for n in range(rank.returned, rank.issued)))
            self._do_member(replica, index, rank.machine.quiesced(epoch, progress))
            return
        if rank.state == "preparing" and self.random.random() < 0.2:
            rank.state = "ready"
            self.ready.setdefault(replica.incarnation, set()).add(index)
            self._do_member(replica, index, [act.ToLeader(m.Ready())])
        elif rank.state == "run":
            if rank.step >= self.steps:
                rank.state = "done"
                self._do_member(replica, index, [act.ToLeader(m.Finished())])
                return
            assert rank.view is not None
            behind = replica.number not in rank.view.contributing
            if behind and not rank.caught_up and self.random.random() < 0.5:
                rank.caught_up = True  # said once, like by `RankNode`; here no connection to a leader ends
                self._do_member(replica, index, [act.ToLeader(m.CaughtUp(rank.step))])
            rank.state = "boundary"
            self._do_member(replica, index, rank.machine.boundary(rank.step))
        elif rank.state == "op" and rank.epoch:
            self._exchange(replica, index)

    def _exchange(self, replica: Replica, index: int) -> None:
        rank = replica.ranks[index]
        view = rank.view
        assert view is not None
        if rank.issued == rank.step:
            rank.issued += 1
        mates = [self.replicas[r].ranks[index] for r in view.replicas]
        current = all(view.has(r, self.replicas[r].incarnation) for r in view.replicas)
        if current and all(x.alive and x.epoch == view.epoch and x.issued > rank.step for x in mates):
            self._check_op(rank.step, index, view)
            rank.returned += 1
            rank.step += 1
            rank.state = "run"
        elif any(x.returned > rank.step for x in mates):
            rank.returned += 1  # FINAL everywhere, by rule 5; the words of a dead process can be read all the same
            rank.step += 1
            rank.state = "run"

    # -- plumbing ------------------------------------------------------------------------------------------------

    def _name(self, replica: Replica, what: object) -> str:
        return f"{replica.incarnation}/{what}"

    def _post(self, source: str, target: str, action: Callable[[], None]) -> None:
        self.channels.setdefault((source, target), deque()).append(action)

    def _from_rank(self, replica: Replica, rank: int, message: m.Message) -> Callable[[], None]:
        def deliver() -> None:
            if replica.alive:
                self._do_leader(replica, replica.leader.from_rank(rank, message))

        return deliver

    def _to_coordinator(self, replica: Replica, message: m.Message) -> None:
        conn = replica.conn
        if conn is None:
            return

        def deliver() -> None:
            if self.coordinator is not None:
                self._do_coordinator(self.coordinator.receive(conn, message, self.now))

        self._post(self._name(replica, "L"), "C", deliver)

    def _do_coordinator(self, actions: list[ca.CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, ca.Persist):
                self._log(f"view {action.view.epoch} step {action.view.step}: {self._described(action.view)}")
                assert not self.views or action.view.epoch > self.views[-1].epoch, "an epoch was reused"
                self._check_ready(action.view)
                self.views.append(action.view)
            elif isinstance(action, ca.StoreFinishes):
                self.finishes = action.finishes
            elif isinstance(action, ca.Send):
                replica = next((r for r in self.replicas.values() if r.conn == action.conn), None)
                if replica is not None:
                    self._post("C", self._name(replica, "L"), self._to_leader(replica, action.message))
            elif isinstance(action, ca.Close):
                for replica in self.replicas.values():
                    if replica.conn == action.conn:
                        replica.conn = None
            elif isinstance(action, Probe):
                self._post("probe", action.life[1], lambda a=action, by=self.coordinator: self._probed(by, a))
            elif isinstance(action, ca.Done):
                self.done = action.failed or "finished"
            elif isinstance(action, ca.Unfit):
                self.done = action.reason

    def _probed(self, by: c.Coordinator, probe: Probe) -> None:
        if by is self.coordinator:
            replica = self.replicas[probe.life[0]]
            alive = replica.alive and replica.incarnation == probe.life[1]
            self._do_coordinator(by.probed(probe, ProbeOutcome.ANSWERED if alive else ProbeOutcome.ENDED, self.now))

    def _to_leader(self, replica: Replica, message: m.Message) -> Callable[[], None]:
        def deliver() -> None:
            if replica.alive:
                self._do_leader(replica, replica.leader.from_coordinator(message))

        return deliver

    def _do_leader(self, replica: Replica, actions: list[lead.LeaderAction]) -> None:
        for action in actions:
            if isinstance(action, lead.ToCoordinator):
                self._to_coordinator(replica, action.message)
            elif isinstance(action, lead.ToRank):
                self._post(
                    self._name(replica, "L"),
                    self._name(replica, action.shard),
                    lambda a=action: self._do_member(
                        replica, a.shard, replica.ranks[a.shard].machine.from_leader(a.message)
                    ),
                )
            else:
                self._to_peer(replica, "L", action.replica, action.message)

    def _to_peer(self, replica: Replica, index: int | str, number: int, message: m.Message) -> None:
        """To the incarnation that the sender's view names, as a link would."""
        peer = self.replicas[number]
        machine = replica.ranks[0 if index == "L" else index].machine
        view = machine.view if machine.view is not None else replica.leader.view
        if index == "L" and replica.leader.view is not None:
            view = replica.leader.view
        if view is None or not view.has(number, peer.incarnation):
            return

        def deliver() -> None:
            if not peer.alive:
                return
            if isinstance(message, m.Boundary):
                self._do_leader(peer, peer.leader.from_leader(message))
            elif isinstance(message, m.MemberProgress):
                self._do_member(peer, int(index), peer.ranks[int(index)].machine.from_member(message))

        self._post(self._name(replica, f"{index}>"), self._name(peer, index), deliver)

    def _do_member(self, replica: Replica, index: int, actions: list[mem.MemberAction]) -> None:
        rank = replica.ranks[index]
        if not rank.alive:
            return
        for action in actions:
            if isinstance(action, act.ToLeader):
                deliver = self._from_rank(replica, index, action.message)
                self._post(self._name(replica, index), self._name(replica, "L"), deliver)
            elif isinstance(action, mem.ToMember):
                self._to_peer(replica, index, action.replica, action.message)
            elif isinstance(action, act.Freeze):
                rank.freezing = action.view.epoch
            elif isinstance(action, act.EnterView):
                self._enter(replica, index, action)
            elif isinstance(action, act.Passed) and action.left:
                rank.state = "left"
                self._do_member(replica, index, [act.ToLeader(m.Finished())])
            elif isinstance(action, act.Passed):
                if rank.state == "boundary":
                    rank.state = "op"
            elif isinstance(action, act.Known):
                if rank.state == "init":
                    rank.state = "preparing"
            elif isinstance(action, act.Failed):
                self._log(f"failed {replica.incarnation}: {action.reason}")
                rank.state, rank.epoch = "failed", 0

    def _enter(self, replica: Replica, index: int, action: act.EnterView) -> None:
        rank, view = replica.ranks[index], action.view
        known = self.ran.setdefault(view.epoch, view)
        assert known == view, f"two views of epoch {view.epoch} were run"
        if not rank.machine.ran:
            assert view.step is not None
            rank.step = rank.issued = rank.returned = max(
                [p.returned for p in action.progress.values() if not p.fresh], default=0
            )
            assert rank.step == view.step, f"{replica.incarnation} joins at {view.step}, the others are at {rank.step}"
            rank.state = "run"
        returned = [p.returned for p in action.progress.values() if not p.fresh]
        assert max(returned, default=0) - min(returned, default=0) <= 1, f"members apart: {action.progress}"
        rank.view, rank.epoch = view, view.epoch
        self._do_member(replica, index, rank.machine.entered(view.epoch))

    def _check_ready(self, view: View) -> None:
        """Nobody is waited for before its script has said that it is ready, but in the first view, which all form."""
        earlier = {member.incarnation for known in self.views for member in known.members}
        for member in view.members if self.views else ():
            ready = self.ready.get(member.incarnation, set())
            assert member.incarnation in earlier or len(ready) == self.w, f"{member.incarnation} is not ready: {ready}"

    def _check_op(self, step: int, index: int, view: View) -> None:
        if view.step is not None:
            assert step >= view.step, f"op {step} was exchanged in epoch {view.epoch}, in force from {view.step} on"

    def _described(self, view: View) -> str:
        return " ".join(f"{x.incarnation}{'' if x.contributing else '*'}" for x in view.members) + f" ({view.why})"

    def _log(self, text: str) -> None:
        self.trace.append(f"{self.now:7.1f} {text}")
