"""Tells the coordinator that the leader of a replica has ended. Its shard 0 does, and its witness: the other ranks
speak through it."""

from __future__ import annotations

import asyncio
import contextlib

from ftcomm.control import handshake
from ftcomm.control.links import ask
from ftcomm.control.wait_for import wait_for

PURPOSE = "leaderless"
_TIMEOUT = 1.0  # s; then the end of the ranks tells it, without the reason


def reason(leader: int) -> str:
    """Returns why the replica of a leader ends, of which `leader` was the process."""
    return f"its leader, process {leader}, has ended; its log, or that of the kernel (dmesg), may say why"


def told(replica: int, life: str, reason: str) -> handshake.Fields:
    """Returns what the coordinator is told. `life` is the incarnation of the replica."""
    return {"replica": replica, "life": life, "reason": reason[: handshake.LONGEST_FIELD]}


async def tell(
    coordinator: tuple[str, int], credentials: handshake.Credentials, replica: int, life: str, reason: str
) -> None:
    """Tell it once, if the coordinator is there."""
    fields = told(replica, life, reason)
    with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
        await wait_for(_TIMEOUT, ask(coordinator, credentials, PURPOSE, fields))
