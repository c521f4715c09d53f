"""Drives the `LeaderNode` of a replica: its link to the coordinator, and the connections of the ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ftcomm.control import directory, handshake
from ftcomm.control import messages as m
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.links import Told, serve_messages
from ftcomm.control.probe import ProbeConnection
from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.upward_link import UpwardLink
from ftcomm.control.view_differences import EncodedOnce
from ftcomm.control.witness import PURPOSE


class LeaderDriver:
    """Drives a leader in an event loop.

    do(event, *args): tells the node of an event and carries out its actions.
    spawn: runs a task whose error ends this process.
    trains: says whether the replica is in a view.
    moved: is told of each coordinator that has taken the job over.
    up: the link to the coordinator.
    ranks: the connections of the ranks that have said who they are, by shard.
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
        self.ranks: dict[int, Told] = {}
        self._left = asyncio.Event()  # the connection of a rank has ended

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

    def look(self) -> None:
        """Look which kernels answer, before anything more is sent to them."""
        now = time.monotonic()
        asked = list(self.ranks) if self.node.leader.asks_all else [0]
        for shard in asked:
            seconds = self.ranks[shard].unanswered() if shard in self.ranks else None
            if seconds is not None:
                self._do(self.node.rank_acknowledged, shard, now - seconds)

    async def closed(self, shard: int) -> None:
        """Wait until there is no connection of a rank."""
        while shard in self.ranks:
            self._left.clear()
            await self._left.wait()

    async def flushed(self) -> None:
        """Wait until the kernel has all that was said."""
        ways = [way.flushed() for way in self.ranks.values()]
        up = [] if self.up.link is None else [self.up.link.flushed()]
        await asyncio.gather(*ways, *up)

    def close(self) -> None:
        self.up.close()
        for way in self.ranks.values():
            way.close()

    async def serve(self, channel: Channel, opening: handshake.Opening) -> bool:
        """Serve a connection for its purpose, and own the channel; or return that it is not for a leader."""
        if opening.purpose == "rank":
            ours, most = self.node.leader.replica, self.node.leader.ranks - 1
            handshake.number(opening.fields, "replica", least=ours, most=ours)
            await self._serve_rank(channel, handshake.number(opening.fields, "shard", most=most))
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

    async def _serve_rank(self, channel: Channel, shard: int) -> None:
        told: list[Told] = []
        greeted: list[Told] = []  # the same, once the rank has said who it is

        def received(message: m.AnyMessage) -> None:
            if not greeted:
                if (answer := self.node.turned_away(message)) is not None:
                    told[0].send(answer)
                    return
                greeted.append(told[0])
                self.ranks[shard] = told[0]
            if isinstance(message, m.CoordinatorAt):
                self.called((message.host, message.port))
            else:
                self._do(self.node.from_rank, shard, message, time.monotonic())

        why = await serve_messages(channel, received, lambda writer: told.append(Told(writer, self._once, shard)))
        if greeted and self.ranks.get(shard) is greeted[0]:  # otherwise the rank has connected again
            del self.ranks[shard]
            self._left.set()
            self._spawn(self._seek(shard, why))

    async def _seek(self, shard: int, why: str) -> None:
        """Find out why the connection of a rank has ended. If our own kernel says so, the process has ended; if another
        host says so, that is reported. Otherwise the rank connects again as soon as it runs. If no kernel answers, the
        silence of the rank will tell."""
        there = self.node.leader.addresses[shard]
        begun = time.monotonic()
        connection: ProbeConnection | None = None
        try:
            while shard not in self.ranks and self.up.link is not None:
                connection = connection or ProbeConnection(there, self._credentials, "asked", {})
                outcome = await connection.outcome(self._timeouts.presence)
                now = time.monotonic()
                if shard in self.ranks:
                    return
                if outcome is ProbeOutcome.ENDED:
                    self._do(self.node.rank_lost, shard, f"its process {there.pid} has ended")
                    return
                if outcome is ProbeOutcome.REFUSED:
                    self._do(self.node.rank_refused, shard, why)
                elif outcome is ProbeOutcome.ANSWERED or (
                    outcome is ProbeOutcome.MUTE and now - begun < self._timeouts.op
                ):
                    self._do(self.node.rank_acknowledged, shard, now)
                if outcome is not ProbeOutcome.MUTE:
                    connection.close()
                    connection = None
                await asyncio.sleep(self._timeouts.beat)
        finally:
            if connection is not None:
                connection.close()
