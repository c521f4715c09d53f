"""Prints the output of many ranks on one terminal: whole lines, each with its rank in front, without blocking the event
loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI foregrounds, one a replica
HELD = 1 << 20  # bytes that may wait for a slow terminal before ranks must wait
HOLD_TIMEOUT = 5.0  # s for which they wait; a rank that waits for longer may be taken for the cause of a stall


class LineSplitter:
    """Splits bytes, as they come, into whole lines without their ends. One for each stream of a rank; not
    thread-safe."""

    LONGEST = 1 << 20  # bytes; a longer line is passed on in pieces
    REDRAW = 1.0  # s; a progress bar that redraws itself with \\r is shown this often

    def __init__(self) -> None:
        self._rest = b""
        self._redrawn = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Returns the lines that `data` completes. `now` is in seconds of any monotonic clock."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [_last_drawn(line) for line in whole]
        # A last \r may be the first half of \r\n, so it waits, and so does what a bar draws before it.
        text = self._rest.rstrip(b"\r")
        drawn, redraw, last = text.rpartition(b"\r")
        if redraw:
            self._rest = last + self._rest[len(text) :]
            if (line := _last_drawn(drawn)) and now - self._redrawn >= self.REDRAW:
                self._redrawn = now
                lines.append(line)
        while len(self._rest) > self.LONGEST:
            lines.append(self._rest[: self.LONGEST])
            self._rest = self._rest[self.LONGEST :]
        return lines

    def flush(self) -> list[bytes]:
        """Returns the last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return [_last_drawn(rest)] if rest else []


def _last_drawn(line: bytes) -> bytes:
    """Returns what a terminal shows of a line that redraws itself; of `text\r` it is `text`."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Console:
    """Writes lines to stdout and stderr from a thread of its own.

    The event loop also drives the coordinator, so it must not stop because a user selects text in a terminal or pages
    through the output. When `HELD` bytes wait, `hold(True)` asks for a pause in reading from the ranks, and
    `hold(False)` ends it; both are called on the event loop. After `HOLD_TIMEOUT` seconds of it lines are left out
    instead, until half of those bytes are written. Then a line says how many.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, hold: Callable[[bool], None]) -> None:
        self._loop = loop
        self._hold = hold
        self._held = self._leaving_out = self._closed = False
        self._left_out = 0  # lines
        self._waiting = 0
        self._lock = threading.Lock()  # guards these; never held during a wait
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._streams: dict[int, IO[str]] = {1: sys.stdout, 2: sys.stderr}
        self._broken: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.colour = {
            number: stream.isatty() and "NO_COLOR" not in os.environ for number, stream in self._streams.items()
        }
        self._thread = threading.Thread(target=self._run, name="ftcomm-console", daemon=True)
        self._thread.start()

    def write(self, stream: int, line: bytes) -> None:
        """Write one line, without its end, to 1 (stdout) or 2 (stderr). From the event loop; does not block."""
        data = line + b"\n"
        with self._lock:
            if self._leaving_out and self._waiting > HELD:
                self._left_out += 1
                return
            self._waiting += len(data)
            full = self._waiting > HELD and not (self._held or self._leaving_out or self._closed)
            self._held |= full  # before the line is in the queue, so that the thread cannot miss it
        self._queue.put((stream, data))
        if full:
            self._hold(True)
            self._timer = self._loop.call_later(HOLD_TIMEOUT, self._leave_out)

    def close(self, timeout: float) -> None:
        """Close when all is written, or after `timeout` seconds if the terminal does not take it. Blocks."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            lines, self._left_out, self._leaving_out, self._closed = self._left_out, 0, False, True
        self._tell_of(lines)
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, data = item
            if stream not in self._broken:
                try:
                    _write_all(self._streams[stream], data)
                except OSError:  # the reader has gone, as in `ftcomm run ... | head`; the job goes on
                    self._broken.add(stream)
            with self._lock:
                self._waiting -= len(data)
                release = (self._held or self._leaving_out) and self._waiting <= HELD // 2
            if release:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._release)

    def _leave_out(self) -> None:
        """Let the ranks go on, though the terminal takes nothing."""
        with self._lock:
            self._held, self._leaving_out = False, True
        self._hold(False)

    def _release(self) -> None:
        with self._lock:
            held, self._held, self._leaving_out = self._held, False, False
            lines, self._left_out = self._left_out, 0
        if held:
            if self._timer is not None:
                self._timer.cancel()
            self._hold(False)
        self._tell_of(lines)

    def _tell_of(self, lines: int) -> None:
        if lines:
            note = f"ftcomm: {lines} lines were left out, since the terminal did not take them; --log-dir keeps all"
            self.write(2, note.encode())


def _write_all(stream: IO[str], data: bytes) -> None:
    """Writes past Python's buffers: a thread that is stuck in one of those would block the interpreter's exit."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):  # replaced by an object in memory, as in tests and notebooks
        stream.write(data.decode(errors="replace"))
        stream.flush()
        return
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # some programs leave a shared terminal in that mode
            select.select([], [fd], [])


class LogFile:
    """Appends bytes or text to a file. Trouble with the disk is told once and never stops the job."""

    def __init__(self, path: Path, trouble: Callable[[str], None]) -> None:
        self._path = path
        self._trouble = trouble
        self._file: BinaryIO | None = None
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            self._tell(error)

    def write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._tell(error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tell(self, error: OSError) -> None:
        self._trouble(f"cannot write {self._path}: {error.strerror}; the job goes on without it")


def prefix(replica: int, rank: int, ranks_per_replica: int, colour: bool) -> bytes:
    """Returns `[2]`, or `[2.1]` with several ranks a replica."""
    text = f"[{replica}]" if ranks_per_replica == 1 else f"[{replica}.{rank}]"
    return (f"\033[{COLOURS[replica % len(COLOURS)]}m{text}\033[0m " if colour else f"{text} ").encode()
