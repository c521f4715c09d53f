"""Reports what a job says (its events, its own lines, the lines of its ranks) to callbacks, a file and the console."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from ftcomm.control.messages import Event
from ftcomm.errors import SettingsError
from ftcomm.launch.options import RunOptions
from ftcomm.launch.output import Console, LogFile, prefix


class Reporter:
    """The reporter of a job, on one event loop. Only `close` blocks. See `Launcher` for the callbacks."""

    def __init__(
        self,
        options: RunOptions,
        on_event: Callable[[Event], None],
        on_line: Callable[[int, int, str], None] | None,
        on_log: Callable[[str], None] | None,
    ) -> None:
        self._ranks = options.ranks_per_replica
        self._log_dir = options.log_dir
        self._events_path = options.events
        self._on_event = on_event
        self._on_line = on_line
        self._on_log = on_log
        self.last_said = ""
        self._console: Console | None = None
        self._events: LogFile | None = None

    def open(self, hold: Callable[[bool], None]) -> None:
        """Open the files; `hold` is as in `Console`. Raises `SettingsError` if a file or directory cannot be
        written."""
        if self._log_dir is not None:
            probe = self._log_dir / ".ftcomm-probe"
            with _writable(f"--log-dir {self._log_dir}", "directory"):
                self._log_dir.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink(missing_ok=True)
        if self._events_path is not None:
            with _writable(f"--events {self._events_path}", "file"):
                self._events_path.write_bytes(b"")
            self._events = LogFile(self._events_path, self.log)
        self._console = Console(asyncio.get_running_loop(), hold)

    def close(self, timeout: float) -> None:
        """Close. Blocks for at most `timeout` seconds if a terminal does not take the rest."""
        if self._console is not None:
            self._console.close(timeout)
        if self._events is not None:
            self._events.close()
        self._console = self._events = None

    def emit(self, kind: str, **fields: Any) -> None:
        self.record({"time": time.time(), "mono": time.monotonic(), "kind": kind, **fields})

    def record(self, event: Event) -> None:
        if self._events is not None:
            self._events.write(json.dumps(event, default=str).encode() + b"\n")
        self._on_event(event)

    def line(self, replica: int, rank: int, stream: int, line: bytes) -> None:
        if self._on_line is not None:
            self._on_line(replica, rank, line.decode(errors="replace"))
        elif self._console is not None:
            self._console.write(stream, prefix(replica, rank, self._ranks, self._console.colour[stream]) + line)

    def log(self, text: str) -> None:
        self.last_said = text
        if self._on_log is not None:
            self._on_log(text)
        elif self._console is not None:
            self._console.write(2, f"ftcomm: {text}".encode())


@contextlib.contextmanager
def _writable(option: str, what: str) -> Any:
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{option}: {error.strerror}; choose a {what} that you can write to.") from None
