"""Decides what follows when a member cannot be reached, by what the failure says. Pure.

OTHER         no kernel answers there, or another process does: the two cannot reach each other, and the
              coordinator is told so at once
HUNG_UP       a kernel there has taken the connection, which was closed before the handshake was over: the network
              leads there, and a kernel lives. Somebody without the token may flood that port. Try again; only
              what lasts for as long as an op may take is like OTHER
a `shortage`  this process lacks a descriptor, a thread, memory or a port, which says nothing of the other. Try
              again; a process that lacks it for as long as an op may take gives itself up
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import threading

from ftcomm.control.handshake import HungUp
from ftcomm.control.timeouts import REPORT

LASTS = 2.5 * REPORT  # s without a failure after which a trouble is over; attempts come more often

_FOR_DESCRIPTORS = "raise its limit on open files (ulimit -n)"
_FOR_MEMORY = "this process may have no more memory: raise its limit (ulimit -v), or that of its container or job"
_MENDS = {
    errno.EMFILE: _FOR_DESCRIPTORS,
    errno.ENFILE: "this host has no more of them: raise fs.file-max, or close what holds them",
    errno.ENOMEM: _FOR_MEMORY,
    errno.ENOBUFS: _FOR_MEMORY,
    errno.EADDRNOTAVAIL: "this host has no free port",
}
_NO_THREAD = "can't start new thread"
_FOR_THREADS = (
    "This process may have no more threads or memory: raise its limits (ulimit -u, ulimit -v), or those of its "
    "container or job (pids.max)"
)


class Cause(enum.Enum):
    OTHER = "other"
    HUNG_UP = "hung up"


def cause_of(error: BaseException) -> Cause:
    """Returns what a failure to reach a member says, by itself or by what it was raised from, unless it is a
    `shortage`."""
    known: BaseException | None = error
    while known is not None:
        if isinstance(known, HungUp):
            return Cause.HUNG_UP
        known = known.__cause__
    return Cause.OTHER


class NoThread(RuntimeError):
    """No thread can be had now; the text has the mend."""


def shortage(error: BaseException | None) -> str:
    """Returns what this process lacks, with the mend, if that is why `error` or what it was raised from came; or
    nothing."""
    while error is not None:
        if isinstance(error, NoThread):
            return str(error)
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_THREAD in str(error)):
            return f"{str(error) or 'no memory'}. {_FOR_THREADS}"
        if isinstance(error, OSError) and error.errno in _MENDS:
            return f"{error.strerror or error}; {_MENDS[error.errno]}"
        error = error.__cause__
    return ""


def start(thread: threading.Thread) -> RuntimeError | None:
    """Start a thread. Returns the error if none can be had now, with the mend. Raises `RuntimeError` if it cannot be
    started for another reason."""
    try:
        thread.start()
    except RuntimeError as error:
        lacks = shortage(error)
        if not lacks:
            raise
        return NoThread(lacks)
    return None


@dataclasses.dataclass
class _Trouble:
    """A failure that comes again and again."""

    since: float = 0.0
    last: float = float("-inf")

    def lasts(self, now: float) -> float:
        """Note the failure once more. Returns for how long it has come."""
        self.since = self.since if self.is_there(now) else now
        self.last = now
        return now - self.since

    def is_there(self, now: float) -> bool:
        return now - self.last <= LASTS


class FailedDials:
    """The failures that last. An op may take `op` seconds; all times are in seconds."""

    def __init__(self, op: float) -> None:
        self._op = op
        self._hung_up: dict[int, _Trouble] = {}  # by replica
        self._short = _Trouble()

    def hung_up(self, replica: int, now: float) -> bool:
        """Note that the port of `replica` has hung up. True if it has for as long as an op may take."""
        return self._hung_up.setdefault(replica, _Trouble()).lasts(now) >= self._op

    def reached(self, replica: int) -> None:
        """Note that there is a connection with `replica`."""
        self._hung_up.pop(replica, None)

    def short(self, now: float) -> bool:
        """Note that this process lacks something. True if it has for as long as an op may take."""
        return self._short.lasts(now) >= self._op

    def is_short(self, now: float) -> bool:
        """Whether this process lacks something, as far as it knows."""
        return self._short.is_there(now)
