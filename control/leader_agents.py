"""The host agents of a replica, as its leader sees them: which connection speaks for which ranks, and what counts.
It knows no socket: `ftcomm.control.leader_driver` has real connections, `ftcomm.simulation.leader` simulated ones.

    a new connection     takes the place of the one before, of which nothing counts any more, whenever it comes
    an agent of another  is told of this life, which its ranks hear, and counts for nothing
      life of the replica
    a rank               speaks through an agent once it has said hello there, as over a connection of its own
    the agent itself     says which processes have ended. That needs no hello, as such a process says none any more
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from ftcomm.control import messages as m
from ftcomm.control.dropped import drop
from ftcomm.control.leader import ToRank
from ftcomm.control.leader_node import LeaderNode, LeaderNodeAction
from ftcomm.control.liveness import agent_ended
from ftcomm.control.rank_connections import ProbeListener
from ftcomm.control.views import Address


class AgentConnection(Protocol):
    """The leader's end of the connection to the agent of some ranks."""

    @property
    def shards(self) -> range: ...

    def send(self, shards: Sequence[int], message: m.Message) -> None: ...

    def close(self) -> object: ...


AgentConnectionT = TypeVar("AgentConnectionT", bound=AgentConnection)


class LeaderAgents(Generic[AgentConnectionT]):
    """Keeps the connections of the host agents of one replica. Not thread-safe.

    connections: those that count, by the ranks of the agent.
    carried: the connection of each rank that has said who it is by an agent.
    """

    def __init__(
        self,
        node: LeaderNode,
        do: Callable[..., None],
        called: Callable[[tuple[str, int]], None] = lambda there: None,
    ) -> None:
        """`do(event, *args)` tells the node of an event and carries out its actions; `called` is told of a coordinator
        that has taken the job over."""
        self.connections: dict[range, AgentConnectionT] = {}
        self.carried: dict[int, AgentConnectionT] = {}
        self._node, self._do, self._called = node, do, called
        self._hellos: dict[range, m.AgentHello] = {}  # the newest of each agent
        self._greeted: dict[range, set[int]] = {}  # ranks that have said who they are, by its present connection

    def received(self, connection: AgentConnectionT, message: m.AnyMessage, now: float) -> None:
        """Take a message that has come over a connection."""
        if isinstance(message, m.AgentHello):
            self._hello(connection, message)
        if self.connections.get(connection.shards) is not connection:
            return
        self._do(self._node.agent_heard, connection.shards, now)
        if isinstance(message, m.RankLost):
            self._rank_lost(connection, message)
        elif isinstance(message, m.Enclosed):
            self._said(connection, message, now)

    def _hello(self, connection: AgentConnectionT, hello: m.AgentHello) -> None:
        ours, shards = self._node.leader.welcome, connection.shards
        if hello.life not in ("", ours.incarnation):
            connection.send(shards, ours)
            return
        known, before = self._hellos.get(shards), self.connections.get(shards)
        if known is not None and known.address == hello.address and hello.opening < known.opening:
            return  # it has come late, by a connection that the agent has given up
        if known is not None and before is not None and known.address != hello.address and not hello.life:
            connection.close()  # it may be of an earlier life, and tries again, maybe when that one is gone
            return
        self._hellos[shards], self._greeted[shards] = hello, set()
        self.connections[shards] = connection
        if before is not None and before is not connection:
            self._forget(before)
            before.close()

    def _said(self, connection: AgentConnectionT, said: m.Enclosed, now: float) -> None:
        """Take what some ranks have said, of which each first says who it is."""
        message = said.message
        those = [shard for shard in said.shards if self._may_speak(connection, shard, message)]
        if not isinstance(message, m.CoordinatorAt):
            self._do(self._from_ranks, those, message, now)
        elif those:
            self._called((message.host, message.port))

    def _may_speak(self, connection: AgentConnectionT, shard: int, message: m.Message) -> bool:
        if shard not in connection.shards:
            drop("message", f"a host agent of shards {connection.shards} speaks for shard {shard}")
            return False
        greeted = self._greeted[connection.shards]
        if isinstance(message, m.Hello) or shard not in greeted:
            if (answer := self._node.turned_away(message)) is not None:
                connection.send((shard,), answer)
                return False
            greeted.add(shard)
        self.carried[shard] = connection
        return True

    def _from_ranks(self, shards: Sequence[int], message: m.Message, now: float) -> list[LeaderNodeAction]:
        return [action for shard in shards for action in self._node.from_rank(shard, message, now)]

    def _rank_lost(self, connection: AgentConnectionT, lost: m.RankLost) -> None:
        if lost.shard in connection.shards and self._node.leader.addresses.get(lost.shard) == lost.address:
            self._do(self._node.rank_lost if lost.proof else self._node.rank_refused, lost.shard, lost.reason)

    def closed(self, connection: AgentConnectionT) -> Address | None:
        """Note the end of a connection. Returns where the agent is, which is to be probed; None if it has connected
        again, or did not count."""
        self._forget(connection)
        if self.connections.get(connection.shards) is not connection:
            return None
        del self.connections[connection.shards]
        return self._hellos[connection.shards].address

    def _forget(self, connection: AgentConnectionT) -> None:
        for shard in connection.shards:
            if self.carried.get(shard) is connection:
                del self.carried[shard]

    def probe_listener(self, shards: range, there: Address, why: str, is_over: Callable[[], bool]) -> ProbeListener:
        """Returns who hears what becomes of an agent whose connection has ended. The replica ends with it; as long as
        it lives, so do its ranks, as far as this host knows. With `is_over` nobody wants to know any more."""

        def acknowledged(at: float) -> None:
            self._do(self._node.agent_acknowledged, shards, at)

        return ProbeListener(
            is_back=lambda: shards in self.connections or is_over(),
            ended=lambda: self._do(self._node.rank_lost, shards.start, agent_ended(there.pid)),
            refused=lambda: self._do(self._node.rank_refused, shards.start, f"its host agent is lost: {why}"),
            acknowledged=acknowledged,
        )

    def carry_out(self, actions: Sequence[LeaderNodeAction], one: Callable[[LeaderNodeAction], None]) -> None:
        """Carry actions out in order, by `one` where no agent stands between. An agent is told once what several of its
        ranks are told one after the other."""
        if not self.carried:
            for action in actions:
                one(action)
            return
        for _, run in itertools.groupby(actions, key=lambda action: id(action.message)):
            shards: dict[range, list[int]] = {}
            for action in run:
                message = action.message
                if isinstance(action, ToRank) and (told := self.carried.get(action.shard)) is not None:
                    shards.setdefault(told.shards, []).append(action.shard)
                else:
                    one(action)
            for agent, those in shards.items():
                self.connections[agent].send(those, message)
