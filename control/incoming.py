"""The connections that come to a rank: of other members, and of what the data plane serves."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from ftcomm.control import handshake, wire
from ftcomm.control import messages as m
from ftcomm.control.control_loop import ControlLoop
from ftcomm.control.dropped import drop
from ftcomm.control.failed_dials import start
from ftcomm.control.links import hand_over, serve_messages
from ftcomm.control.liveness import unanswered
from ftcomm.control.member import Phase
from ftcomm.control.rank_name import rank_name
from ftcomm.control.sealed import Channel

log = logging.getLogger("ftcomm.control")

Handler = Callable[[Channel, handshake.Fields], None]


class IncomingConnections:
    """Serves them in the event loop of the control thread. `lead` serves a connection that is for a leader, and says
    whether it is one."""

    def __init__(self, control: ControlLoop, lead: Callable[[Channel, handshake.Opening], bool]) -> None:
        self._control, self._node, self._timeouts, self._lead = control, control.node, control.timeouts, lead
        self.handlers: dict[str, Handler] = {}  # by purpose

    async def serve(self, channel: Channel, opening: handshake.Opening) -> None:
        """Serve a connection for its purpose; owns the channel."""
        if opening.purpose == "member":
            await self._serve_member(channel, handshake.number(opening.fields, "replica"))
        elif opening.purpose == "asked":  # a question whether this process lives
            channel.close()
        elif opening.purpose in self.handlers:
            await self._hand_over(channel, opening)
        elif not self._lead(channel, opening):
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
                    "%s: a connection for %r waits to be served, for %g s at most: %s",
                    *(rank_name(self._node.machine.replica, self._node.shard), opening.purpose),
                    *(self._timeouts.op, lacks),
                )
            await asyncio.sleep(self._timeouts.beat)
            failed = self._node.machine.phase is Phase.FAILED
            if failed or time.monotonic() > deadline or unanswered(channel) is None:
                channel.close()
                return

    async def _serve_member(self, channel: Channel, replica: int) -> None:
        back: list[wire.Writer] = []

        def received(message: m.AnyMessage) -> None:
            if getattr(message, "replica", replica) != replica:
                drop("message", f"replica {replica} speaks for another: {type(message).__name__}")
                return
            self._control.do(self._node.from_peer, message, time.monotonic())
            later = self._node.passed_by(message)
            if later is not None:
                back[0].write(m.encode(later))

        await serve_messages(channel, received, back.append)
