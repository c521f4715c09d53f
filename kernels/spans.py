"""Arrays as kernels see them: addresses of elements in a row. Imports neither torch nor Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ftcomm.kernels.dtypes import DTYPES

MOST_SOURCES = 16  # of a reduction


class MemorySpan(NamedTuple):
    address: int  # by which kernels reach it
    count: int  # type: ignore[assignment]  # of elements; not the method of a tuple
    dtype: str  # of dtypes.DTYPES
    device: str  # "cpu", "cuda:0"

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * DTYPES[self.dtype].itemsize


def aligned(spans: Sequence[MemorySpan]) -> bool:
    """Whether all begin at multiples of 16 bytes, so that kernels may move 128 bits at a time."""
    return math.gcd(16, *(span.address for span in spans)) == 16
