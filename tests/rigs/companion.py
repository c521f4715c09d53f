"""A companion in a thread of the test, in place of a process of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ftcomm.control.companion_loop import CompanionProcess
from ftcomm.control.links import listen
from tests.rigs.deadlines import DEADLINE

ProcessT = TypeVar("ProcessT", bound=CompanionProcess)


class CompanionThread(Generic[ProcessT]):
    """`address` is where its ranks find it. The rank that it goes by ends, as it should, at `close`."""

    def __init__(self) -> None:
        self._listener = listen("127.0.0.1", 0)
        self.address: tuple[str, int] = self._listener.getsockname()

    def start(self, make: Callable[[socket.socket], ProcessT]) -> None:
        begun: concurrent.futures.Future[ProcessT] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Future[bool] = self._loop.create_future()

        async def run() -> None:
            process = make(self._listener)
            await process.run(lambda: begun.set_result(process), self._ended)
            left = asyncio.all_tasks() - {asyncio.current_task()}  # they would end with the process
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(run()), daemon=True)
        self._thread.start()
        self.process = begun.result(DEADLINE)

    def do(self, event: Any, *args: Any) -> None:
        """In its loop."""
        self._loop.call_soon_threadsafe(event, *args)

    def close(self, well: bool = True) -> None:
        """Let it hear that its rank has ended, as it should or not, and wait for its end."""
        if self._loop.is_closed():
            return
        self.do(lambda: self._ended.done() or self._ended.set_result(well))
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        self._loop.close()
