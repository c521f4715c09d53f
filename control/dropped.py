"""Counts what came from the network and was thrown away, by kind, and logs it without flooding the log.

Bad input never ends a loop: it is dropped, or its connection is closed, and both count. Each kind logs at most `LINES`
lines in `WINDOW` seconds; the first line of a later window says how many were left out.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Literal

log = logging.getLogger("ftcomm.control")

LINES = 10
WINDOW = 10.0  # s

DropKind = Literal[
    "handshake",  # not a handshake of ftcomm: garbage, too long, closed or silent in the middle
    "version",
    "token",
    "tls",  # only one side speaks TLS, or a certificate is not good
    "job",  # a connection of another job with the same token
    "target",  # a connection for another process, whose address is out of date
    "crowded",  # a handshake that made room for newer ones, or one of too many from one source
    "unaccepted",  # an attempt to accept that failed, for want of descriptors, say; ten a second
    "purpose",  # authenticated, for a purpose that is not served here
    "fields",  # authenticated, but the opening lacks what its purpose needs
    "frame",  # longer than allowed; the connection is closed
    "mac",  # bytes that are not from the other side; the connection is closed
    "message",  # bytes that are not a message, or a message with impossible numbers
    "unsent",  # the other side does not read, or the message is longer than allowed
    "internal",  # code of ftcomm failed on it
    "data",  # an impossible frame of the data plane; the connection is closed
    "state",  # an impossible frame of the state transfer; the connection is closed
]


@dataclasses.dataclass
class Lines:
    """Admits at most `LINES` lines in `WINDOW` seconds. Not thread-safe."""

    since: float = float("-inf")  # when the window began
    said: int = 0  # lines in this window
    silent: int = 0  # left out since the last line

    def admit(self) -> str | None:
        """Returns what to add to the next line, which says how many were left out; None if it is to be left out."""
        now = time.monotonic()
        if now - self.since >= WINDOW:
            self.since, self.said = now, 0
        if self.said >= LINES:
            self.silent += 1
            return None
        self.said += 1
        silent, self.silent = self.silent, 0
        return f" (and {silent} of this kind before it, not logged)" if silent else ""


@dataclasses.dataclass
class _Tally:
    count: int = 0
    lines: Lines = dataclasses.field(default_factory=Lines)


_lock = threading.Lock()
_tallies: dict[DropKind, _Tally] = {}


def drop(kind: DropKind, text: str, *, error: BaseException | None = None, said: bool = True) -> None:
    """Count a drop and, if it is to be `said`, log one line; `error` adds its traceback. Any thread; does not block."""
    with _lock:
        tally = _tallies.setdefault(kind, _Tally())
        tally.count += 1
        if not said:
            return
        more = tally.lines.admit()
    if more is None:
        return
    log.warning("dropped (%s): %s%s", kind, printable(text), more, exc_info=error)


def counts() -> dict[str, int]:
    """Returns how often each kind was dropped since this process started. Any thread."""
    with _lock:
        return {kind: tally.count for kind, tally in _tallies.items()}


def printable(text: str, longest: int = 500) -> str:
    """Returns `text` in one line without control characters: its sender may be a stranger."""
    shown = "".join(char if char.isprintable() else "?" for char in text[:longest])
    return shown if len(text) <= longest else f"{shown}..."
