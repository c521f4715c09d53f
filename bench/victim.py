"""Killing a rank at a known place: in the middle of an op, which its own shared words tell."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import time
from pathlib import Path

from ftcomm.errors import FtcommError
from ftcomm.transport.segment import HEADER, MAGIC, POSTED, TAKEN

TRIES = 2000


def open_words(pid: int) -> memoryview:
    """The 64-bit words of the segment of rank `pid`, read-only; raises `FtcommError` if it has none."""
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
    raise FtcommError(f"process {pid} has no segment of ftcomm, so nobody can tell when it is inside an op")


async def kill_inside_op(pid: int, op_seconds: float, chance: random.Random) -> float:
    """SIGKILL `pid` while it has chunks posted that it has not taken, at a random point of an op.

    Stopped first, looked at, and let go on if it was between two ops: what was seen still holds when the kill comes.
    Returns `time.monotonic()` of the kill.
    """
    words = open_words(pid)
    for _ in range(TRIES):
        await asyncio.sleep(chance.uniform(0, op_seconds))
        os.kill(pid, signal.SIGSTOP)
        _wait_stopped(pid)
        if words[POSTED] > words[TAKEN]:
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return killed
        os.kill(pid, signal.SIGCONT)
    raise FtcommError(f"process {pid} was never inside an op in {TRIES} looks at it")


def _wait_stopped(pid: int) -> None:
    """Until all threads of `pid` have stopped; microseconds, milliseconds if it did not have a core."""
    deadline = time.monotonic() + 5
    tasks = Path(f"/proc/{pid}/task")
    while any(_state(task / "stat") not in "TtZX" for task in tasks.iterdir()):
        if time.monotonic() > deadline:
            raise FtcommError(f"process {pid} did not stop on SIGSTOP within 5 s")


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
