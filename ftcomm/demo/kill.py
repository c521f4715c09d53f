"""Kill a replica in the middle of an all-reduce, and be sure that it was in the middle.

The segment through which a rank speaks to its group says how far it is. It has POSTED more chunks than it has TAKEN
exactly while an op is in flight; and while it has POSTED more than it has REDUCED, the others wait for a part of the
sum that only it was to compute. We read that as a peer would, from /proc, with the process stopped; if it is anywhere
else at that moment it goes on, none the wiser, and we try again. While it stands still the others come as far as they
can without it, which is where they are all inside that op.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from ftcomm.kernels.epochs import COUNTER, COUNTS
from ftcomm.lab.observe import open_words, stop
from ftcomm.transport.segment import POSTED, REDUCED, TAKEN

GATHER = 1.0  # s for the others to come into the op; they may be computing


@dataclasses.dataclass(frozen=True)
class Kill:
    """A SIGKILL at `at` (`time.monotonic()`), when so many chunks of the epoch were `posted`, `reduced` and `taken`."""

    pid: int
    at: float
    epoch: int
    posted: int
    reduced: int
    taken: int
    attempts: int


def kill_in_mid_op(
    pid: int, others: Iterable[int], announce: Callable[[Kill], None] = lambda kill: None, timeout: float = 20.0
) -> Kill | None:
    """SIGKILL `pid` while it and the `others` of its group are inside an all-reduce. Blocks; None if that did not come
    up or a process is gone. `announce` is called just before, as the loss may be known sooner than this returns."""
    try:
        deadline = time.monotonic() + timeout
        return _kill(pid, open_words(pid), [open_words(other) for other in others], announce, deadline)
    except OSError:
        return None


def _kill(
    pid: int, words: memoryview, others: Sequence[memoryview], announce: Callable[[Kill], None], deadline: float
) -> Kill | None:
    attempts = 0
    while time.monotonic() < deadline:
        if not _owes(words[POSTED], words[REDUCED], words[TAKEN]):  # look first, so as to stop it rarely
            time.sleep(0.0002)
            continue
        attempts += 1
        stop(pid)
        progress = words[POSTED], words[REDUCED], words[TAKEN]
        if _owes(*progress) and _gather(others, words[POSTED]):
            posted, reduced, taken = (word & (COUNTS - 1) for word in progress)
            kill = Kill(pid, time.monotonic(), progress[0] >> COUNTER, posted, reduced, taken, attempts)
            announce(kill)
            os.kill(pid, signal.SIGKILL)
            return kill
        os.kill(pid, signal.SIGCONT)
    return None


def _gather(others: Sequence[memoryview], posted: int) -> bool:
    """Wait until all of them have posted as much."""
    deadline = time.monotonic() + GATHER
    while any(words[POSTED] < posted for words in others):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0002)
    return True


def _owes(posted: int, reduced: int, taken: int) -> bool:
    """Whether it still owes the others something. False between two epochs, when the words are of different ones."""
    return posted >> COUNTER == reduced >> COUNTER == taken >> COUNTER and posted > max(reduced, taken)
