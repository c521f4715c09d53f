"""Kill a replica in the middle of an all-reduce, and be sure that it was in the middle.

The segment through which a rank speaks to its group says how far it is. It has POSTED more chunks than it has TAKEN
exactly while an op is in flight; and while it has POSTED more than it has REDUCED, the others wait for a part of the
sum that only it was to compute. We read that as a peer would, from /proc, with the process stopped; if it is anywhere
else at that moment it goes on, none the wiser, and we try again.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import signal
import struct
import time
from pathlib import Path

from ftcomm.transport.segment import HEADER, MAGIC, POSTED, REDUCED, TAKEN

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
        with _open_segment(pid) as header:
            return _kill(pid, header, time.monotonic() + patience)
    except (OSError, ProcessLookupError):
        return None


def _kill(pid: int, header: mmap.mmap, deadline: float) -> Kill | None:
    attempts = 0
    while time.monotonic() < deadline:
        if not _owes(*_words(header)):  # look first, so as to stop it rarely
            time.sleep(0.0002)
            continue
        attempts += 1
        os.kill(pid, signal.SIGSTOP)
        _until_stopped(pid, deadline)
        words = _words(header)
        if _owes(*words):
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return Kill(pid, at, words[0] >> 32, *(word & COUNTER for word in words), attempts)
        os.kill(pid, signal.SIGCONT)
    return None


def _words(header: mmap.mmap) -> tuple[int, int, int]:
    """(POSTED, REDUCED, TAKEN), each epoch << 32 | counter."""
    posted, reduced, taken = (struct.unpack_from("<Q", header, index * 8)[0] for index in (POSTED, REDUCED, TAKEN))
    return posted, reduced, taken


def _owes(posted: int, reduced: int, taken: int) -> bool:
    """Between two epochs the words are of different ones; then we do not know, and look again."""
    return posted >> 32 == reduced >> 32 == taken >> 32 and posted > max(reduced, taken)


def _until_stopped(pid: int, deadline: float) -> None:
    """SIGSTOP takes effect when the kernel next looks at each thread; only then do the words stand still."""
    tasks = Path(f"/proc/{pid}/task")
    while time.monotonic() < deadline:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        if all(state in "tTZX" for state in states):
            return
        time.sleep(0.0001)


def _open_segment(pid: int) -> mmap.mmap:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd).startswith("/memfd:ftcomm"):
            handle = os.open(fd, os.O_RDONLY)
            try:
                header = mmap.mmap(handle, HEADER, prot=mmap.PROT_READ)
            finally:
                os.close(handle)
            if struct.unpack_from("<Q", header, 0)[0] == MAGIC:
                return header
            header.close()
    raise FileNotFoundError(f"process {pid} has no segment of ftcomm")
