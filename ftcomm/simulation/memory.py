"""The memory of a simulated rank: laid out like a segment, but tiny, and read by the others as it is."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ftcomm.transport.base import Peer
from ftcomm.transport.segment import HOST, LEAST, POSTED, SLOTS, SPAN, Layout, sized

CHUNK = 64  # bytes: few to copy. One cache line, so one member alone has a slice of it in two-shot


@functools.cache
def tiny(members: int, chunk: int = CHUNK) -> Layout:
    """The layout of the memory of a member of so many."""
    return dataclasses.replace(sized(HOST, members), chunk=chunk)


class Words(list[int]):
    """A list that many know, and no plain data of who knows it."""


class SparseWords(dict[int, int]):
    """Words of which few are in use; the others are zero."""

    def __missing__(self, word: int) -> int:
        return 0


def staging(chunk: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns plain memory for the staging of a rank: a group of many members has more mirrors than a process may have
    mappings."""
    return np.zeros(2 * SLOTS * SPAN * chunk, np.uint8)


def offset(region: int, slot: int, chunk: int) -> int:
    """Returns where a chunk begins in it."""
    return ((region != POSTED) * SLOTS * SPAN + slot) * chunk


class TinyMemory(Peer):
    """Stands for a `Segment` (the owner's) and for a `ShmPeer` (what the others see of it: the same object).

    Words are plain Python integers, so the largest epoch costs no more than the smallest, and a copy is cheap.
    """

    chunk = CHUNK
    address = 0  # no thread sleeps here, so none is woken
    transport = "shm"
    shares_memory = True

    def __init__(self, replica: int, chunk: int = CHUNK, nonce: str = "", members: int = LEAST) -> None:
        super().__init__(replica)
        self.nonce = nonce
        self._lay_out(tiny(members, chunk))
        self.words: Any = Words([0] * (self.header // 8))
        self._bytes = staging(chunk)
        self.buffer = memoryview(self._bytes)  # type: ignore[arg-type]

    def offset(self, region: int, slot: int) -> int:
        return offset(region, slot, self.chunk)
