"""Writes down who has finished, before they hear that it is known: they may end then, and this coordinator, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ftcomm.control.finishes import Finishes
from ftcomm.control.store import Store, StoreError

LONGEST = 10.0  # s that anybody waits for the store: without it the finish is known for as long as this process lives
RETRY = 1.0  # s between two attempts to store what could not be written

Then = Callable[[], None]


class FinishWriter:
    """The writer. It writes what it was given last, and nothing of what came and went while it wrote, so that a job of
    many replicas that all finish makes a few writes. It never writes before the view of that epoch is stored: whoever
    found it with an older view would believe none of it. Belongs to one event loop."""

    def __init__(self, store: Store, delayed: Callable[[OSError], None], failed: Callable[[str], None]) -> None:
        """`delayed` is told once why nothing can be written, which is tried again; `failed`, why it never will be."""
        self._store, self._delayed, self._failed = store, delayed, failed
        self._newest: Finishes | None = None  # to be written
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[Then, asyncio.TimerHandle]] = {}
        self._steps = 0
        self._view_stored = asyncio.Event()

    def write(self, finishes: Finishes) -> None:
        self._newest = finishes
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def view_stored(self) -> None:
        """Note that the store has another view."""
        self._view_stored.set()

    def then(self, step: Then) -> None:
        """Take the step when all is written that was given before, `LONGEST` seconds from now at the latest."""
        if self._task is None:
            step()
            return
        self._steps += 1
        timer = asyncio.get_running_loop().call_later(LONGEST, self._take, self._steps)
        self._waiting[self._steps] = step, timer

    def stop(self) -> None:
        """Write nothing more, and take no step; idempotent."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._newest = None
        for _, timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    async def _run(self) -> None:
        told = False
        while self._newest is not None:
            if self._newest.epoch > (self._store.views[-1].epoch if self._store.views else 0):
                self._view_stored.clear()
                await self._view_stored.wait()
                continue
            finishes, self._newest, last = self._newest, None, self._steps
            try:
                writing = self._store.write_finishes(finishes)
                if writing is not None:
                    await writing
            except OSError as error:
                if not told:
                    told = True
                    self._delayed(error)
                self._newest = self._newest or finishes
                await asyncio.sleep(RETRY)
                continue
            except StoreError as error:
                self._failed(str(error))
                return
            for number in [number for number in self._waiting if number <= last or self._newest is None]:
                self._take(number)
        self._task = None

    def _take(self, number: int) -> None:
        if number in self._waiting:  # else `stop` was a step before it
            step, timer = self._waiting.pop(number)
            timer.cancel()
            step()
