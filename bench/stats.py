"""The few numbers that make a measurement out of many timings."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) of at least one value, interpolated between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """A row of timings for each rank -> for each iteration, that of the rank for which it took longest."""
    return [max(times) for times in zip(*per_rank, strict=True)]


def algbw(size: int, seconds: float) -> float:
    """Bytes of the array over time, GB/s (decimal)."""
    return size / seconds / 1e9


def busbw_factor(ranks: int) -> float:
    """All-reduce: what each rank has to send and receive over the size of the array, as in nccl-tests."""
    return 2 * (ranks - 1) / ranks
