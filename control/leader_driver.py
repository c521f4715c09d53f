"""Drives the `LeaderNode` of a replica: its link to the coordinator, and the connections of the ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ftcomm.control import directory, handshake
from ftcomm.control import messages as m
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_agents import LeaderAgents
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.links import HostAgentWriter, serve_messages
from ftcomm.control.liveness import why_lost
from ftcomm.control.rank_connections import ProbeListener, RankConnections, RankListener, probe_until_known
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.upward_link import UpwardLink
from ftcomm.control.view_differences import EncodedOnce
from ftcomm.control.witness import PURPOSE

AGENT = "agent"  # the purpose of the connection of a host agent


class LeaderDriver:
    """Drives a leader in an event loop.

    do(event, *args): tells the node of an event and carries out its actions.
    spawn: runs a task whose error ends this process.
    trains: says whether the replica is in a view.
    moved: is told of each coordinator that has taken the job over.
    up: the link to the coordinator.
    ranks: the connections of the ranks that have said who they are, by shard.
    agents: host agents and their connections.
    closed: waits until there is no connection of a rank.
    """

    def __init__(
        self,
        node: LeaderNode,
        me: NamedRank,
        credentials: handshake.Credentials,
        coordinator: tuple[str, int],
        host: str,
        timeouts: Timeouts,
        *,
        do: Callable[..., None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        trains: Callable[[], bool],
        moved: Callable[[tuple[str, int]], None] = lambda there: None,
    ) -> None:
        self.node, self._credentials, self._timeouts = node, credentials, timeouts
        self._do, self._spawn, self._moved = do, spawn, moved
        self.up = UpwardLink(
            *(me, "coordinator", coordinator, credentials, "leader", me.fields, host),
            on_open=lambda: do(node.opened),
            on_lost=self._lost,
            trains=trains,
        )
        self._once = EncodedOnce()
        self._connections = RankConnections(
            RankListener(node.turned_away, self._from_rank, self._rank_closed), self._once
        )
        self.ranks = self._connections.writers
        self.closed = self._connections.closed
        self.agents: LeaderAgents[HostAgentWriter] = LeaderAgents(node, do, self.called)

    def open(self) -> None:
        """Connect to the coordinator."""
        self.up.open(self._received)

    def _received(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.Queued):
            self.up.queued(message.reason, message.stage)
        self._do(self.node.from_coordinator, message)

    def _lost(self, reason: str, refused: bool, here: bool) -> None:
        if self.node.leader.ranks == 1:  # that rank reads the news in `up`
            self._do(self.node.lost)
            return
        self._do(self.node.lost, m.Queued(*self.up.news))
        if isinstance(self.up.refused, handshake.Refused):  # any other refusal may be forged, so the link tries again
            self._do(self.node.refused, str(self.up.refused))

    def called(self, there: tuple[str, int]) -> None:
        """Take a call from a coordinator that has replaced another one, and tells where it can be reached."""
        self._moved(there)
        if self.up.link is not None:
            self.up.link.redirect(there)

    def carry_out(self, action: ToCoordinator | ToRank) -> None:
        if isinstance(action, ToCoordinator):
            if self.up.link is not None:
                self.up.link.send(action.message)
        elif (there := self.ranks.get(action.shard)) is not None:
            there.send(action.message)

    def carry_out_all(self, actions: Sequence[ToCoordinator | ToRank]) -> None:
        """Carry actions out in order; an agent is told once what several of its ranks are told one after the other."""
        self.agents.carry_out(actions, self.carry_out)

    def look(self) -> None:
        """Look which kernels answer, before anything more is sent to them."""
        now = time.monotonic()
        all_ = self.node.leader.asks_all
        asked = list(self.ranks) if all_ else [0]
        for shard in asked:
            seconds = self.ranks[shard].unanswered() if shard in self.ranks else None
            if seconds is not None:
                self._do(self.node.rank_acknowledged, shard, now - seconds)
        for shards, agent in list(self.agents.connections.items()) if all_ else ():
            if (seconds := agent.unanswered()) is not None:
                self._do(self.node.agent_acknowledged, shards, now - seconds)

    async def flushed(self) -> None:
        """Wait until the kernel has all that was said."""
        agents = [agent.flushed() for agent in self.agents.connections.values()]
        up = [] if self.up.link is None else [self.up.link.flushed()]
        await asyncio.gather(*self._connections.flushed(), *agents, *up)

    def close(self) -> None:
        self.up.close()
        self._connections.close()
        for agent in list(self.agents.connections.values()):
            agent.close()

    async def serve(self, channel: Channel, opening: handshake.Opening) -> bool:
        """Serve a connection for its purpose, and own the channel; or return that it is not for a leader."""
        if opening.purpose == "rank":
            ours, most = self.node.leader.replica, self.node.leader.ranks - 1
            handshake.number(opening.fields, "replica", least=ours, most=ours)
            await self._connections.serve(channel, handshake.number(opening.fields, "shard", most=most))
        elif opening.purpose == AGENT:
            ours, ranks = self.node.leader.replica, self.node.leader.ranks
            handshake.number(opening.fields, "replica", least=ours, most=ours)
            first = handshake.number(opening.fields, "first", least=1, most=ranks - 1)
            count = handshake.number(opening.fields, "count", least=1, most=ranks - first)
            await self._serve_agent(channel, range(first, first + count))
        elif opening.purpose == PURPOSE:
            self._witnessed(channel, opening.fields)
        elif opening.purpose == directory.PURPOSE:
            await directory.serve(channel, opening.fields, self.node.views)
        else:
            return False
        return True

    def _witnessed(self, channel: Channel, fields: handshake.Fields) -> None:
        """Believe the kernel of a rank's host that the rank's process has ended."""
        channel.close()
        shard = handshake.number(fields, "shard", least=1)
        there = self.node.leader.addresses.get(shard)
        if there is not None and there.nonce == handshake.text(fields, "nonce"):
            self._do(self.node.rank_lost, shard, f"its process {there.pid} has ended, says its host")

    def _from_rank(self, shard: int, message: m.AnyMessage) -> None:
        if isinstance(message, m.CoordinatorAt):
            self.called((message.host, message.port))
        else:
            self._do(self.node.from_rank, shard, message, time.monotonic())

    def _rank_closed(self, shard: int, why: str) -> None:
        there = self.node.leader.addresses[shard]
        listener = ProbeListener(
            is_back=lambda: shard in self.ranks or shard in self.agents.carried or self.up.link is None,
            ended=lambda: self._do(self.node.rank_lost, shard, why_lost(there)),
            refused=lambda: self._do(self.node.rank_refused, shard, why),
            acknowledged=lambda at: self._do(self.node.rank_acknowledged, shard, at),
        )
        self._spawn(probe_until_known(there, self._credentials, self._timeouts, listener))

    # -- host agents ---------------------------------------------------------------------------------------------

    async def _serve_agent(self, channel: Channel, shards: range) -> None:
        made: list[HostAgentWriter] = []

        def received(message: m.AnyMessage) -> None:
            self.agents.received(made[0], message, time.monotonic())

        why = await serve_messages(
            channel, received, lambda writer: made.append(HostAgentWriter(writer, self._once, shards))
        )
        if made and (there := self.agents.closed(made[0])) is not None:
            listener = self.agents.probe_listener(shards, there, why, is_over=lambda: self.up.link is None)
            self._spawn(probe_until_known(there, self._credentials, self._timeouts, listener))
