"""A simulated process: the leader of a replica that has several ranks, as `ftcomm.control.leader_process` drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ftcomm.control import messages as m
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.view_differences import ViewsSent
from ftcomm.simulation.network import SimulatedConnection, SimulatedLink, SimulatedNetwork
from ftcomm.simulation.world import Process, World

COORDINATOR = 1  # its port
_LAST = 2.0  # s for what shard 0 has said last


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
        self._agents: dict[range, SimulatedConnection] = {}  # host agents, by their ranks
        self._agent_ports: dict[range, int] = {}
        self._carried: dict[int, SimulatedConnection] = {}  # of ranks that have said who they are by an agent
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
        shard = fields["shard"]

        def received(message: m.Message) -> None:
            if connection not in self._ranks.values():
                answer = self.node.turned_away(message)
                if answer is not None:
                    connection.send(1, answer)
                    return
                self._ranks[shard] = connection
            self._do(self.node.from_rank(shard, message, self.clock()))

        connection.receive[1] = received
        connection.told = ViewsSent(shard)
        connection.closed[1] = lambda _: self._rank_lost(shard, connection)
        return True

    def _accepts_agent(self, connection: SimulatedConnection, shards: range) -> None:
        greeted: set[int] = set()

        def received(message: m.Message) -> None:
            now = self.clock()
            if isinstance(message, m.AgentHello):
                self._agents[shards] = connection
                self._agent_ports[shards] = message.address.pid
                return
            assert isinstance(message, m.Enclosed)
            self._do(self.node.agent_heard(shards, now))
            for shard in message.shards:
                if isinstance(message.message, m.Hello) or shard not in greeted:
                    answer = self.node.turned_away(message.message)
                    if answer is not None:
                        connection.send(1, m.Enclosed((shard,), answer))
                        return
                    greeted.add(shard)
                self._carried[shard] = connection
            for shard in message.shards:
                self._do(self.node.from_rank(shard, message.message, now))

        def closed(reason: object) -> None:
            for shard in greeted:
                if self._carried.get(shard) is connection:
                    del self._carried[shard]
            if self._agents.get(shards) is connection:
                del self._agents[shards]
                self._seek_agent(shards, self.clock())

        connection.receive[1] = received
        connection.told = ViewsSent(shards.start, len(shards))
        connection.closed[1] = closed

    def _seek_agent(self, shards: range, begun: float) -> None:
        """Find out whether an agent has ended whose connection has."""

        def told(outcome: ProbeOutcome) -> None:
            if shards in self._agents:
                return
            if outcome is ProbeOutcome.ENDED:
                self._do(self.node.rank_lost(shards.start, "its host agent has ended"))
                return
            if outcome is ProbeOutcome.REFUSED:
                self._do(self.node.rank_refused(shards.start, "its host agent is lost: refused"))
            if outcome is ProbeOutcome.ANSWERED or (
                outcome is ProbeOutcome.MUTE and self.clock() - begun < self._timeouts.op
            ):
                self._do(self.node.agent_acknowledged(shards, self.clock()))
            self.after(self._timeouts.beat, self._seek_agent, shards, begun)

        if shards not in self._agents:
            self._network.probe(self, self._agent_ports[shards], told)

    def _rank_lost(self, shard: int, connection: SimulatedConnection) -> None:
        if self._ranks.get(shard) is connection:  # else it is here again, by another one
            del self._ranks[shard]
            if shard == 0 and self._end is not None:
                self._go()
            else:
                self._seek(shard, self.clock())

    def _seek(self, shard: int, begun: float) -> None:
        """Find out, as `ftcomm.control.leader_driver` does, whether a rank has ended whose connection has."""
        there = self.node.leader.addresses[shard]
        if shard in self._ranks:
            return

        def told(outcome: ProbeOutcome) -> None:
            if shard in self._ranks:
                return
            if outcome is ProbeOutcome.ENDED:
                self._do(self.node.rank_lost(shard, "its process has ended"))
                return
            if outcome is ProbeOutcome.REFUSED:
                self._do(self.node.rank_refused(shard, "refused"))
            if outcome is ProbeOutcome.ANSWERED or (
                outcome is ProbeOutcome.MUTE and self.clock() - begun < self._timeouts.op
            ):
                self._do(self.node.rank_acknowledged(shard, self.clock()))
            self.after(self._timeouts.beat, self._seek, shard, begun)

        self._network.probe(self, there.pid, told)

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
        for shards, connection in self._agents.items():
            seconds = connection.unanswered(1)
            if seconds is not None:
                self._do(self.node.agent_acknowledged(shards, now - seconds))
        self._do(self.node.tick(now))

    def _do(self, actions: Sequence[ToCoordinator | ToRank]) -> None:
        for action in actions:
            if isinstance(action, ToCoordinator):
                if self._up is not None:
                    self._up.send(action.message)
            elif action.shard in self._ranks:
                self._ranks[action.shard].send(1, action.message)
            elif action.shard in self._carried:
                told = m.Enclosed((action.shard,), action.message)  # type: ignore[arg-type]
                self._carried[action.shard].send(1, told)
