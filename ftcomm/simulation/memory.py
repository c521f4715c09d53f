"""The memory of a simulated rank: laid out like a segment, but tiny, and read by the others as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftcomm.transport.segment import HEADER, REDUCED, SLOTS, Memory

CHUNK = 64  # bytes: two elements a member in a shard of four members, and few to copy


class TinyMemory(Memory):
    """In place of a `Segment` (the owner's) and of a `ShmPeer` (what the others see of it: the same object).

    Words are plain Python integers, so the largest epoch costs no more than the smallest, and a copy is cheap.
    """

    chunk = CHUNK
    address = 0  # nobody sleeps here, so nobody is woken
    how = "shm"

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.words: Any = [0] * (HEADER // 8)
        self._bytes = np.zeros(2 * SLOTS * CHUNK, np.uint8)
        self.buffer = memoryview(self._bytes)  # type: ignore[arg-type]

    def offset(self, region: int, slot: int) -> int:
        return ((region == REDUCED) * SLOTS + slot) * CHUNK

    def quiet(self) -> None:
        pass

    def close(self) -> None:
        pass
