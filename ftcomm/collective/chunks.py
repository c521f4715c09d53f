"""Chunks are the unit of reduction, transfer and recovery. At a member a chunk is INPUT or FINAL, and nothing in
between.

Where chunks begin depends on the op alone, never on the members, so that members can tell each other after a view
change which chunks they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Contributors = tuple[int, ...]  # replicas whose inputs a FINAL chunk holds, ascending


def chunk_count(count: int, elements: int) -> int:
    """Returns the number of chunks of at most `elements` elements. At least 1: an op without any still compares
    calls."""
    return max(1, -(-count // elements))


def pack(chunks: Iterable[int], total: int) -> bytes:
    """Packs chunk numbers into a bitmap; its bit i, little endian, is chunk i."""
    bits = 0
    for chunk in chunks:
        bits |= 1 << chunk
    return bits.to_bytes(-(-total // 8), "little")


def unpack(bitmap: bytes) -> int:
    """Returns the bitmap as an integer, whose bit i is chunk i."""
    return int.from_bytes(bitmap, "little")


def spans(finals: Sequence[Contributors | None], elements: int, count: int) -> Iterator[tuple[int, int, Contributors]]:
    """Yields runs of chunks with the same contributors as (start, stop, contributors), in elements."""
    begin = 0
    for chunk, who in enumerate(finals):
        stop = min(count, (chunk + 1) * elements)
        following = finals[chunk + 1] if chunk + 1 < len(finals) else None
        if chunk + 1 == len(finals) or following != who:
            if who is not None:
                yield begin, stop, who
            begin = stop
