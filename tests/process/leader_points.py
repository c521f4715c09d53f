"""The points of `rank_points` to which a leader comes, be it in the process of its shard 0 or in one of its own:

python -m tests.process.leader_points       in place of ftcomm.control.leader_process; ORDERS says what to look for
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftcomm.control import companion_loop, leader_process, own_leader
from ftcomm.control import messages as m
from ftcomm.control.companion import begin
from ftcomm.control.leader import Leader
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.views import View
from tests.rigs.deadlines import DEADLINE

At = Callable[[str], None]
ORDERS = "ORDERS_OF_THE_TEST"  # a variable: the folder, the replica, and the process of rank 0


def at_points(folder: Path, replica: int, pid: int) -> At:
    """What a process calls at each point: it dies there, with the rank of `pid`, or stands still, if it is to."""
    order, here = (folder / f"{name}-{replica}" for name in ("do", "at"))

    def at(point: str) -> None:
        try:
            what, where = order.read_text().split()
            if where != point:
                return
            order.rename(here)
        except FileNotFoundError:  # nothing to do, or another thread does it
            return
        if what == "die":
            for each in (pid, os.getpid()):
                os.kill(each, signal.SIGKILL)
        end = time.monotonic() + DEADLINE
        while here.exists() and time.monotonic() < end:
            time.sleep(0.002)

    return at


def before(at: At, owner: type, name: str, point: Callable[..., str | None] | str, after: str = "") -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        at(point if isinstance(point, str) else point(*args) or "nowhere")
        result = method(*args, **kwargs)
        at(after)
        return result

    setattr(owner, name, wrapped)


def heard(view: View | None, message: m.Message) -> str | None:
    if isinstance(message, m.NewView):
        return "viewed" if view is None else "changed"
    return {m.Registered: "known", m.Queued: "queued", m.Prepare: "asked"}.get(type(message))


def watch_leader(at: At) -> None:
    """Of the leader in this process."""
    before(at, LeaderNode, "opened", "connected")
    before(at, LeaderNode, "from_coordinator", lambda self, message: heard(self.leader.view, message))
    before(at, Leader, "_at_boundary", "standing")
    before(at, Leader, "from_leader", "answered")


def watch_own_leader(folder: Path, replica: int) -> None:
    """Of the leader that this process is about to start."""
    os.environ[ORDERS] = f"{folder} {replica} {os.getpid()}"
    own_leader.OwnLeader.module = __name__


def leader_of(folder: Path, replica: int) -> int:
    """The process of the leader of the newest life of a replica."""
    return int((folder / f"leader-{replica}").read_text())


def _begin(folder: Path, replica: str, *args: Any) -> None:
    new = folder / f"new-leader-{replica}"
    new.write_text(str(os.getpid()))
    new.rename(folder / f"leader-{replica}")
    begin(*args)


if __name__ == "__main__":
    folder, replica, pid = os.environ[ORDERS].rsplit(" ", 2)
    companion_loop.begin = functools.partial(_begin, Path(folder), replica)
    watch_leader(at_points(Path(folder), int(replica), int(pid)))
    leader_process.main()
