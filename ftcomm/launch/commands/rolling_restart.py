"""Restarts the replicas of a running job one after the other, while the others train on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch.admin import protocol
from ftcomm.launch.admin.client import AdminClient

LOOK = 0.1  # s between looks at the job


class NotBack(FtcommError):
    """A replica was restarted and does not contribute again."""


def which(status: protocol.Status, asked: Sequence[int], all_of_them: bool) -> list[int]:
    """Returns the replicas to restart, in order. Raises `SettingsError`."""
    known = [replica.replica for replica in status.replicas]
    if all_of_them == bool(asked):
        raise SettingsError(f"say which to restart: --all, or --replica N (one of {', '.join(map(str, known))})")
    strangers = [number for number in asked if number not in known]
    if strangers:
        raise SettingsError(
            f"--replica {strangers[0]}: this job has the replicas {', '.join(map(str, known))}; name one of them"
        )
    return known if all_of_them else list(dict.fromkeys(asked))


def restart(job: AdminClient, number: int, seconds: float, tell: Callable[[str], None]) -> None:
    """Restart one replica and block until it contributes again; `tell(text)` hears how far it is.

    Raises `FtcommError` if the job refuses, `NotBack` after `seconds`, `JobEnded`.
    """
    before = job.status().replicas[number]
    job.ask(protocol.RestartReplica(number))
    deadline = time.monotonic() + seconds
    while True:
        now = job.status().replicas[number]
        if now.starts > before.starts and now.contributes:
            return
        if now.starts > before.starts and now.state not in ("running", "waiting"):
            raise NotBack(
                f"replica {number} was started again and {now.state}; look at its output (ftcomm run --log-dir)"
            )
        if time.monotonic() > deadline:
            raise NotBack(
                f"replica {number} does not contribute again after {seconds:g} s; wait longer with --timeout, or look "
                "at ftcomm status"
            )
        tell(_how_far(before, now))
        time.sleep(LOOK)


def _how_far(before: protocol.ReplicaStatus, now: protocol.ReplicaStatus) -> str:
    if now.starts == before.starts:
        return "leaves at a coming step"
    return "catches up" if now.member else now.joining or "starts"
