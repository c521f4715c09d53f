"""Dumps what the ranks of a job have recorded when something has gone wrong, a moment later, while all goes on.

A process of its own writes a dump: it makes some hundred thousand objects of each rank's recording, and holds the
interpreter lock for that. In the launcher that would delay the coordinator, and what it leaves of the heap would stay.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ftcomm.control.script_end import ScriptEnd
from ftcomm.errors import MismatchError
from ftcomm.recorder.dump import DumpError

DELAY = 1.0  # s between what has gone wrong and its dump: the recovery comes first
EVERY = 60.0  # s between two dumps for the same cause
LONGEST = 120.0  # s for a dump
DUMP_TIMEOUT = 10.0  # s for a dump that is under way when the job ends

_OF_EVENTS = {
    "stalled": "stall",
    "divergence": "divergence",
    "step_failed": "mismatch",
    # A replica whose script fails is lost, and with all of them the job is, before the first process has ended.
    "suspect": "mismatch",
    "failed": "crash",
}


def cause_of(event: Mapping[str, Any]) -> str:
    """Returns the cause for which an event is dumped; empty if it is none."""
    kind = event["kind"]
    if kind == "step_failed" and not event.get("mismatch"):
        return ""
    if kind == "suspect" and ScriptEnd.of_event(event) != ScriptEnd.by(MismatchError):
        return ""
    return _OF_EVENTS.get(kind, "")


class Dumper:
    """Lets dumps be written of the recordings in `folder`, one at a time. For one event loop."""

    def __init__(self, folder: Path, run: str, log: Callable[[str], None]) -> None:
        self._folder, self._run, self._log = folder, run, log
        self._last: dict[str, float] = {}  # cause -> when
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

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
            if self._closed or not self._folder.is_dir():
                return  # or no rank has come so far
            try:
                self._log(f"{cause}: what all ranks did is in {await asyncio.to_thread(self._dump, cause)}")
            except DumpError as error:
                self._log(f"{cause}: {error}")

    def _dump(self, cause: str) -> str:
        """Returns where the dump is. Blocks. Raises `DumpError`."""
        command = [sys.executable, "-m", "ftcomm.recorder", str(self._folder), self._run, cause]
        try:
            self._process = process = subprocess.Popen(
                command,
                env={name: value for name, value in os.environ.items() if name != "FTCOMM_TOKEN"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a signal to this process, such as Ctrl-C, must not end it
            )
        except OSError as error:
            raise DumpError(f"no dump was written: no process for it: {error.strerror}") from None
        with process:
            try:
                said, trouble = process.communicate(timeout=LONGEST)
            except subprocess.TimeoutExpired:
                process.kill()
                raise DumpError(f"no dump was written: it was not ready within {LONGEST:g} s") from None
        if process.returncode:
            how = trouble.strip().rpartition("\n")[2] or f"its process ended with {process.returncode}"
            raise DumpError(how)
        return said.strip()

    async def close(self) -> None:
        """Write what is due, and wait for it, for seconds at most."""
        for cause in list(self._due):
            self._begin(cause)
        if self._writing:
            await asyncio.wait(self._writing, timeout=DUMP_TIMEOUT)
        self._closed = True
        if self._writing and self._process is not None:
            self._process.kill()
