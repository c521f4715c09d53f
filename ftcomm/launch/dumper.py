"""Dumps what the ranks of a job have recorded when something has gone wrong, a moment later, while all goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ftcomm.recorder.dump import DumpError, write

DELAY = 1.0  # s between what has gone wrong and its dump: the recovery comes first
EVERY = 60.0  # s between two dumps for the same cause
PATIENCE = 10.0  # s for a dump that is under way when the job ends

_OF_EVENTS = {"stalled": "stall", "divergence": "divergence", "step_failed": "mismatch"}


def cause_of(event: Mapping[str, Any]) -> str:
    """Returns the cause for which an event is dumped; empty if it is none."""
    kind = event["kind"]
    if kind == "step_failed" and not str(event.get("error", "")).startswith("MismatchError"):
        return ""
    return _OF_EVENTS.get(kind, "")


class Dumper:
    """Writes dumps of the recordings in `folder`, in a thread, one at a time. For one event loop."""

    def __init__(self, folder: Path, run: str, log: Callable[[str], None]) -> None:
        self._folder, self._run, self._log = folder, run, log
        self._last: dict[str, float] = {}  # cause -> when
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()

    def dump(self, cause: str, delay: float = DELAY) -> None:
        """Write a dump soon, unless there was one for this cause within the last minute. Does not block."""
        loop = asyncio.get_running_loop()
        if self._last.get(cause, -EVERY) + EVERY > loop.time() or cause in self._due:
            return
        self._last[cause] = loop.time()
        self._due[cause] = loop.call_later(delay, self._begin, cause)

    def _begin(self, cause: str) -> None:
        self._due.pop(cause).cancel()
        task = asyncio.get_running_loop().create_task(self._write(cause))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, cause: str) -> None:
        async with self._one:
            if not self._folder.is_dir():
                return  # no rank has come so far
            try:
                self._log(f"{cause}: what all ranks did is in {await asyncio.to_thread(self._dump, cause)}")
            except DumpError as error:
                self._log(f"{cause}: {error}")

    def _dump(self, cause: str) -> Path:
        return write(self._folder, self._run, cause)

    async def close(self) -> None:
        """Write what is due, and wait for it, for seconds at most."""
        for cause in list(self._due):
            self._begin(cause)
        if self._writing:
            await asyncio.wait(self._writing, timeout=PATIENCE)
