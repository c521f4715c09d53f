"""What came in from the network and was thrown away: counted by kind, and said in the log without flooding it.

Bad input never ends a loop. It is dropped, or the connection that brought it is closed; both are counted here, and
`counts` tells how often. A kind says at most `LINES` lines in `WINDOW` seconds; the first line of a later window names
how many were left out.
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

Kind = Literal[
    "handshake",  # no handshake of ftcomm: garbage, too long, closed or silent in the middle
    "version",
    "token",
    "tls",  # one side alone speaks it, or a certificate is not good
    "job",  # of another one with the same token
    "target",  # for another process than this one, by an address that is out of date
    "crowded",  # a handshake that had to make room for newer ones, or one of too many from one place
    "purpose",  # authenticated, for something that is not served here
    "fields",  # authenticated, but the opening lacks what its purpose needs
    "frame",  # longer than allowed; the connection is closed
    "mac",  # bytes on a connection that are not the other side's; it is closed
    "message",  # bytes that are no message, or one whose numbers cannot be
    "unsent",  # the other side does not read, or the message is longer than allowed
    "internal",  # our own code failed on it
    "data",  # a frame of the data plane that cannot be; the connection is closed
    "state",  # a frame of the state transfer that cannot be; the connection is closed
]


@dataclasses.dataclass
class _Tally:
    count: int = 0
    since: float = float("-inf")  # when the window began
    said: int = 0  # lines in it
    silent: int = 0  # dropped since the last line


_lock = threading.Lock()
_tallies: dict[Kind, _Tally] = {}


def drop(kind: Kind, text: str, *, error: BaseException | None = None, said: bool = True) -> None:
    """Count it, and say it in one line, if it is to be `said`; `error` adds its traceback. From any thread; does not
    block."""
    now = time.monotonic()
    with _lock:
        tally = _tallies.setdefault(kind, _Tally())
        tally.count += 1
        if not said:
            return
        if now - tally.since >= WINDOW:
            tally.since, tally.said = now, 0
        if tally.said >= LINES:
            tally.silent += 1
            return
        tally.said += 1
        silent, tally.silent = tally.silent, 0
    more = f" (and {silent} of this kind before it, not logged)" if silent else ""
    log.warning("dropped (%s): %s%s", kind, printable(text), more, exc_info=error)


def counts() -> dict[str, int]:
    """How often each kind was dropped since this process started. From any thread."""
    with _lock:
        return {kind: tally.count for kind, tally in _tallies.items()}


def printable(text: str, longest: int = 500) -> str:
    """`text` in one line that no terminal obeys: whoever sent it may be anybody."""
    shown = "".join(char if char.isprintable() else "?" for char in text[:longest])
    return shown if len(text) <= longest else f"{shown}..."
