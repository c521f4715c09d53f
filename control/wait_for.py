"""A wait with an end that loses no cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

AwaitedT = TypeVar("AwaitedT")


async def wait_for(seconds: float, work: Coroutine[Any, Any, AwaitedT]) -> AwaitedT:
    """Does what `asyncio.wait_for` does. Before Python 3.12 that swallows a cancellation that comes just as the work
    ends, so that a caller that cancels and waits for the task would wait for ever. Raises `asyncio.TimeoutError`; the
    work has ended then."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _end(task)
        raise
    if not done:
        await _end(task)
        raise asyncio.TimeoutError
    return task.result()


async def _end(task: asyncio.Task[AwaitedT]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # so that asyncio does not report it as never retrieved
