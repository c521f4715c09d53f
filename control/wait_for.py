"""A wait with an end that loses no cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_for(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes as the work has just ended: who
    cancels and then waits for the task would wait for ever. Raises `asyncio.TimeoutError`; the work has ended then."""
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


async def _end(task: asyncio.Task[T]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # it is no news any more
