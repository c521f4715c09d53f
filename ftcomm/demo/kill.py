"""Kill a replica in the middle of an all-reduce, and be sure that it was in the middle.

The segment through which a rank speaks to its group says how far it is. It has POSTED more chunks than it has TAKEN
exactly while an op is in flight; and while it has POSTED more than it has REDUCED, the others wait for a part of the
sum that only it was to compute. We read that as a peer would, from /proc, with the process stopped; if it is anywhere
else at that moment it goes on, none the wiser, and we try again.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time

from ftcomm.launch.observe import open_words, stop
from ftcomm.transport.segment import POSTED, REDUCED, TAKEN

COUNTER = 0xFFFFFFFF  # the low half of a word


@dataclasses.dataclass(frozen=True)
class Kill:
    """`at`: `time.monotonic()` of the SIGKILL. `posted`, `reduced`, `taken`: chunks in the epoch, at that moment."""

    pid: int
    at: float
    epoch: int
    posted: int
    reduced: int
    taken: int
    attempts: int


def kill_in_mid_op(pid: int, patience: float = 20.0) -> Kill | None:
    """SIGKILL `pid` while it is inside an all-reduce. Blocks; None if that did not come up or the process is gone."""
    try:
        return _kill(pid, open_words(pid), time.monotonic() + patience)
    except OSError:
        return None


def _kill(pid: int, words: memoryview, deadline: float) -> Kill | None:
    attempts = 0
    while time.monotonic() < deadline:
        if not _owes(words[POSTED], words[REDUCED], words[TAKEN]):  # look first, so as to stop it rarely
            time.sleep(0.0002)
            continue
        attempts += 1
        stop(pid)
        progress = words[POSTED], words[REDUCED], words[TAKEN]
        if _owes(*progress):
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return Kill(pid, at, progress[0] >> 32, *(word & COUNTER for word in progress), attempts)
        os.kill(pid, signal.SIGCONT)
    return None


def _owes(posted: int, reduced: int, taken: int) -> bool:
    """Between two epochs the words are of different ones; then we do not know, and look again."""
    return posted >> 32 == reduced >> 32 == taken >> 32 and posted > max(reduced, taken)
