"""Memory for the copies that atomic ops keep, used again by later ones.

Fresh memory costs a page fault every 4 KB: with it an atomic op of 1 MB takes ten times as long as a plain one, with
used memory a third longer.
"""

from __future__ import annotations

import numpy as np

from ftcomm.arrays.flat import Bytes

LIMIT = 32 << 20  # idle bytes of a process, about a bucket of gradients

_idle: list[Bytes] = []  # each operation on it is atomic


def acquire(nbytes: int) -> Bytes:
    """Returns a buffer of at least `nbytes`, with anything in it. Any thread."""
    try:
        buffer = _idle.pop()
    except IndexError:
        return np.empty(nbytes, np.uint8)
    return buffer if len(buffer) >= nbytes else np.empty(nbytes, np.uint8)


def release(buffer: Bytes) -> None:
    """Take back a buffer that is no longer used. Any thread."""
    if sum(map(len, _idle)) + len(buffer) <= LIMIT:
        _idle.append(buffer)
