"""Asks the coordinator, for a rank that is in no view, whether it waits in vain: for a leader, or for another replica,
that cannot start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ftcomm.control import handshake
from ftcomm.control import messages as m
from ftcomm.control.links import ask
from ftcomm.control.liveness import lived_since
from ftcomm.control.unstarted import HOPELESS, NamedRank


async def ask_until_over(
    me: NamedRank,
    coordinator: tuple[str, int],
    credentials: handshake.Credentials,
    times: tuple[float, float],
    *,
    over: Callable[[], bool],
    alone: Callable[[], bool],
    tell: Callable[[m.Removed], None],
    started: float,
) -> None:
    """Ask after the two `times`, in seconds: first, and from then on in between, until it is `over`. It asks
    only while the rank is `alone`, and nobody else would tell it. `tell` gets an answer that there is no hope.
    `started`: when the process of the rank has (`ftcomm.control.liveness.started`).

    The coordinator cannot tell it unasked: it has connections with leaders alone, and would need one for each rank.
    """
    first, pause = times
    await asyncio.sleep(first)
    while not over():
        if alone():
            fields: handshake.Fields = {**me.fields, "lived": min(int(1e3 * lived_since(started)), handshake.MOST)}
            with contextlib.suppress(OSError):
                answer = await ask(coordinator, credentials, HOPELESS, fields)
                if isinstance(answer, m.Removed) and not over():
                    tell(answer)
        await asyncio.sleep(pause)
