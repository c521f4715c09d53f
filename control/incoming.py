"""The connections that come to a rank: of other members, of the ranks of its replica, of a coordinator, and of what
the engine serves."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ftcomm.control import directory, handshake, wire
from ftcomm.control import messages as m
from ftcomm.control.dropped import drop
from ftcomm.control.failed_dials import start
from ftcomm.control.knock import Knock
from ftcomm.control.links import Link, Told, hand_over, serve_messages
from ftcomm.control.liveness import unanswered
from ftcomm.control.member import Phase
from ftcomm.control.node import Node
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.view_differences import EncodedOnce
from ftcomm.control.witness import PURPOSE

log = logging.getLogger("ftcomm.control")

Handler = Callable[[Channel, handshake.Fields], None]


class IncomingConnections:
    """Serves them in the event loop of the control thread. `do(event, *args)` tells the node of an event and carries
    out its actions, `spawn` runs a task whose error ends this rank, `up` returns the link to the coordinator or the
    leader, as long as this rank takes part."""

    def __init__(
        self,
        node: Node,
        credentials: handshake.Credentials,
        timeouts: Timeouts,
        do: Callable[..., None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        up: Callable[[], Link | None],
    ) -> None:
        self._node, self._credentials, self._timeouts = node, credentials, timeouts
        self._do, self._spawn, self._up = do, spawn, up
        self.handlers: dict[str, Handler] = {}  # by purpose
        self._once = EncodedOnce()
        self.ranks: dict[int, Told] = {}  # in rank 0, by shard: the other ranks of the replica

    async def serve(self, channel: Channel, opening: handshake.Opening) -> None:
        """Serve a connection for its purpose; owns the channel."""
        if opening.purpose == "member":
            await self._serve_member(channel, handshake.number(opening.fields, "replica"))
        elif opening.purpose == "rank" and self._node.leader is not None:
            ours, most = self._node.leader.replica, self._node.leader.ranks - 1
            handshake.number(opening.fields, "replica", least=ours, most=ours)
            await self._serve_rank(channel, handshake.number(opening.fields, "shard", least=1, most=most))
        elif opening.purpose == "coordinator" and self._node.leader is not None:
            self._called(channel, opening.fields)
        elif opening.purpose == PURPOSE and self._node.leader is not None:
            self._witnessed(channel, opening.fields)
        elif opening.purpose == directory.PURPOSE and self._node.leader is not None:
            await directory.serve(channel, opening.fields, (self._node.machine.view, self._node.machine.preview))
        elif opening.purpose == "asked":  # a question whether this process lives
            channel.close()
        elif opening.purpose in self.handlers:
            await self._hand_over(channel, opening)
        else:
            drop("purpose", f"a connection for {opening.purpose!r}, which nothing here serves")
            channel.close()

    async def _hand_over(self, channel: Channel, opening: handshake.Opening) -> None:
        """Serve a connection in a thread of its own. If none can be had now, who has dialled waits, until it hangs up
        or for as long as an op may take: that costs its recovery, and this rank nothing."""
        channel.setblocking(True)
        args = self.handlers[opening.purpose], channel, opening.fields
        thread = threading.Thread(target=hand_over, args=args, name=f"ftcomm-{opening.purpose}", daemon=True)
        deadline = time.monotonic() + self._timeouts.op
        told = False
        while True:
            lacks = start(thread)
            if not lacks:
                return
            if not told:
                told = True
                log.warning(
                    "replica %d rank %d: a connection for %r waits to be served, for %g s at most: %s",
                    *(self._node.machine.replica, self._node.shard, opening.purpose, self._timeouts.op, lacks),
                )
            await asyncio.sleep(self._timeouts.beat)
            failed = self._node.machine.phase is Phase.FAILED
            if failed or time.monotonic() > deadline or unanswered(channel) is None:
                channel.close()
                return

    def _called(self, channel: Channel, fields: handshake.Fields) -> None:
        """Take a call from a coordinator that has replaced another one, and tells where it can be reached."""
        host, port = fields.get("host", channel.getpeername()[0]), handshake.number(fields, "port", least=1, most=65535)
        channel.close()
        if (up := self._up()) is not None:
            up.redirect((str(host), port))

    def _witnessed(self, channel: Channel, fields: handshake.Fields) -> None:
        """Believe the kernel of a rank's host that the rank's process has ended."""
        channel.close()
        shard = handshake.number(fields, "shard", least=1)
        there = self._node.leader.addresses.get(shard) if self._node.leader is not None else None
        if there is not None and there.nonce == handshake.text(fields, "nonce"):
            self._do(self._node.rank_lost, shard, f"its process {there.pid} has ended, says its host")

    async def _serve_member(self, channel: Channel, replica: int) -> None:
        back: list[wire.Writer] = []

        def received(message: m.AnyMessage) -> None:
            if getattr(message, "replica", replica) != replica:
                drop("message", f"replica {replica} speaks for another: {type(message).__name__}")
                return
            self._do(self._node.from_peer, message, time.monotonic())
            later = self._node.passed_by(message)
            if later is not None:
                back[0].write(m.encode(later))

        await serve_messages(channel, received, back.append)

    async def _serve_rank(self, channel: Channel, shard: int) -> None:
        current: list[Told] = []

        def ready(writer: wire.Writer) -> None:
            current.append(Told(writer, self._once, shard))
            self.ranks[shard] = current[0]

        def received(message: m.AnyMessage) -> None:
            self._do(self._node.from_rank, shard, message, time.monotonic())

        why = await serve_messages(channel, received, ready)
        if current and self.ranks.get(shard) is current[0]:  # otherwise the rank has connected again
            del self.ranks[shard]
            self._spawn(self._seek(shard, why))

    async def _seek(self, shard: int, why: str) -> None:
        """Find out why the connection of a rank has ended. If our own kernel says so, the process has ended; if another
        host says so, that is reported. Otherwise the rank connects again as soon as it runs. If no kernel answers, the
        silence of the rank will tell."""
        there = self._node.leader.addresses.get(shard) if self._node.leader is not None else None
        if there is None:
            self._do(self._node.rank_lost, shard, why)
            return
        begun = time.monotonic()
        knock: Knock | None = None
        try:
            while shard not in self.ranks and self._up() is not None:
                knock = knock or Knock(there, self._credentials, "asked", {})
                outcome = await knock.outcome(self._timeouts.presence)
                now = time.monotonic()
                if shard in self.ranks:
                    return
                if outcome == "ended":
                    self._do(self._node.rank_lost, shard, why)
                    return
                if outcome == "refused":
                    self._do(self._node.rank_refused, shard, why)
                elif outcome == "answered" or (outcome == "mute" and now - begun < self._timeouts.op):
                    self._do(self._node.rank_acknowledged, shard, now)
                if outcome != "mute":
                    knock.close()
                    knock = None
                await asyncio.sleep(self._timeouts.beat)
        finally:
            if knock is not None:
                knock.close()
