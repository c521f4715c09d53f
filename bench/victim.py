"""Killing a rank at a known place: in the middle of an op, which its own shared words tell."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

from ftcomm.errors import FtcommError
from ftcomm.launch.observe import open_words, stop
from ftcomm.transport.segment import POSTED, TAKEN

TRIES = 2000


async def kill_inside_op(pid: int, op_seconds: float, chance: random.Random) -> float:
    """SIGKILL `pid` while it has chunks posted that it has not taken, at a random point of an op.

    Stopped first, looked at, and let go on if it was between two ops: what was seen still holds when the kill comes.
    Returns `time.monotonic()` of the kill.
    """
    try:
        words = open_words(pid)
    except OSError as error:
        raise FtcommError(str(error)) from error
    for _ in range(TRIES):
        await asyncio.sleep(chance.uniform(0, op_seconds))
        stop(pid)
        if words[POSTED] > words[TAKEN]:
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return killed
        os.kill(pid, signal.SIGCONT)
    raise FtcommError(f"process {pid} was never inside an op in {TRIES} looks at it")
