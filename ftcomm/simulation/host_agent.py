"""A simulated process: the agent of a host, as `ftcomm.control.host_agent_process` drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ftcomm.control.actions import ToLeader
from ftcomm.control.host_agent import EndConnections, HostAgent, HostAgentAction
from ftcomm.control.rank_connections import ProbeListener, RankListener
from ftcomm.control.timeouts import Timeouts
from ftcomm.simulation.mirror import NoConnection
from ftcomm.simulation.network import SimulatedConnection, SimulatedLink, SimulatedNetwork
from ftcomm.simulation.rank_connections import serve
from ftcomm.simulation.rank_probe import probe_until_known
from ftcomm.simulation.world import Process, World

_HELD = 0.02  # s, as in the product
_LAST = 2.0  # s for what its first rank has said last


class SimulatedHostAgent(Process):
    """The agent of some ranks of one life of a replica, on their host. `on_end` is called when it ends by itself."""

    def __init__(
        self,
        world: World,
        network: SimulatedNetwork,
        node: HostAgent,
        name: str,
        host: int,
        leader_port: int,
        timeouts: Timeouts,
        on_end: Callable[[SimulatedHostAgent], object],
    ) -> None:
        super().__init__(world, name, host)
        self.node = node
        self._network, self._leader_port, self._timeouts, self._on_end = network, leader_port, timeouts, on_end
        self._ranks: dict[int, SimulatedConnection] = {}
        self._up: SimulatedLink | None = None
        self._flushes = False  # soon
        self._end: bool | None = None  # its first rank has ended, well or not
        self._leaves = False  # and all is said

    def start(self) -> None:
        self.say("starts on host %s", self.host)
        fields = {"shards": self.node.shards}
        self._up = SimulatedLink(
            self._network,
            self,
            self._leader_port,
            lambda target, connection: target.accepts(connection, "agent", fields),  # type: ignore[attr-defined]
            on_open=self._opened,
            on_message=lambda message: self._do(self.node.from_leader(message, self.clock())),
            on_down=self._lost,
        )
        self._tick()

    def _opened(self) -> None:
        self._do(self.node.opened(self.clock()))
        self._look()

    def _lost(self, reason: NoConnection, ended: bool) -> None:
        refused = not ended and reason is NoConnection.REFUSED
        here = self._network.listeners[self._leader_port].host == self.host
        self._do(self.node.lost(f"the way up is lost: {reason}", refused, here))

    def break_up_link(self) -> None:
        if self._up is not None:
            self._up.break_()

    def accepts(self, connection: SimulatedConnection, purpose: str, fields: dict[str, Any]) -> bool:
        listener = RankListener(
            turned_away=self.node.turned_away,
            received=lambda shard, message: self._do(self.node.from_rank(shard, message)),
            closed=self._rank_closed,
        )
        serve(self._ranks, fields["shard"], connection, listener)
        return purpose == "rank"

    def _rank_closed(self, shard: int, reason: str) -> None:
        self._do(self.node.rank_closed(shard))
        self._look()
        if shard == self.node.shards.start and self._end is not None:
            self._go()
            return
        there = self.node.addresses[shard]
        listener = ProbeListener(
            is_back=lambda: shard in self._ranks,
            ended=lambda: self._do(self.node.rank_lost(shard, "its process has ended")),
            refused=lambda: self._do(self.node.rank_refused(shard, reason)),
            acknowledged=lambda at: None,
        )
        probe_until_known(self, self._network, there.pid, self._timeouts, listener)

    def first_rank_ended(self, well: bool) -> None:
        """Take what that rank has said last; then end as well."""
        self._end = well
        if self.node.shards.start in self._ranks:
            self.after(_LAST, self._go)
        else:
            self._go()

    def _go(self) -> None:
        if self._end is False:
            self._do(self.node.rank_lost(self.node.shards.start, "its process has ended"))
        self._do(self.node.flush())
        self._leaves = True
        self.after(_LAST, self._leave)
        self._look()

    def _look(self) -> None:
        """End as soon as the leader has heard all, and no rank is left that may hear what it answers."""
        if self._leaves and not self._ranks and (self._end or (self._up is not None and self._up.is_up)):
            self._leave()

    def _leave(self) -> None:
        self.say("ends with its first rank")
        self._on_end(self)

    def _tick(self) -> None:
        self.after(self._timeouts.beat, self._tick)
        now = self.clock()
        seconds = None if self._up is None else self._up.unanswered()
        if seconds is not None:
            self._do(self.node.acknowledged(now - seconds))
        self._do(self.node.tick(now))

    def _do(self, actions: Sequence[HostAgentAction]) -> None:
        for action in actions:
            if isinstance(action, ToLeader):
                if self._up is not None:
                    self._up.send(action.message)
            elif isinstance(action, EndConnections):
                for shard, connection in list(self._ranks.items()):
                    connection.close(1)
                    del self._ranks[shard]
                    self._rank_closed(shard, "the host agent has ended its connection")
            else:
                for shard in action.shards:
                    if shard in self._ranks:
                        self._ranks[shard].send(1, action.message)
        if self.node.holds and not self._flushes:
            self._flushes = True
            self.after(_HELD, self._flush)

    def _flush(self) -> None:
        self._flushes = False
        self._do(self.node.flush())
