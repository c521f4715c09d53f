"""The connections of ranks to their leader, or to the agent of their host, and what becomes of a rank whose connection
has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from ftcomm.control import handshake
from ftcomm.control import messages as m
from ftcomm.control.links import ViewWriter, serve_messages
from ftcomm.control.probe import ProbeConnection
from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.view_differences import EncodedOnce
from ftcomm.control.views import Address


class RankListener(NamedTuple):
    """Hears of ranks, each named by its shard."""

    turned_away: Callable[[m.AnyMessage], m.Message | None]  # the answer to a first message that is not a rank's
    received: Callable[[int, m.AnyMessage], None]
    closed: Callable[[int, str], None]  # its connection has ended, and why


class RankConnections:
    """The connections of the ranks that have said who they are, by shard in `writers`. For one event loop."""

    def __init__(self, listener: RankListener, once: EncodedOnce) -> None:
        self.writers: dict[int, ViewWriter] = {}
        self._listener, self._once = listener, once
        self._left = asyncio.Event()  # a connection has ended

    async def serve(self, channel: Channel, shard: int) -> None:
        """Serve the connection of a rank, and own the channel."""
        made: list[ViewWriter] = []
        greeted: list[ViewWriter] = []  # the same, once the rank has said who it is
        hear = self._listener.received

        def received(message: m.AnyMessage) -> None:
            if not greeted:
                if (answer := self._listener.turned_away(message)) is not None:
                    made[0].send(answer)
                    return
                greeted.append(made[0])
                self.writers[shard] = made[0]
            hear(shard, message)

        why = await serve_messages(channel, received, lambda writer: made.append(ViewWriter(writer, self._once, shard)))
        if greeted and self.writers.get(shard) is greeted[0]:  # otherwise the rank has connected again
            del self.writers[shard]
            self._left.set()
            self._listener.closed(shard, why)

    async def closed(self, shard: int | None = None) -> None:
        """Wait until there is no connection of a rank, or of any."""
        while self.writers if shard is None else shard in self.writers:
            self._left.clear()
            await self._left.wait()

    def flushed(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the waits until the kernel has all that was said."""
        return [writer.flushed() for writer in self.writers.values()]

    def close(self) -> None:
        for writer in list(self.writers.values()):
            writer.close()


class ProbeListener(NamedTuple):
    """Hears what probes find out about a process whose connection has ended."""

    is_back: Callable[[], bool]  # there is a connection again, or nobody wants to know any more
    ended: Callable[[], None]
    refused: Callable[[], None]
    acknowledged: Callable[[float], None]  # when its kernel has answered

    def take(self, outcome: ProbeOutcome, now: float, begun: float, timeouts: Timeouts) -> bool:
        """Take what a probe has found out; `begun`: when the first one did. Returns whether no more is needed."""
        if self.is_back():
            return True
        if outcome is ProbeOutcome.ENDED:
            self.ended()
            return True
        if outcome is ProbeOutcome.REFUSED:
            self.refused()
        elif outcome is ProbeOutcome.ANSWERED or (outcome is ProbeOutcome.MUTE and now - begun < timeouts.op):
            self.acknowledged(now)
        return False


async def probe_until_known(
    there: Address, credentials: handshake.Credentials, timeouts: Timeouts, listener: ProbeListener
) -> None:
    """Find out why a connection has ended. If our own kernel says so, the process has ended; if another host says so,
    that is reported. Otherwise it connects again as soon as it runs. If no kernel answers, its silence will tell."""
    begun = time.monotonic()
    connection: ProbeConnection | None = None
    try:
        while not listener.is_back():
            connection = connection or ProbeConnection(there, credentials, "asked", {})
            outcome = await connection.outcome(timeouts.presence)
            if listener.take(outcome, time.monotonic(), begun, timeouts):
                return
            if outcome is not ProbeOutcome.MUTE:
                connection.close()
                connection = None
            await asyncio.sleep(timeouts.beat)
    finally:
        if connection is not None:
            connection.close()
