"""Tells the coordinator that the leader of a replica has ended, which nobody but its rank 0 could: all others speak
through the leader."""

from __future__ import annotations

import asyncio
import contextlib

from ftcomm.control import handshake
from ftcomm.control.links import ask
from ftcomm.control.wait_for import wait_for

PURPOSE = "leaderless"
_TIMEOUT = 1.0  # s; then the end of the ranks tells it, without the reason


async def tell(
    coordinator: tuple[str, int], credentials: handshake.Credentials, replica: int, life: str, reason: str
) -> None:
    """Tell it once, if the coordinator is there. `life` is the incarnation of the replica."""
    fields: handshake.Fields = {"replica": replica, "life": life, "reason": reason[: handshake.LONGEST_FIELD]}
    with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
        await wait_for(_TIMEOUT, ask(coordinator, credentials, PURPOSE, fields))
