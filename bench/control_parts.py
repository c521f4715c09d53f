"""The processes of `ftcomm bench control`, each of which is told what to do by lines of JSON and answers in lines.

    coordinator    the production `CoordinatorServer`, with a file of views, or with views in a real etcd
    leader         the production `LeaderProcess` of a replica, and the production `ControlThread` of its rank 0, whose
                   data plane moves no data, in one process
    agents         with --agents: the host agents of some columns, each a production `HostAgentProcess`
                   (`bench/control_agents.py`)
    ranks          all other ranks of some columns: `LightRank`

    python -m ftcomm.bench.control_parts ROLE '{"replicas": 2, ...}'

A light rank is a production `RankNode` with a production `Link` to its leader, or to the agent of its host, over a
socket of its own. These parts of it are light: it shares process, thread, listening port and pid with others; the links
to the members of its column, which live in the same process, are calls, and so is the news of their death; it moves no
data, and its script only passes boundaries at the pace of a clock. All run on one host: of others a rank has only a
label in its address, as long as what hosts would differ in, so that views are as large. Ranks of hosts that are cut off
for a while (`bench/control_cut.py`) have a listening port of their own each, which is cut as well. The garbage
collector, which would look at the objects of thousands of ranks for what one has left, runs only between what is
measured.

A host agent has its own listening ports, its own connection to the leader, and one from each of its ranks. It shares
process, thread and pid with others, and their garbage collector runs as that of light ranks; the first rank of its host
knows its end, and it that of the rank, by a connection, as they have no process each.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import resource
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.control_agents import AgentPorts, StartedAgent, agents
from ftcomm.bench.control_cut import Cable
from ftcomm.bench.control_setup import (
    HOST,
    TO_LEADER,
    TO_RANK,
    MessageCounts,
    Setup,
    answer,
    kind_of,
    say,
    usage,
)
from ftcomm.control import actions as act
from ftcomm.control import leaderless, liveness
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.control_thread import ControlThread, Gone
from ftcomm.control.data_plane import DataPlane
from ftcomm.control.leader_process import LeaderConfig, LeaderProcess, collect_seldom
from ftcomm.control.limits import RANKS
from ftcomm.control.links import Link, Listener, listen
from ftcomm.control.replica_reports import RESUMED
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.store import Store
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.views import Address, Life, View

LABEL = 60  # digits: a name of 15 characters, a boot id, and room
SLICES = 50  # of a beat, in each of which a part of the ranks gives its sign of life
STANDING = 0.1  # s between two looks of a script at the clock
FOREVER = 1e6  # s


def address(port: int, nonce: str, host: int) -> Address:
    here = liveness.boot(), os.getpid(), 3
    network, pids = namespaces()
    return Address(HOST, port, *here, nonce, rack=f"host {host:0{LABEL}d}", network=network, pids=pids)


@functools.cache
def namespaces() -> tuple[str, str]:
    return liveness.network(), liveness.pids()


# -- the coordinator ---------------------------------------------------------------------------------------------------


async def coordinator(setup: Setup) -> None:
    def tell(event: Mapping[str, Any]) -> None:
        if event["kind"] == "view":
            contributes = {member["replica"]: member["contributing"] for member in event["members"]}
            behind, contributing = ([x for x, does in contributes.items() if does is which] for which in (False, True))
            say(view=event["epoch"], at=event["mono"], lost=event["lost"], behind=behind, contributing=contributing)
        elif event["kind"] in ("failed", "ended", "removed", "refused"):
            say(event=event["kind"], at=event["mono"], said=str(event.get("reason", ""))[:300])

    store: Path | Store = Path(setup.store)
    if setup.store.startswith("etcd://"):
        from ftcomm.control.etcd import EtcdPlace
        from ftcomm.control.etcd_store import EtcdStore

        place = EtcdPlace.parse(setup.store, os.environ)
        store = EtcdStore(place, setup.coordinator, setup.timeouts.heartbeat, setup.stands_by)
    server = CoordinatorServer(
        setup.replicas,
        setup.ranks,
        setup.credentials,
        port=setup.coordinator,
        store=store,
        timeouts=setup.timeouts,
        on_event=tell,
    )
    if setup.stands_by:
        say(stands_by=1)
    await server.start()
    say(port=int(server.endpoint.rpartition(":")[2]))
    await answer({})


# -- a leader ----------------------------------------------------------------------------------------------------------


class NoData(DataPlane):
    """A data plane without data, which says when it goes on in a view. What it leaves out does nothing."""

    def freeze(self, quiesced: Callable[[], None]) -> None:
        quiesced()

    def progress(self) -> m.Progress:
        return m.Progress(0, ())

    def awaited(self) -> dict[int, float]:
        return {}

    def reach(self, view: View, severed: frozenset[int]) -> tuple[int, ...]:
        return view.replicas

    def reaching(self) -> tuple[int, ...]:
        return ()

    def enter(self, view: View, progress: dict[int, m.Progress]) -> dict[str, int]:
        say(entered=view.epoch, at=time.monotonic())
        return {}


async def leader(setup: Setup) -> None:
    collect_seldom()
    sock, to_ranks = listen(HOST, 0), listen(HOST, 0)
    there = to_ranks.getsockname()
    here = address(sock.getsockname()[1], secrets.token_hex(16), setup.host(setup.replica, 0))
    config = LeaderConfig(
        *(NamedRank.of(setup.replica, 0, there), os.getpid(), liveness.started(), setup.ranks),
        *((HOST, setup.coordinator), setup.token, "", None, setup.timeouts, HOST, here.processes, logging.WARNING),
    )
    never: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    leading = asyncio.ensure_future(LeaderProcess(config, to_ranks).run(lambda: None, never))
    leading.add_done_callback(lambda _: os._exit(1))  # it cannot go on
    control = ControlThread(
        NoData(),
        coordinator=(HOST, setup.coordinator),
        credentials=setup.credentials,
        replica=setup.replica,
        shard=0,
        ranks=setup.ranks,
        replicas=setup.replicas,
        leader=there,
        leader_socket=None,
        sock=sock,
        address=here,
        timeouts=setup.timeouts,
    )
    say(port=there[1])
    control.start()
    threading.Thread(target=_lead, args=(control, setup), daemon=True).start()
    await answer({})


def _lead(control: ControlThread, setup: Setup) -> None:
    """The script of rank 0."""
    try:
        control.register(FOREVER)
        view = control.enter(FOREVER)
        assert view is not None
        step = view.step or 0
        while True:
            while setup.step < step:
                time.sleep(STANDING)
            if control.view is not None and setup.replica not in control.view.contributing:
                control.tell(m.CaughtUp(step))
            control.boundary(step, None)
            step += 1
    except Gone as error:
        say(gone=str(error)[:300])
        os._exit(1)


# -- light ranks -------------------------------------------------------------------------------------------------------


class LightRank:
    """One rank; see the top of this file. `column` are the ranks of its group by replica."""

    def __init__(self, ranks: Ranks, replica: int, shard: int, leader: int, agent: AgentPorts | None = None) -> None:
        """`leader` and `agent`: where the leader of the replica listens, and the agent of the host, if it has one."""
        self.ranks, self.replica, self.shard = ranks, replica, shard
        self.has_agent = agent is not None
        setup = ranks.setup
        nonce = secrets.token_hex(16)
        ranks.nonces.add(nonce)
        own = listen(HOST, 0) if setup.flaps(shard) else None
        self._listener = None if own is None else Listener(own, ranks.credentials, ranks.called, names={nonce})
        port = ranks.port if own is None else own.getsockname()[1]
        self.address = address(port, nonce, setup.host(replica, shard))
        self.node = n.RankNode(replica, shard, self.address, ranks.timeouts, setup.replicas, setup.ranks)
        self.column = ranks.columns[shard]
        self._linked: set[Life] = set()  # to which it has links
        self.alive, self.stalled = True, False
        self.step = 0  # the boundary that the script comes to next
        self.standing = True  # it waits, for a view or at a boundary
        self.link = Link(
            (HOST, leader if agent is None else agent.ranks),
            ranks.credentials,
            "rank",
            {"replica": replica, "shard": shard},
            on_open=lambda: self.do(self.node.up_opened()),
            on_message=self._from_up,
            on_down=self._up_lost,
        )
        self.cable = Cable(self.link, own, inside=self.has_agent)
        starts = agent is not None and agent.first == shard
        self._own_agent = StartedAgent(agent, self._agent_ended) if agent is not None and starts else None

    def _from_up(self, message: m.AnyMessage) -> None:
        self._count(message, TO_RANK)
        self.do(self.node.from_up(message))

    def _count(self, message: m.AnyMessage, way: int) -> None:
        self.ranks.counts.count(self.replica, kind_of(message), way, not self.has_agent)

    def _up_lost(self, error: Exception) -> None:
        """Take the end of the connection as `ControlThread` does."""
        reason, refused = str(error), isinstance(error, ConnectionRefusedError)
        if self.has_agent and refused and self.node.machine.incarnation:
            self.ranks.spawn(self._end_with_agent(reason, lambda: self.node.host_agent_ended(reason)))
        else:
            self.do(self.node.up_lost(reason, refused, not self.has_agent))

    def _agent_ended(self) -> None:
        """Take the end of the agent that this rank has started."""
        reason = f"replica {self.replica} cannot go on: its host agent has ended"
        self.ranks.spawn(self._end_with_agent(reason, lambda: self.node.failed(reason)))

    async def _end_with_agent(self, reason: str, end: Callable[[], list[n.RankAction]]) -> None:
        if self.alive:
            self.link.close()
            there, mine = (HOST, self.ranks.setup.coordinator), (self.replica, self.node.machine.incarnation)
            await leaderless.tell(there, self.ranks.credentials, *mine, f"its host agent has ended: {reason}")
            self.do(end())

    def do(self, actions: list[n.RankAction]) -> None:
        said: list[m.Message] = []  # to the leader
        for action in actions if self.alive else ():
            if isinstance(action, act.ToLeader):
                self._count(action.message, TO_LEADER)
                said.append(action.message)
                continue
            if said:
                self.cable.send(*said)
                said = []
            match action:
                case n.ToPeer(replica, message):
                    peer = self.column.get(replica)
                    if peer is not None and self.reaches(peer):
                        self.ranks.loop.call_soon(peer.hear, message)
                    elif peer is not None and not isinstance(message, m.Alive):
                        self.ranks.held.append((self, peer, message))
                case act.Freeze(view):
                    self._freeze(view)
                case act.EnterView(view, _):
                    self._enter(view)
                case n.LookAtWaits():
                    self.do(self.node.waits(*self.waits()))
                case act.Known():
                    self.do(self.node.tell(m.Ready()))
                case act.Passed():
                    self.step += 1
                    self.standing = False
                    self.ranks.freed.add(self)
                case act.Failed():
                    self.end()
        if said:
            self.cable.send(*said)

    def reaches(self, peer: LightRank) -> bool:
        """Whether no cable between the two is pulled."""
        return not self.cable.is_pulled and not peer.cable.is_pulled

    def hear(self, message: m.Message) -> None:
        if self.alive:
            self.do(self.node.from_peer(message, time.monotonic()))

    def _freeze(self, view: View) -> None:
        if self.stalled:
            return
        lives = {(x.replica, x.incarnation) for x in view.members if x.replica in self.column}
        for replica, _ in sorted(lives - self._linked - {(self.replica, self.node.machine.incarnation)}):
            self.do(self.node.peer_opened(replica))  # the links that are made for the view
        self._linked = lives
        self.do(self.node.quiesced(view.epoch, m.Progress(0, ())))

    def _enter(self, view: View) -> None:
        if not self.node.wants(view):
            return
        joins = self.node.view is None
        if joins:
            self.step, self.standing = view.step or 0, False
        self.ranks.freed.add(self)
        self.ranks.entered.setdefault(view.epoch, []).append(time.monotonic())
        fields = {"shard": self.shard, "epoch": view.epoch, "told_ms": 0.0, "resume_ms": 0.0}
        self.do(self.node.entered(view, None if joins else m.Report(RESUMED, fields)))  # as `view_entry` has it

    def waits(self) -> tuple[int, tuple[int, ...]]:
        """The op that stands still, and for whom: for a rank of its column whose script stands still."""
        if not self.ranks.stalled_at:
            return 0, ()
        view = self.node.view
        held = [
            x.replica for x in self.column.values() if x.stalled and view is not None and x.replica in view.replicas
        ]
        return 0, tuple(held) if not self.stalled else ()

    def tick(self, now: float) -> None:
        seconds = None if self.cable.cuts_link else self.link.unanswered()
        if seconds is not None:
            self.do(self.node.up_acknowledged(now - seconds))
        peers = {replica: now for replica, peer in self.column.items() if peer is not self and self.reaches(peer)}
        self.do(self.node.peers_acknowledged(peers))
        self.do(self.node.beat(now))
        self.do(self.node.tick(now))
        waits = self.waits()[1]
        view = self.node.view
        if waits and view is not None and now - self.ranks.stalled_at > self.ranks.timeouts.op_floor:
            lasted = now - self.ranks.stalled_at
            self.do(self.node.stalled(view.epoch, 0, waits, lasted))

    def go_on(self, step: int) -> None:
        """Let the script come to all boundaries up to that of `step`, as far as it can."""
        while self.alive and not self.standing and not self.stalled and self.step <= step and not self.waits()[1]:
            view = self.node.view
            self.standing = True
            behind = view is not None and self.replica not in view.contributing
            caught_up = self.node.tell(m.CaughtUp(self.step)) if behind else []
            self.do([*caught_up, *self.node.boundary(self.step)])

    def end(self, with_host: bool = False) -> None:
        """End the rank, as if its process had ended: its connection closes, and those who watch it know."""
        if not self.alive:
            return
        self.alive = False
        self.ranks.nonces.discard(self.address.nonce)
        self.link.close()
        if self._own_agent is not None:
            self._own_agent.close(with_host)
        if self._listener is not None:
            self.ranks.close(self._listener)
        if self.column.get(self.replica) is self:
            del self.column[self.replica]
        for peer in list(self.column.values()):
            self.ranks.loop.call_soon(peer.saw_end, self.replica)

    def saw_end(self, replica: int) -> None:
        view = self.node.machine.view
        if self.alive and view is not None:
            self.do(self.node.peer_lost(replica, view.epoch, "its process ended", True))


class Ranks:
    """All light ranks of one process."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.timeouts, self.credentials = setup, setup.timeouts, setup.credentials
        self.loop = asyncio.get_running_loop()
        self.columns: dict[int, dict[int, LightRank]] = {shard: {} for shard in range(*setup.columns)}
        self.entered: dict[int, list[float]] = {}  # epoch -> when ranks went on in it
        self.counts = MessageCounts()
        self.stalled_at = 0.0
        self.held: list[tuple[LightRank, LightRank, m.Message]] = []  # what one has said to another, cut off from it
        self.freed: set[LightRank] = set()  # their scripts may go on, though no step has begun
        self._tasks: set[asyncio.Task[None]] = set()
        self._coming: list[LightRank] = []  # without a connection yet
        sock = listen(HOST, 0)
        self.port = sock.getsockname()[1]
        self.nonces: set[str] = set()  # of the ranks that live, for whom the common port answers
        self._listener = Listener(sock, self.credentials, self.called, names=self.nonces)

    async def called(self, channel: Any, opening: Any) -> None:
        channel.close()

    async def tick(self) -> None:
        """Every rank once a beat, some in each slice of it."""
        slice_ = 0
        while True:
            begun = time.monotonic()
            for shard, column in self.columns.items():
                for rank in list(column.values()) if shard % SLICES == slice_ else ():
                    rank.tick(begun)
            slice_ = (slice_ + 1) % SLICES
            late = time.monotonic() - begun
            await asyncio.sleep(max(0.0, self.timeouts.beat / SLICES - late))

    async def script(self) -> None:
        """Let all scripts go on when the clock says so."""
        before = -1
        while True:
            step = self.setup.step
            everyone = (rank for column in self.columns.values() for rank in column.values())
            ready, self.freed = self.freed if step == before else set(everyone), set()
            before = step
            for rank in ready:
                rank.go_on(step)
            await asyncio.sleep(STANDING)

    def start(self, replica: int, leader: int, agents: list[tuple[int, int, int]]) -> dict[str, Any]:
        self.spawn(self._start(replica, leader, {first: AgentPorts(first, *ports) for first, *ports in agents}))
        return {"started": replica}

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := self.loop.create_task(work))
        task.add_done_callback(self._tasks.discard)

    def close(self, listener: Listener) -> None:
        self.spawn(listener.close())

    async def _start(self, replica: int, leader: int, agents: dict[int, AgentPorts]) -> None:
        """Start the ranks of a replica, a few at a time: each of their processes would do its own handshake."""
        for shard, column in self.columns.items():
            shards = self.setup.agent(shard)
            agent = agents[shards.start] if shards else None
            rank = column[replica] = LightRank(self, replica, shard, leader, agent)
            self._coming.append(rank)
            while len(self._coming) >= self.setup.at_once:
                await asyncio.sleep(0.01)
                self._coming = [rank for rank in self._coming if rank.alive and not rank.link.is_up]

    def kill(self, replica: int, least: int = 0, below: int = RANKS) -> dict[str, Any]:
        """Kill those ranks of a replica that are here, and the agents of hosts all of whose ranks are killed."""
        at = time.monotonic()
        for shard, column in self.columns.items():
            if least <= shard < below and replica in column:
                shards = self.setup.agent(shard)
                column[replica].end(with_host=bool(shards) and least <= shards.start and shards.stop <= below)
        return {"killed": replica, "at": at}

    def stall(self, replica: int, shard: int) -> dict[str, Any]:
        """The script of a rank stands still, and its column with it."""
        self.columns[shard][replica].stalled = True
        self.stalled_at = time.monotonic()
        return {"stalled": replica, "at": self.stalled_at}

    def cut(self, replica: int, pulled: bool) -> dict[str, Any]:
        """Pull the cables of those ranks of a replica that flap, or plug them in again."""
        at = time.monotonic()
        for shard, column in self.columns.items():
            if self.setup.flaps(shard) and replica in column:
                cable = column[replica].cable
                if pulled:
                    cable.pull()
                else:
                    cable.plug()
        held, self.held = self.held, []
        for by, peer, message in held:
            if by.reaches(peer):
                self.loop.call_soon(peer.hear, message)
            else:
                self.held.append((by, peer, message))
        return {"cut": replica, "at": at}

    def views(self, epoch: int) -> dict[str, Any]:
        return {"ranks": len(self.entered.get(epoch, []))}

    def times(self, epoch: int) -> dict[str, Any]:
        return {"times": self.entered.get(epoch, [])}

    def usage(self) -> dict[str, Any]:
        told = {**usage(), **self.counts.told}
        gc.collect()
        return told


async def ranks(setup: Setup) -> None:
    gc.disable()  # it would look at all ranks for what one has left; in `usage` it does so at no rank's cost
    made = Ranks(setup)
    working = asyncio.gather(made.tick(), made.script())
    say(port=made.port)
    await answer({name: getattr(made, name) for name in ("start", "kill", "stall", "cut", "views", "times", "usage")})
    working.cancel()


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    role = {"coordinator": coordinator, "leader": leader, "agents": agents, "ranks": ranks}[sys.argv[1]]
    asyncio.run(role(msgspec.json.decode(sys.argv[2], type=Setup)))


if __name__ == "__main__":
    main()
