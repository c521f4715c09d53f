"""Whom a barrier names that did not end."""

from __future__ import annotations

from typing import Any

import pytest

from ftcomm.errors import CollectiveTimeout, FtcommError
from ftcomm.torch import monitored


class Message:
    """Of a receive: it has come, it is waited for, or it has ended by its own timeout, a moment before the barrier."""

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    def done(self) -> bool:
        return self.outcome != "waits"

    def wait(self, timeout: float) -> None:
        if self.outcome == "timed out":
            raise FtcommError("nobody has sent")


class Barrier:
    number = 3

    def wait(self, timeout: float) -> None:
        raise CollectiveTimeout("not done")


class Calls:
    rank, roster = 0, (0, 1, 2, 3)

    def barrier(self, async_op: bool) -> Barrier:
        return Barrier()

    def recv(self, x: Any, rank: int, tag: int, async_op: bool) -> Message:
        return Message(("", "come", "waits", "timed out")[rank])


def test_who_has_not_come_is_named_though_its_receive_has_ended() -> None:
    with pytest.raises(CollectiveTimeout, match=r"Ranks 2, 3 failed to pass monitoredBarrier"):
        monitored.barrier(Calls(), 1.0, True)
