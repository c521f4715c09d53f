"""The agent of a host in a thread of the test, in place of a process of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import Any

from ftcomm.control import handshake
from ftcomm.control.host_agent_process import AgentCharge, HostAgentProcess
from ftcomm.control.links import listen
from ftcomm.control.own_host_agent import AgentPlace
from ftcomm.control.timeouts import Timeouts
from tests.rigs.deadlines import DEADLINE


class HostAgentThread:
    """`address` is where its ranks find it. Its first rank ends, as it should, at `close`."""

    def __init__(
        self,
        leader: tuple[str, int],
        credentials: handshake.Credentials,
        timeouts: Timeouts,
        shards: range,
        ranks: int,
        replica: int = 0,
    ) -> None:
        sock = listen("127.0.0.1", 0)
        self.address: tuple[str, int] = sock.getsockname()
        self.shards = shards
        charge = AgentCharge(
            *(replica, shards.start, len(shards), ranks, os.getpid(), leader, credentials.token, credentials.job, None),
            *(timeouts, "127.0.0.1", 20),
        )
        begun: concurrent.futures.Future[HostAgentProcess] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Future[bool] = self._loop.create_future()

        async def run() -> None:
            agent = HostAgentProcess(charge, sock)
            await agent.run(lambda: begun.set_result(agent), self._ended)
            left = asyncio.all_tasks() - {asyncio.current_task()}  # they would end with the process
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(run()), daemon=True)
        self._thread.start()
        self.process = begun.result(DEADLINE)

    def place(self, there: tuple[str, int] | None = None) -> AgentPlace:
        """For its ranks, which find it `there`."""
        return AgentPlace(there or self.address, self.shards, None)

    @property
    def ranks(self) -> set[int]:
        """Those that are connected."""
        return set(self.process.ranks)

    def do(self, event: Any, *args: Any) -> None:
        """In its loop."""
        self._loop.call_soon_threadsafe(event, *args)

    def close(self, well: bool = True) -> None:
        """Let it hear that its first rank has ended, as it should or not, and wait for its end."""
        if self._loop.is_closed():
            return
        self.do(lambda: self._ended.done() or self._ended.set_result(well))
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        self._loop.close()
