"""The leader of a replica of several ranks in a thread of the test, in place of a process of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import Any

from ftcomm.control import handshake, liveness
from ftcomm.control.leader_process import LeaderCharge, LeaderProcess
from ftcomm.control.links import listen
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from tests.rigs.deadlines import DEADLINE


class Led:
    """`address` is where its ranks find it. Rank 0 ends, as it should, at `close`."""

    def __init__(
        self,
        coordinator: tuple[str, int],
        credentials: handshake.Credentials,
        timeouts: Timeouts,
        ranks: int = 2,
        replica: int = 0,
    ) -> None:
        sock = listen("127.0.0.1", 0)
        self.address: tuple[str, int] = sock.getsockname()
        charge = LeaderCharge(
            *(NamedRank.of(replica, 0, self.address), os.getpid(), liveness.started(), ranks, coordinator),
            *(credentials.token, credentials.job, None, timeouts, "127.0.0.1", liveness.processes(), 20),
        )
        begun: concurrent.futures.Future[LeaderProcess] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Future[bool] = self._loop.create_future()

        async def lead() -> None:
            leader = LeaderProcess(charge, sock)
            await leader.run(lambda: begun.set_result(leader), self._ended)
            left = asyncio.all_tasks() - {asyncio.current_task()}  # they would end with the process
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(lead()), daemon=True)
        self._thread.start()
        self.process = begun.result(DEADLINE)

    @property
    def ranks(self) -> set[int]:
        """Those that are connected."""
        return set(self.process.driver.ranks)

    def do(self, event: Any, *args: Any) -> None:
        """In its loop."""
        self._loop.call_soon_threadsafe(event, *args)

    def close(self, well: bool = True) -> None:
        """Let it hear that rank 0 has ended, as it should or not, and wait for its end."""
        if self._loop.is_closed():
            return
        self.do(lambda: self._ended.done() or self._ended.set_result(well))
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        self._loop.close()
