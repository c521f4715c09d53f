"""A barrier that names the ranks that have not come: `dist.monitored_barrier`.

It is the barrier of the group, which a lost member does not fail. In addition each rank tells rank 0 that it has come,
so that rank 0 can name the others, in the words of torch's own. In the world of a job whose replicas have several ranks
not all ranks can send to rank 0, and none is named.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ftcomm.errors import CollectiveTimeout, FtcommError, LostError

_TAG = -(1 << 62)  # minus the number of the op, which is unique and the same on all ranks


def barrier(calls: Any, seconds: float, wait_all_ranks: bool) -> None:
    """Block until all ranks of the group beneath, `calls`, have called this, or `CollectiveTimeout` after `seconds`.

    On rank 0 it names the first rank that has not come, or with `wait_all_ranks` all of them.
    """
    me: int = calls.rank
    if seconds <= 0:
        raise CollectiveTimeout(f"Rank {me} timed out in monitoredBarrier: its timeout is {seconds:g} s")
    op = calls.barrier(async_op=True)
    number: int | None = getattr(op, "number", None)
    coming: dict[int, Any] = {}
    if number is not None:
        for rank in range(1, len(calls.roster)) if me == 0 else ():
            with contextlib.suppress(LostError):  # the barrier does without it
                coming[rank] = calls.recv(torch.empty(1, dtype=torch.uint8), rank, _TAG - number, async_op=True)
        if me != 0:
            with contextlib.suppress(LostError):
                calls.send(torch.zeros(1, dtype=torch.uint8), 0, _TAG - number, async_op=True)
    try:
        op.wait(seconds)
    except CollectiveTimeout as error:
        missing = [str(rank) for rank, message in coming.items() if not _has_come(message)]
        raise CollectiveTimeout(f"{_said(me, missing, wait_all_ranks)} within {seconds:g} s ({error})") from error


def _has_come(message: Any) -> bool:
    """Whether a message has come; its receive may have ended by its own timeout."""
    if not message.done():
        return False
    try:
        message.wait(0)
    except FtcommError:
        return False
    return True


def _said(me: int, missing: list[str], wait_all_ranks: bool) -> str:
    if me != 0:
        return (
            f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            "rank 0, which names those who have not come: the barrier did not end"
        )
    if not missing:
        return f"Rank {me} timed out in monitoredBarrier"
    if wait_all_ranks and len(missing) > 1:
        return f"Ranks {', '.join(missing)} failed to pass monitoredBarrier"
    return f"Rank {missing[0]} failed to pass monitoredBarrier"
