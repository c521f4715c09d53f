"""The host agents of `ftcomm bench control --agents`: the production ones, many in a process.

An agent is started by the first light rank of its host over a connection that stands for their lives, as the socket and
the pidfd between a rank and its companion do:

    the connection closes     the rank has ended, so its agent ends as it does then
    "killed" comes before     the host has ended, and its agent with it, in the midst of what it did
    the agent ends            the connection closes, and its rank takes that for the end of a process
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ftcomm.bench.control_cut import Cable
from ftcomm.bench.control_setup import (
    HOST,
    TO_LEADER,
    TO_RANK,
    MessageCounts,
    Setup,
    answer,
    kind_of,
    say,
    usage,
)
from ftcomm.control.actions import ToLeader
from ftcomm.control.host_agent import HostAgentAction
from ftcomm.control.host_agent_process import HostAgentConfig, HostAgentProcess
from ftcomm.control.links import listen

KILLED = b"killed"

log = logging.getLogger("ftcomm.bench")


class AgentPorts(NamedTuple):
    first: int  # of its ranks
    ranks: int  # the port to which these come
    starts: int  # the port at which the first one starts it


class StartedAgent:
    """The agent that a light rank has started, as the rank sees it. `ended` is told of its end."""

    def __init__(self, ports: AgentPorts, ended: Callable[[], None]) -> None:
        self._ports, self._ended = ports, ended
        self._writer: asyncio.StreamWriter | None = None
        self._is_over = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, self._ports.starts)
            with contextlib.closing(writer):
                if not self._is_over:
                    self._writer = writer
                    writer.write(b"%d\n" % self._ports.ranks)
                    await reader.read()
        if not self._is_over:
            self._ended()

    def close(self, killed: bool) -> None:
        """Let the agent see the end of the rank, or (`killed`) end with the host."""
        self._is_over = True
        if self._writer is not None:
            if killed:
                self._writer.write(KILLED)
            self._writer.close()


class MeasuredAgent(HostAgentProcess):
    """A production host agent whose messages to and from its leader are counted, and whose cable can be pulled."""

    def __init__(self, config: HostAgentConfig, ranks: socket.socket, counts: MessageCounts) -> None:
        super().__init__(config, ranks)
        self._replica, self._counts = config.replica, counts

    def begun(self) -> None:
        assert self.up.link is not None
        self.cable = Cable(self.up.link, self.own)

    def _do(self, event: Callable[..., Sequence[HostAgentAction]], *args: Any) -> None:
        if event == self.node.from_leader:
            self._counts.count(self._replica, kind_of(args[0]), TO_RANK, True)
        elif event == self.node.acknowledged and self.cable.cuts_link:
            return  # what this agent says now waits, so no kernel could leave it unanswered

        def done(*args: Any) -> list[HostAgentAction]:
            return [action for action in event(*args) if not self._waits(action)]

        super()._do(done, *args)

    def _waits(self, action: HostAgentAction) -> bool:
        """Count what is said to the leader. Returns whether it leaves when the cable is plugged in."""
        if not isinstance(action, ToLeader):
            return False
        self._counts.count(self._replica, kind_of(action.message), TO_LEADER, True)
        if self.cable.cuts_link:
            self.cable.send(action.message)
        return self.cable.cuts_link


class HostAgents:
    """The host agents of one process: those whose first rank is in some columns."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._counts = setup, MessageCounts()
        # By the port of their ranks: those that have not been started, and (`living`) those that live.
        self._waiting: dict[int, tuple[HostAgentConfig, socket.socket]] = {}
        self.living: dict[int, tuple[HostAgentConfig, MeasuredAgent]] = {}

    async def open(self) -> int:
        """Returns the port at which ranks start their agents."""
        self._server = await asyncio.start_server(self._started, HOST, 0)
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self._port

    def start(self, replica: int, leader: int) -> dict[str, Any]:
        """Make the ports of the agents of a life of a replica."""
        for port in [port for port, (config, _) in self._waiting.items() if config.replica == replica]:
            self._waiting.pop(port)[1].close()
        made: list[AgentPorts] = []
        for first in range(*self._setup.columns):
            shards = self._setup.agent(first)
            if shards and shards.start == first:
                sock = listen(HOST, 0)
                made.append(AgentPorts(first, sock.getsockname()[1], self._port))
                self._waiting[made[-1].ranks] = self._config(replica, shards, leader), sock
        return {"agents": made}

    def _config(self, replica: int, shards: range, leader: int) -> HostAgentConfig:
        return HostAgentConfig(
            *(replica, shards.start, len(shards), self._setup.ranks, os.getpid(), (HOST, leader)),
            *(self._setup.token, "", None, self._setup.timeouts, HOST, logging.WARNING),
        )

    async def _started(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run an agent for as long as its first rank lives."""
        try:
            await self._run(int(await reader.readline()), reader)
        except Exception:  # the agent would be missing, and nothing would say why
            log.exception("a host agent cannot go on")
            os._exit(1)
        finally:
            writer.close()

    async def _run(self, port: int, reader: asyncio.StreamReader) -> None:
        config, sock = self._waiting.pop(port)
        agent = MeasuredAgent(config, sock, self._counts)

        def begun() -> None:
            agent.begun()
            self.living[port] = config, agent

        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(agent.run(begun, ended))
        said = asyncio.ensure_future(reader.read())
        await asyncio.wait({running, said}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            if said.result() == KILLED:
                agent.close()
                running.cancel()
            else:
                ended.set_result(False)
        await asyncio.wait({running})
        self.living.pop(port, None)
        if not running.cancelled():
            running.result()

    def cut(self, replica: int, pulled: bool) -> dict[str, Any]:
        """Pull the cables of those agents of a replica whose hosts flap, or plug them in again."""
        at = asyncio.get_running_loop().time()
        for config, agent in self.living.values():
            if config.replica == replica and self._setup.flaps(config.first):
                (agent.cable.pull if pulled else agent.cable.plug)()
        return {"cut": replica, "at": at}

    def usage(self) -> dict[str, Any]:
        told = {**usage(), **self._counts.told}
        gc.collect()
        return told


async def agents(setup: Setup) -> None:
    gc.disable()  # as in the processes of light ranks
    made = HostAgents(setup)
    say(port=await made.open())
    await answer({name: getattr(made, name) for name in ("start", "cut", "usage")})
