"""An event loop in a companion: in the leader of a replica, and in the agent of a host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ftcomm.control.companion import begin, dismissed
from ftcomm.control.links import event_loop
from ftcomm.control.wait_for import wait_for

log = logging.getLogger("ftcomm.control")

LAST = 2.0  # s for what is said at the end
FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class CompanionProcess(Protocol):
    """A leader or a host agent."""

    async def run(self, begun: Callable[[], None], ended: asyncio.Future[bool]) -> None:
        """Serve until the rank has `ended`, as it should (True) or not; `begun` is called when it serves. Raises the
        error of a part of it, if there is one: no rank may take a companion for one that lives."""
        ...


class Tasks:
    """The tasks of a companion. It cannot go on without any of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_over = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
                self._broken.set_exception(error)

        if self._is_over:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def until(self, ended: asyncio.Future[bool]) -> bool:
        """Wait for the end of the rank. Returns whether it `ended` as it should; raises the error of a task."""
        either: set[asyncio.Future[Any]] = {ended, self._broken}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            self._broken.result()
        return ended.result()

    def cancel(self) -> None:
        """Cancel all tasks, and start no more. Idempotent: a second time would break off what they do at their end."""
        if not self._is_over:
            self._is_over = True
            for task in self._tasks:
                task.cancel()

    async def ended(self) -> None:
        """Wait until all tasks have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def within(seconds: float, work: Coroutine[Any, Any, object]) -> None:
    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
        await wait_for(seconds, work)


def prepare(level: int) -> None:
    """Log to the standard error, and go by the end of the rank alone: signals to stop are for the ranks, which leave at
    a boundary and need their companions until then."""
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=level, format="%(asctime)s ftcomm %(levelname)s: %(message)s", stream=sys.stderr)


def run_companion(
    name: str, make: Callable[[socket.socket], CompanionProcess], sock: socket.socket, descriptors: list[int]
) -> int:
    """Run what `make` makes of the socket to which the ranks come, until the rank at the other end of `sock` ends.
    `descriptors`: that socket and, where the system gives one, a pidfd of that rank. Returns 0, or 1 after an error,
    which is logged. The process has to end by `os._exit` then: a thread still waits for the end of that rank."""
    ranks, end = socket.socket(fileno=descriptors[0]), descriptors[1] if len(descriptors) > 1 else -1

    async def serve() -> None:
        ended = asyncio.get_running_loop().run_in_executor(None, dismissed, sock, end)
        await make(ranks).run(lambda: begin(sock), ended)

    try:
        event_loop().run_until_complete(serve())
    except BaseException as error:
        log.error("%s cannot go on: %r", name, error, exc_info=error)
        return 1
    return 0
