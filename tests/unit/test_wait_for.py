"""A wait with an end: by the work, by time, by a cancellation at any moment."""

from __future__ import annotations

import asyncio

import pytest

from ftcomm.control.wait_for import wait_for

pytestmark = pytest.mark.protocol


def test_the_work_ends_it() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    async def fail() -> None:
        raise OSError("broken")

    assert asyncio.run(wait_for(60.0, work())) == 7
    with pytest.raises(OSError, match="broken"):
        asyncio.run(wait_for(60.0, fail()))


def test_time_ends_it_and_the_work() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(wait_for(0.01, work()))
    assert ended


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_is_never_lost(turns: int) -> None:
    """The work has ended `turns` turns of the loop before: `asyncio.wait_for` of Python 3.11 loses the one at 1."""

    async def scene() -> bool:
        gate = asyncio.Event()
        reached = []

        async def stranger() -> None:
            await wait_for(60.0, gate.wait())
            reached.append(True)
            await asyncio.Event().wait()

        task = asyncio.ensure_future(stranger())
        await asyncio.sleep(0.01)
        gate.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=60.0)
        return bool(done) and task.cancelled()

    assert asyncio.run(scene())
