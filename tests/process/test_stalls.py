"""A member that stands still while its control thread lives: that one is removed, and never one of its victims.

Its heartbeats go on, so nothing but the reports of those who wait for it can tell. The survivors finish the same op,
and it learns what it was removed for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.groups.static_group import StaticGroup

from .bodies import reduce_forever
from .job import SLOWER, Job, Notes
from .rank_points import Points, watch_points
from .stalled_ranks import watch_late
from .test_faults import _members, _until, go_on, steps_of
from .test_growth import wait_back, wait_there
from .test_kills import ENDLESS, check

pytestmark = pytest.mark.protocol

ONE_SHOT, TWO_SHOT = 300, 300_001  # elements
# Short, with a heartbeat that a busy machine can keep. A stall is removed about 8 s after it began.
LONGER = 2 if SLOWER == 1 else 3
CHAIN: dict[str, Any] = dict(op_timeout=5.0 * LONGER, heartbeat_timeout=1.6 * LONGER, op_floor=1.7 * LONGER)


def job(folder: Path, replicas: int = 4, elements: int = ONE_SHOT, **settings: Any) -> Job:
    arguments: dict[str, Any] = dict(steps=ENDLESS, elements=elements, prepare=watch_points, transport="shm", **CHAIN)
    return Job(folder, replicas=replicas, body=reduce_forever, **{**arguments, **settings})


def begin(running: Job) -> None:
    """Until ops of this size are so well known that the deadline is the floor."""
    everybody = set(range(running.replicas))
    running.wait_contributing(everybody)
    go_on(running, everybody, 20)


def wait_removed(running: Job, replica: int, seen: int = 0) -> str:
    """Why it was removed; nobody else must have been."""

    def losses(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in events[seen:] if event["kind"] == "view" and "lost" in event["why"]]

    running.wait_event(f"view without {replica}", lambda events: bool(losses(events)))
    loss = losses(running.events)[0]
    assert loss["why"].startswith(f"lost {replica}: "), f"not {replica} was removed: {loss}"
    assert "; lost " not in loss["why"], f"not {replica} alone was removed: {loss}"
    return str(loss["why"])


def finish(running: Job, survivors: set[int], removed: dict[int, str], anew: Set[int] = frozenset()) -> None:
    """The survivors go on; the `removed` wake up and hear `why`. Those `anew` had to be started a second time."""
    go_on(running, survivors)
    points = Points(running.folder)
    for replica in removed:
        points.release(replica)
        for rank in range(running.ranks):
            with contextlib.suppress(ProcessLookupError):  # the others of the replica may have ended
                os.kill(running.processes[replica, rank].pid, signal.SIGCONT)
        assert running.join(replica) == [1] * running.ranks
    for replica, why in removed.items():
        texts = [text for r, _, text in running.errors() if r == replica]
        assert len(texts) == running.ranks
        assert all(text.startswith("RemovedError") for text in texts), texts
        assert any(why in text for text in texts), texts  # a rank may merely hear that its leader has gone
    assert {replica for replica, _, _ in running.errors()} == set(removed) | set(anew)
    assert {x["replica"] for x in _last_view(running)["members"]} == survivors, "somebody else was removed as well"
    running.drain()
    for replica in survivors:
        assert running.join(replica) == [0] * running.ranks, running.errors()
    check(running)


def _last_view(running: Job) -> dict[str, Any]:
    return [event for event in running.events if event["kind"] == "view"][-1]


@pytest.mark.parametrize(
    ("point", "transport", "elements", "stuck"),
    [
        ("op", "shm", ONE_SHOT, 1),  # a dead lock of the script, slow input
        pytest.param("op", "tcp", TWO_SHOT, 0, marks=pytest.mark.sweep),
        ("posted", "shm", TWO_SHOT, 3),  # the driver
        ("taken", "shm", ONE_SHOT, 2),
        ("taken", "tcp", TWO_SHOT, 1),
    ],
)
def test_the_one_that_stands_still_is_removed(
    tmp_path: Path, point: str, transport: str, elements: int, stuck: int
) -> None:
    points = Points(tmp_path)
    with job(tmp_path, elements=elements, transport=transport) as running:
        begin(running)
        points.hold(stuck, point)
        wait_there(running, points, stuck, point)
        why = wait_removed(running, stuck)
        assert "waits for it (replica" in why
        finish(running, set(range(4)) - {stuck}, {stuck: "waits for it (replica"})


@pytest.mark.parametrize(("transport", "rank"), [pytest.param("shm", 0, marks=pytest.mark.sweep), ("tcp", 1)])
def test_one_rank_of_a_replica_stands_still(tmp_path: Path, transport: str, rank: int) -> None:
    """The other one goes on with its group; the replica is removed as one."""
    points = Points(tmp_path)
    with job(tmp_path, replicas=3, ranks=2, elements=TWO_SHOT, transport=transport, watched=rank) as running:
        begin(running)
        points.hold(1, "op")
        wait_there(running, points, 1, "op")
        wait_removed(running, 1)
        finish(running, {0, 2}, {1: "waits for it (replica"})


def wait_inside(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Rank 1 of replica 1 stands still. Those of replica 2 meet before every step, so that its shard 0 waits for its
    rank 1, which waits for replica 1, and the other ranks 0 for replica 2."""
    ranks = [(group.replica, rank) for rank in range(group.shards)]
    mine = StaticGroup.in_job(group, "mine", ranks) if group.replica == 2 else None
    for step in ftcomm.steps(ENDLESS):
        if step == 20 and (group.replica, group.shard) == (1, 1):
            notes.write(kind="stands still")
            threading.Event().wait()
        if mine is not None:
            mine.barrier()
        group.allreduce(np.ones(3))


def test_who_waits_for_a_rank_of_its_own_replica_is_no_culprit(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, ranks=2, body=wait_inside, transport="shm", **CHAIN) as running:
        wait_removed(running, 1)
        running.kill(1)
        running.drain()
        for replica in (0, 2):
            assert running.join(replica) == [0, 0], running.errors()
    assert "stands still" in {note["kind"] for _, _, note in running.notes()}
    assert {replica for replica, _, _ in running.errors()} <= {1}


def test_who_complains_late_is_no_culprit(tmp_path: Path) -> None:
    """Two of three that wait have a deadline far away: asked by the coordinator, they say at once that they wait."""
    points = Points(tmp_path)
    with job(tmp_path, elements=TWO_SHOT, prepare=watch_late, late=[0, 3]) as running:
        begin(running)
        points.hold(1, "op")
        wait_there(running, points, 1, "op")
        wait_removed(running, 1)
        finish(running, {0, 2, 3}, {1: "waits for it (replica 2 reported the stall)"})


def test_two_stand_still_at_once(tmp_path: Path) -> None:
    points = Points(tmp_path)
    with job(tmp_path) as running:
        begin(running)
        for stuck in (1, 2):
            points.hold(stuck, "op")
        for stuck in (1, 2):
            wait_there(running, points, stuck, "op")
        running.wait_event("view of the others", lambda events: any(_members(e) == [0, 3] for e in events))
        assert {e["why"].partition(":")[0] for e in running.events if "lost" in e.get("why", "")} == {
            "lost 1",
            "lost 2",
        }
        finish(running, {0, 3}, {1: "waits for it", 2: "waits for it"})


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_one_stands_still_before_a_boundary_that_others_stand_at(tmp_path: Path, ranks: int) -> None:
    """A replica joins there, so they wait for what its leader knows of that; afterwards it joins."""
    points = Points(tmp_path)
    with job(tmp_path, ranks=ranks) as running:
        begin(running)
        running.kill(3)
        running.wait_event("loss", lambda events: any(_members(e) == [0, 1, 2] for e in events))
        seen = len(running.events)
        points.hold(1, "promised")
        running.start(3)
        wait_there(running, points, 1, "promised")
        why = wait_removed(running, 1, seen)
        # Had another replica passed that boundary before it could promise, the proposal is withdrawn, and the others go
        # on to the next op.
        assert any(
            wait in why for wait in (": op ", "the change of view waits for it", "the step boundary waits for it")
        )

        anew = wait_back(running, {0, 2, 3}, (3,), seen)
        assert ranks == 2 or not anew, "a replica of one rank is known to run as a whole"
        finish(running, {0, 2, 3}, {1: why.partition(": ")[2]}, anew)


def test_a_driver_that_stands_still_holds_up_a_change_of_view(tmp_path: Path) -> None:
    """Another replica dies meanwhile. The view without that one is never in force; the next is without both."""
    points = Points(tmp_path)
    with job(tmp_path, elements=TWO_SHOT) as running:
        begin(running)
        points.hold(1, "taken")
        wait_there(running, points, 1, "taken")
        running.kill(2)
        running.wait_event("loss", lambda events: any(_members(e) == [0, 1, 3] for e in events))
        seen = len(running.events)
        assert "the change of view waits for it" in wait_removed(running, 1, seen)
        finish(running, {0, 3}, {1: "the change of view waits for it"})


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_process_is_a_stall(tmp_path: Path, transport: str) -> None:
    with job(tmp_path, transport=transport, elements=TWO_SHOT) as running:
        begin(running)
        running.signal(1, signal.SIGSTOP)
        why = wait_removed(running, 1)
        assert "waits for it" in why
        assert "its process lives but has not spoken" in why
        assert "it is stopped (SIGSTOP, SIGTSTP)" in why
        finish(running, {0, 2, 3}, {1: "waits for it"})


@pytest.mark.parametrize("point", ["op", "taken"])
def test_who_is_merely_slow_is_waited_for(tmp_path: Path, point: str) -> None:
    """It stands still for less than the floor of the deadlines, again and again; then all end at the same step."""
    points = Points(tmp_path)
    with job(tmp_path, replicas=3) as running:
        begin(running)
        for slow in (1, 2, 1):
            points.hold(slow, point)
            wait_there(running, points, slow, point)
            assert points.there(slow)
            _pause(CHAIN["op_floor"] / 2)
            points.release(slow)
            go_on(running, {0, 1, 2}, 2)
        running.drain()
        for replica in range(3):
            assert running.join(replica) == [0], running.errors()
        assert not running.errors()
        assert not [e for e in running.events if e["kind"] == "suspect" or "lost" in e.get("why", "")]
        check(running)
        assert len({steps_of(running, replica)[-1] for replica in range(3)}) == 1


def _pause(seconds: float) -> None:
    for _ in _until(iter([False] * int(seconds / 0.02) + [True]).__next__, "time stands still"):  # it sleeps 20 ms
        pass
