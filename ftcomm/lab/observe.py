"""A rank seen from outside, without its help: its words as a peer reads them, and a way to hold it still.

For those who want to hit a rank at a known place: the demo and the benchmark of recovery.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path

from ftcomm.transport.segment import HEADER, MAGIC

STOP_TIMEOUT = 5.0  # seconds for a process to stop


def open_words(pid: int) -> memoryview:
    """The 64-bit words of the segment of process `pid`, read-only. Raises `OSError` if it has none, or is gone."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("/memfd:ftcomm"):
                continue
            fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # closed meanwhile
        try:
            words = memoryview(mmap.mmap(fd, HEADER, prot=mmap.PROT_READ)).cast("Q")
        finally:
            os.close(fd)
        if words[0] == MAGIC:
            return words
    raise FileNotFoundError(f"process {pid} has no segment of ftcomm, so it cannot be told when it is inside an op")


def stop(pid: int) -> None:
    """SIGSTOP, and wait until all threads of `pid` stand still: the kernel stops each when it next looks at it.

    Raises `TimeoutError`, and lets it go on then. Blocks for microseconds; milliseconds if the process has no core.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + STOP_TIMEOUT
    tasks = Path(f"/proc/{pid}/task")
    while any(_state(task / "stat") not in "TtZX" for task in tasks.iterdir()):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGCONT)
            raise TimeoutError(f"process {pid} did not stop on SIGSTOP within {STOP_TIMEOUT:g} s")


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
