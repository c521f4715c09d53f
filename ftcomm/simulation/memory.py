"""The memory of a simulated rank: laid out like a segment, but tiny, and read by the others as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftcomm.transport.segment import HEADER, POSTED, SLOTS, SPAN, Memory

CHUNK = 64  # bytes: few to copy. One cache line, so one member alone has a shard of it in two-shot


class TinyMemory(Memory):
    """In place of a `Segment` (the owner's) and of a `ShmPeer` (what the others see of it: the same object).

    Words are plain Python integers, so the largest epoch costs no more than the smallest, and a copy is cheap.
    """

    chunk = CHUNK
    address = 0  # nobody sleeps here, so nobody is woken
    transport = "shm"
    shares_memory = True

    def __init__(self, replica: int, chunk: int = CHUNK) -> None:
        self.replica = replica
        self.chunk = chunk  # bytes
        self.words: Any = [0] * (HEADER // 8)
        self._bytes = np.zeros(2 * SLOTS * SPAN * chunk, np.uint8)
        self.buffer = memoryview(self._bytes)  # type: ignore[arg-type]

    def offset(self, region: int, slot: int) -> int:
        return ((region != POSTED) * SLOTS * SPAN + slot) * self.chunk

    def serves(self, epoch: int) -> bool:
        return True

    def enter(self, epoch: int) -> None:
        pass

    def quiet(self) -> None:
        pass

    def close(self) -> None:
        pass
