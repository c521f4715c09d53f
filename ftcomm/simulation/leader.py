"""A simulated process: the leader of a replica that has several ranks, as `ftcomm.control.leader_process` drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ftcomm.control import messages as m
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_agents import LeaderAgents
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.rank_connections import ProbeListener, RankListener
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.view_differences import ViewsSent
from ftcomm.simulation.network import SimulatedConnection, SimulatedLink, SimulatedNetwork
from ftcomm.simulation.rank_connections import serve
from ftcomm.simulation.rank_probe import probe_until_known
from ftcomm.simulation.world import Process, World

COORDINATOR = 1  # its port
_LAST = 2.0  # s for what shard 0 has said last


class SimulatedHostAgentWriter:
    """The sending side of a connection to a host agent, as `ftcomm.control.links.HostAgentWriter`."""

    def __init__(self, connection: SimulatedConnection, shards: range) -> None:
        self.connection, self.shards = connection, shards
        self._told = ViewsSent(shards.start, len(shards))

    def send(self, shards: Sequence[int], message: m.Message) -> None:
        self.connection.send(1, m.Enclosed(tuple(shards), self._told.shorten(message)))  # type: ignore[arg-type]

    def close(self) -> None:
        self.connection.close(1)


class SimulatedLeader(Process):
    """The leader of one life of a replica, on the host of its shard 0. `on_end` is called when it ends by itself."""

    def __init__(
        self,
        world: World,
        network: SimulatedNetwork,
        node: LeaderNode,
        host: int,
        timeouts: Timeouts,
        on_end: Callable[[SimulatedLeader], object],
    ) -> None:
        super().__init__(world, f"{node.leader.incarnation}/leader", host)
        self.node = node
        self._network, self._timeouts, self._on_end = network, timeouts, on_end
        self._ranks: dict[int, SimulatedConnection] = {}
        self.agents: LeaderAgents[SimulatedHostAgentWriter] = LeaderAgents(
            node, lambda event, *args: self._do(event(*args))
        )
        self._up: SimulatedLink | None = None
        self._end: bool | None = None  # shard 0 has ended, well or not

    def start(self) -> None:
        self.say("starts on host %s", self.host)
        self._up = SimulatedLink(
            self._network,
            self,
            COORDINATOR,
            lambda target, connection: target.accepts(connection, "leader", {}),  # type: ignore[attr-defined]
            on_open=lambda: self._do(self.node.opened()),
            on_message=lambda message: self._do(self.node.from_coordinator(message)),
            on_down=lambda reason, ended: self._do(self.node.lost(m.Queued(f"no coordinator: {reason}"))),
        )
        self._tick()

    def break_up_link(self) -> None:
        if self._up is not None:
            self._up.break_()

    def accepts(self, connection: SimulatedConnection, purpose: str, fields: dict[str, Any]) -> bool:
        if purpose == "agent":
            self._accepts_agent(connection, fields["shards"])
            return True
        if purpose != "rank":
            return False
        listener = RankListener(
            turned_away=self.node.turned_away,
            received=lambda shard, message: self._do(self.node.from_rank(shard, message, self.clock())),
            closed=self._rank_lost,
        )
        serve(self._ranks, fields["shard"], connection, listener)
        return True

    def _accepts_agent(self, connection: SimulatedConnection, shards: range) -> None:
        writer = SimulatedHostAgentWriter(connection, shards)

        def closed(reason: object) -> None:
            there = self.agents.closed(writer)
            if there is not None:
                listener = self.agents.probe_listener(shards, there, str(reason), is_over=lambda: not self.alive)
                probe_until_known(self, self._network, there.pid, self._timeouts, listener)

        connection.receive[1] = lambda message: self.agents.received(writer, message, self.clock())
        connection.closed[1] = closed

    def _rank_lost(self, shard: int, reason: str) -> None:
        if shard == 0 and self._end is not None:
            self._go()
            return
        there = self.node.leader.addresses[shard]
        listener = ProbeListener(
            is_back=lambda: shard in self._ranks,
            ended=lambda: self._do(self.node.rank_lost(shard, "its process has ended")),
            refused=lambda: self._do(self.node.rank_refused(shard, reason)),
            acknowledged=lambda at: self._do(self.node.rank_acknowledged(shard, at)),
        )
        probe_until_known(self, self._network, there.pid, self._timeouts, listener)

    def rank_0_ended(self, well: bool) -> None:
        """Take what shard 0 has said last; then end as well, and tell the others unless it has ended as it should."""
        self._end = well
        if 0 in self._ranks:
            self.after(_LAST, self._go)
        else:
            self._go()

    def _go(self) -> None:
        if self._end is False:
            self._do(self.node.rank_lost(0, "its process has ended"))
        self.say("ends with shard 0")
        self._on_end(self)

    def _tick(self) -> None:
        self.after(self._timeouts.beat, self._tick)
        now = self.clock()
        for shard, connection in self._ranks.items():
            seconds = connection.unanswered(1)
            if seconds is not None:
                self._do(self.node.rank_acknowledged(shard, now - seconds))
        for shards, agent in self.agents.connections.items():
            seconds = agent.connection.unanswered(1)
            if seconds is not None:
                self._do(self.node.agent_acknowledged(shards, now - seconds))
        self._do(self.node.tick(now))

    def _do(self, actions: Sequence[ToCoordinator | ToRank]) -> None:
        self.agents.carry_out(actions, self._carry_out)

    def _carry_out(self, action: ToCoordinator | ToRank) -> None:
        if isinstance(action, ToCoordinator):
            if self._up is not None:
                self._up.send(action.message)
        elif action.shard in self._ranks:
            self._ranks[action.shard].send(1, action.message)
