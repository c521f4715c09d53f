"""Decides how many programs (thread blocks) an all-reduce gets.

Programs wait for those of other ranks, so all have to be on the GPU at once: a program that finds no room starts when
another ends, which may be waiting for it. So a rank never launches more than its share of the GPU.
"""

from __future__ import annotations

import functools

# NCCL's own grid for copies between two H100, as published with torchcomms' comms/prims: 1 up to 64 KB, 16 from 1 MB,
# 32 at 1 GB. In between this goes up with the size.
_LARGE = 512 << 20
_EACH = 64 << 10


def wanted(nbytes: int) -> int:
    """The programs after which more of them stop to pay."""
    return 32 if nbytes >= _LARGE else min(16, max(1, -(-nbytes // _EACH)))


def room(multiprocessors: int, sharing: int) -> int:
    """Returns how many programs each of `sharing` ranks may have on a GPU of so many multiprocessors at once.

    One a multiprocessor, whatever registers the kernel takes: what can be launched at all fits there. One is left for
    what has to go on meanwhile: copies within a GPU may be kernels. Ranks in processes of their own take turns on the
    GPU unless MPS runs, and are counted all the same.
    """
    return (multiprocessors - 1) // sharing


@functools.lru_cache(1024)
def programs(nbytes: int, lanes: int, sms: int | None, fit: int) -> int:
    """The grid of an op of `nbytes` in `lanes` lanes; `sms` is the user's cap, None is without, `fit` is of `room`.

    No more than lanes, and no more than it takes for the busiest program to serve as few lanes as it must: of 13 and 15
    programs for 64 lanes both make five rounds.
    """
    lanes = max(1, lanes)
    most = min(lanes, fit, wanted(nbytes) if sms is None else sms)
    if most < 1:
        raise ValueError(f"no program: {sms=}, {fit=}")
    rounds = -(-lanes // most)
    return -(-lanes // rounds)
