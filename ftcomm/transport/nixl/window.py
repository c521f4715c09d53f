"""Limits the bytes on their way to a peer, and chooses the connection (rail) for each piece of a payload.

A rail is one UCX worker on one set of devices. Each has a window of its own, so that one slow rail takes less of the
work and does not hold up the others; frames are put in order at the other end. DQPLB of torchcomms spreads its
transfers over queue pairs in this way (papers: "Collective Communication for 100k+ GPUs").
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

LEAST = 64 << 10  # bytes of the smallest piece worth a put
ALIGN = 64  # bytes of a cache line; pieces begin at multiples


class Window:
    """Bytes put and not yet known to have arrived, never above `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0

    def fits(self, nbytes: int) -> bool:
        return self.bytes + nbytes <= self.most

    def open(self, nbytes: int) -> None:
        self.bytes += nbytes
        if self.bytes > self.most:
            raise AssertionError(f"{self.bytes} bytes on their way, expected at most {self.most}")

    def close(self, nbytes: int) -> None:
        self.bytes -= nbytes
        if self.bytes < 0:
            raise AssertionError(f"{nbytes} bytes have arrived, {self.bytes + nbytes} were on their way")


def cut(nbytes: int, rails: int) -> list[tuple[int, int]]:
    """Returns (offset, bytes) of the pieces of a payload for up to `rails` rails, as equal as cache lines allow."""
    pieces = max(1, min(rails, nbytes // LEAST))
    if pieces == 1:
        return [(0, nbytes)]
    lines = -(-nbytes // ALIGN)
    borders = [min(nbytes, lines * i // pieces * ALIGN) for i in range(pieces + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(borders)]


def spread(pieces: Sequence[tuple[int, int]], windows: Sequence[Window]) -> list[int] | None:
    """Returns a rail for each piece, the emptiest with room. None if a piece finds none, and then nothing may be
    sent."""
    planned = [window.bytes for window in windows]
    rails = []
    for _, nbytes in pieces:
        rail = min(range(len(windows)), key=planned.__getitem__)
        planned[rail] += nbytes
        if planned[rail] > windows[rail].most:
            return None
        rails.append(rail)
    return rails
