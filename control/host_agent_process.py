"""The process of a host agent: between the leader of a replica that has ranks on several hosts, and its ranks on one.
The first rank of the host starts it, as its companion.

    python -m ftcomm.control.host_agent_process     with its configuration, and the socket to which the ranks come

It ends with that rank, and the replica ends with either:

    that rank ends           its pidfd tells the agent, which tells the leader, and ends
    the agent ends           its connection tells that rank, and no rank finds it at its port: they tell the
                             coordinator, and end
    the agent is stopped     its kernel answers, so it is waited for, like a rank that is, and its replica removed as a
                             stall
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from ftcomm.control import handshake, liveness
from ftcomm.control import messages as m
from ftcomm.control.actions import ToLeader
from ftcomm.control.companion import become_companion
from ftcomm.control.companion_loop import LAST, Tasks, prepare, run_companion, within
from ftcomm.control.dropped import drop
from ftcomm.control.host_agent import EndConnections, HostAgent, HostAgentAction
from ftcomm.control.leader_driver import AGENT
from ftcomm.control.links import Listener, listen
from ftcomm.control.rank_connections import ProbeListener, RankConnections, RankListener, probe_until_known
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.tls import Files, Tls
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.upward_link import UpwardLink
from ftcomm.control.view_differences import EncodedOnce
from ftcomm.control.views import Address
from ftcomm.control.witness import PURPOSE as WITNESS

HELD = 0.02  # s for which a message waits for the same one of other ranks


class HostAgentConfig(msgspec.Struct, frozen=True):
    """All that a host agent has to know."""

    replica: int
    first: int  # the rank that has started it
    count: int  # ranks on this host, from that one on
    ranks: int  # the number of ranks of the replica
    pid: int  # the process of that rank
    leader: tuple[str, int]
    token: str
    job: str
    tls: Files | None
    timeouts: Timeouts
    host: str  # the address of this host
    level: int  # the level of the log

    @property
    def fields(self) -> handshake.Fields:
        """Returns what an opening to the leader says of the agent."""
        return {"replica": self.replica, "first": self.first, "count": self.count}

    @property
    def credentials(self) -> handshake.Credentials:
        tls = None if self.tls is None else Tls(self.tls)
        return handshake.Credentials(self.token, self.job, tls)


_CONFIG = msgspec.json.Decoder(HostAgentConfig)


class HostAgentProcess:
    """Drives a host agent in the event loop in which it is made, until the rank that has started it has ended."""

    def __init__(self, config: HostAgentConfig, ranks: socket.socket) -> None:
        """`ranks` listens for them; `own` is where the leader asks whether this lives."""
        self._config, self._socket, self._credentials = config, ranks, config.credentials
        self.own = listen(config.host, 0)  # where the leader finds it: that of the ranks may be a loopback
        nonce = secrets.token_hex(16)
        here = Address(
            *(config.host, self.own.getsockname()[1], liveness.boot(), os.getpid(), 0, nonce),
            network=liveness.network(),
            pids=liveness.pids(),
        )
        shards = range(config.first, config.first + config.count)
        self.node = HostAgent(shards, config.ranks, config.timeouts, here, liveness.processes())
        self._connections = RankConnections(
            RankListener(self.node.turned_away, self._from_rank, self._rank_closed), EncodedOnce()
        )
        self.ranks = self._connections.writers
        self.up = UpwardLink(
            *(NamedRank.of(config.replica, config.first, config.leader), "leader of the replica", config.leader),
            self._credentials,
            AGENT,
            config.fields,
            config.host,
            on_open=self._opened,
            on_lost=self._lost,
            trains=lambda: bool(self.node.life),
            on_mute=self._mute,
        )
        self._tried = asyncio.Event()  # an attempt to connect to the leader has ended
        self._settled = asyncio.Event()  # there is a connection to it, or nobody listens at its port
        self._flushes = False  # a flush is due soon
        self._tasks = Tasks()

    async def run(self, begun: Callable[[], None], ended: asyncio.Future[bool]) -> None:
        """Serve the ranks until the first one has `ended`; see `CompanionProcess`. It serves when it tries
        to reach the leader."""
        self.up.open(lambda message: self._do(self.node.from_leader, message, time.monotonic()))
        self._tasks.spawn(self._beats())
        self._tasks.spawn(self._listen())
        begun()
        try:
            await self._end(await self._tasks.until(ended))
        finally:  # its ports are closed when it has ended
            self._tasks.cancel()
            await within(LAST, self._tasks.ended())

    async def _listen(self) -> None:
        """Serve connections, of ranks as soon as it is known whether the leader is there."""
        listeners = [Listener(self.own, self._credentials, self._serve, names={self.node.address.nonce})]
        try:
            await self._tried.wait()
            listeners.append(Listener(self._socket, self._credentials, self._serve))
            await asyncio.get_running_loop().create_future()
        finally:
            for listener in listeners:
                await listener.close()
            self._socket.close()  # it may have ended before it served the ranks

    # -- the leader ----------------------------------------------------------------------------------------------

    def _opened(self) -> None:
        self._tried.set()
        self._settled.set()
        self._do(self.node.opened, time.monotonic())

    def _lost(self, reason: str, refused: bool, here: bool) -> None:
        self._tried.set()
        (self._settled.set if refused else self._settled.clear)()
        final = isinstance(self.up.refused, handshake.Refused)  # any other refusal may be forged
        self._do(lambda: self.node.lost(reason, refused, here, final=final))

    def _mute(self) -> None:
        self._tried.set()
        self._do(self.node.lost, self.up.news.text)

    # -- the ranks -----------------------------------------------------------------------------------------------

    async def _serve(self, channel: Channel, opening: handshake.Opening) -> None:
        first, last = self._config.first, self._config.first + self._config.count - 1
        if opening.purpose == "rank":
            handshake.number(opening.fields, "replica", least=self._config.replica, most=self._config.replica)
            await self._connections.serve(channel, handshake.number(opening.fields, "shard", least=first, most=last))
            return
        channel.close()
        if opening.purpose == WITNESS:
            self._witnessed(opening.fields)
        elif opening.purpose != "asked":  # a question whether this process lives
            drop("purpose", f"a connection for {opening.purpose!r}, which a host agent does not serve")

    def _witnessed(self, fields: handshake.Fields) -> None:
        """Believe the kernel of a rank's container that the rank's process has ended."""
        shard = handshake.number(fields, "shard", least=1)
        there = self.node.addresses.get(shard)
        if there is not None and there.nonce == handshake.text(fields, "nonce"):
            self._do(self.node.rank_lost, shard, f"its process {there.pid} has ended, says its host")

    def _from_rank(self, shard: int, message: m.AnyMessage) -> None:
        self._do(self.node.from_rank, shard, message)

    def _rank_closed(self, shard: int, why: str) -> None:
        self._do(self.node.rank_closed, shard)
        there = self.node.addresses[shard]
        listener = ProbeListener(
            is_back=lambda: shard in self.ranks,
            ended=lambda: self._do(self.node.rank_lost, shard, liveness.why_lost(there)),
            refused=lambda: self._do(self.node.rank_refused, shard, why),
            acknowledged=lambda at: None,  # the kernel of this host answers for it
        )
        self._tasks.spawn(probe_until_known(there, self._credentials, self._config.timeouts, listener))

    # -- what the node wants -------------------------------------------------------------------------------------

    def _do(self, event: Callable[..., Sequence[HostAgentAction]], *args: Any) -> None:
        """Tell the node of an event, and carry out its actions."""
        for action in event(*args):
            if isinstance(action, ToLeader):
                if self.up.link is not None:
                    self.up.link.send(action.message)
            elif isinstance(action, EndConnections):
                self._connections.close()
            else:
                for shard in action.shards:
                    if (there := self.ranks.get(shard)) is not None:
                        there.send(action.message)
        if self.node.holds and not self._flushes:
            self._flushes = True
            asyncio.get_running_loop().call_later(HELD, self._flush)

    def _flush(self) -> None:
        self._flushes = False
        self._do(self.node.flush)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._config.timeouts.beat)
            now = time.monotonic()
            seconds = None if self.up.link is None else self.up.link.unanswered()
            if self.node.asks and seconds is not None:  # before anything more is sent
                self._do(self.node.acknowledged, now - seconds)
            self._do(self.node.tick, now)

    async def _end(self, well: bool) -> None:
        """Take what the first rank has said last, say that it has ended, and let the others hear what the leader
        answers: why their replica ends, or that all of it have finished."""
        await within(LAST, self._connections.closed(self._config.first))
        if not well:
            self._do(self.node.rank_lost, self._config.first, f"its process {self._config.pid} has ended")
            await within(LAST, self._settled.wait())  # if there is no connection, the leader hears it with the next one
        self._do(self.node.flush)
        up = [] if self.up.link is None else [self.up.link.flushed()]
        await within(LAST, _all(*self._connections.flushed(), *up))
        if self.up.link is not None and self.up.link.is_up:
            await within(LAST, self._connections.closed())
        self.close()

    def close(self) -> None:
        """End at once, as its process does when it is killed."""
        self._tasks.cancel()
        self.up.close()
        self._connections.close()


async def _all(*waits: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*waits)


def main() -> None:
    sock, data, descriptors = become_companion()
    config = _CONFIG.decode(data)
    prepare(config.level)
    name = f"the host agent of shards {config.first} to {config.first + config.count - 1} of replica {config.replica}"
    os._exit(run_companion(name, lambda ranks: HostAgentProcess(config, ranks), sock, descriptors))


if __name__ == "__main__":
    main()
