"""Hitting a rank at a known place: in the middle of an op, which its own shared words tell."""

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


async def stop_inside_op(pid: int, op_seconds: float, chance: random.Random) -> float:
    """Stop `pid` while it has chunks posted that it has not taken, at a random point of an op; it stays stopped.

    Stopped, looked at, and let go on if it was between two ops: what was seen holds for as long as it is stopped.
    Returns `time.monotonic()` of the moment in which that was seen.
    """
    try:
        words = open_words(pid)
    except OSError as error:
        raise FtcommError(str(error)) from error
    for _ in range(TRIES):
        await asyncio.sleep(chance.uniform(0, op_seconds))
        stop(pid)
        if words[POSTED] > words[TAKEN]:
            return time.monotonic()
        os.kill(pid, signal.SIGCONT)
    raise FtcommError(f"process {pid} was never inside an op in {TRIES} looks at it")
