"""Makes a running job smaller or larger, and waits until it is: its lowest replicas train, and the others are away."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftcomm.errors import FtcommError
from ftcomm.launch.admin import protocol
from ftcomm.launch.admin.client import AdminClient
from ftcomm.launch.commands.rolling_restart import LOOK
from ftcomm.launch.event_text import replicas
from ftcomm.launch.policy import State

_OVER = frozenset(state.value for state in State if state.over)


def who_leaves(status: protocol.Status, count: int) -> list[int]:
    """Returns the replicas that a job of `count` has no place for, and that are there now."""
    return [one.replica for one in status.replicas if one.replica >= count and one.state not in _OVER]


def resize(job: AdminClient, count: int, seconds: float, tell: Callable[[str], None]) -> None:
    """Let the replicas 0 to `count` - 1 train, and the others leave; block until that is so. `tell(text)` hears what is
    still awaited. Raises `FtcommError` if the job refuses, or after `seconds`; `JobEnded`."""
    job.ask(protocol.Resize(count))
    deadline = time.monotonic() + seconds
    while awaited := _awaited(job.status(), count):
        if time.monotonic() > deadline:
            raise FtcommError(f"after {seconds:g} s: {awaited}; wait longer with --timeout, or look at ftcomm status")
        tell(awaited)
        time.sleep(LOOK)


def _awaited(status: protocol.Status, count: int) -> str:
    leaving = who_leaves(status, count)
    failed = [one.replica for one in status.replicas if one.replica < count and one.state in _OVER]
    coming = [one.replica for one in status.replicas if one.replica < count and not one.contributes]
    if failed:
        raise FtcommError(
            f"{replicas(failed)} ended and will not start again; look at the output (ftcomm run --log-dir)"
        )
    said = [f"{replicas(leaving)} to leave"] if leaving else []
    said += [f"{replicas(coming)} to contribute"] if coming else []
    return f"waits for {' and '.join(said)}" if said else ""
