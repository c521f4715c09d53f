"""What a sender leaves in the queues of UCX if it is killed while it tells somebody something."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_LARGEST = 1 << 16  # bytes of a queue; what is larger holds long messages


def mapped() -> list[tuple[int, int]]:
    """Returns the queues that this process has mapped, some more than once: the inode, and where its head lies."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split()
        begin, end = (int(edge, 16) for edge in span.split("-"))
        if name and "ucx_shm_posix" in name[0] and end - begin <= _LARGEST:
            found.append((int(inode), begin))
    return found


def queues() -> dict[int, int]:
    """Returns those that this process has mapped: the inode of each, and where its head lies."""
    return dict(reversed(mapped()))


def own() -> set[int]:
    """The inodes of what this process receives by: it keeps these files open, so that others can map them."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
        except OSError:  # the one that this listing was read from
            continue
    return found


def claim(head: int) -> None:
    """Claim the next element, as a sender does that is killed before it has filled it."""
    ctypes.c_uint64.from_address(head).value += 1
