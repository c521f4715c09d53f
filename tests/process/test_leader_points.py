"""The leader of a replica of two ranks is killed, or stopped, at every point at which its replica changes something:
while it joins, catches up, takes a view, stands at a boundary, and ends.

Whichever process comes to the point is held there, the leader is hit, maybe something else fails as well, and what was
held goes on. A replica whose leader is killed is lost as one; nobody waits for it longer than for any other loss.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ftcomm.control.liveness import state

from .job import STALL, Job
from .leader_points import leader_of
from .rank_points import CATCHING_UP, CHANGING, JOINING, Points
from .test_faults import _until, go_on
from .test_growth import (
    ALL,
    JOINER,
    begin,
    finish,
    hold_to_promises,
    lose,
    ran_too_early,
    restart_coordinator,
    shuffled,
    wait_back,
    wait_there,
    wait_without,
)
from .test_growth import job as growing

pytestmark = pytest.mark.protocol

ALONE, COORDINATOR, ANOTHER, HELD = (
    "alone",
    "with the coordinator",
    "with another replica",
    "while its shard 0 stays held",
)
EACH = (ALONE, COORDINATOR, ANOTHER, HELD)  # in turn
HEARTBEAT = 2.0
LONGER = 1.5 * HEARTBEAT


def some(count: int) -> list[Any]:
    """So many points with each fault in turn; as sweeps, all points with each fault."""
    sweeps = [
        pytest.param((fault,), None, marks=[pytest.mark.sweep, pytest.mark.timeout(1800)], id=fault) for fault in EACH
    ]
    return [pytest.param(EACH, count, id="some"), *sweeps]


def job(folder: Path, **settings: Any) -> Job:
    return growing(folder, ranks=2, **settings)


def kill_leader(running: Job, points: Points, replica: int, fault: str, other: int) -> None:
    """Kill the leader of `replica`, of which a process is held, and maybe `other` or the coordinator."""
    os.kill(leader_of(running.folder, replica), signal.SIGKILL)
    if fault == COORDINATOR:
        restart_coordinator(running)
    elif fault == ANOTHER:
        running.kill(other)
    elif fault == HELD:
        go_on(running, ALL - {replica, JOINER}, 2)
    points.release(replica)
    running.processes[replica, 0].join(60)
    assert running.processes[replica, 0].exitcode == 1
    running.processes[replica, 1].kill()  # as the launcher would; one that was in no view yet waits for a new leader


def lose_joiner(running: Job) -> None:
    """Kill it, and wait for the end of its leader, which might come to the point that is meant for the next one."""
    leader = leader_of(running.folder, JOINER)
    lose(running, JOINER)
    for _ in _until(lambda: state(leader) in ("", "Z"), f"the leader {leader} does not end with its rank 0"):
        pass


def of(*replicas: int) -> Any:
    """Errors of these are none."""
    return lambda replica, rank, text: replica in replicas


def of_or_too_early(*replicas: int) -> Any:
    """Nor those of a joiner that ran in a view which was given up."""
    return lambda replica, rank, text: replica in replicas or ran_too_early(JOINER)(replica, rank, text)


@pytest.mark.parametrize(("faults", "count"), some(4))
def test_a_leader_that_is_killed_at_a_point_of_a_joining(tmp_path: Path, faults: tuple[str, ...], count: int) -> None:
    """Another replica that dies with it comes back before the next point."""
    points = Points(tmp_path)
    with job(tmp_path) as running:
        begin(running)
        lose_joiner(running)
        for number, point in enumerate(shuffled(JOINING + CATCHING_UP)[:count]):
            fault, seen = faults[number % len(faults)], len(running.events)
            print(point, fault)
            points.hold(JOINER, point)
            running.start(JOINER)
            wait_there(running, points, JOINER, point)
            kill_leader(running, points, JOINER, fault, 1)
            go_on(running, {0}, 2)
            if fault == ANOTHER:
                wait_without(running, 1, seen)
                running.start(1)
                running.wait_contributing({0, 1}, since=seen)
            go_on(running, {0, 1}, 2)
        running.start(JOINER)
        finish(running, ALL, of(JOINER))


@pytest.mark.parametrize(("faults", "count"), some(4))
def test_a_leader_that_is_killed_at_a_point_of_a_change(tmp_path: Path, faults: tuple[str, ...], count: int) -> None:
    """Of one of two members, while a third replica joins."""
    points = Points(tmp_path)
    with job(tmp_path) as running:
        begin(running)
        lose_joiner(running)
        for number, point in enumerate(shuffled(CHANGING)[:count]):
            fault, seen = faults[number % len(faults)], len(running.events)
            print(point, fault)
            points.hold(1, point)
            running.start(JOINER)
            wait_there(running, points, 1, point)
            kill_leader(running, points, 1, fault, JOINER)
            wait_without(running, 1, seen)
            go_on(running, {0}, 2)
            running.start(1)
            if fault == ANOTHER:
                running.start(JOINER)
            wait_back(running, ALL, (JOINER,), seen)
            lose_joiner(running)
        running.start(JOINER)
        finish(running, ALL, of_or_too_early(1))


SWEPT = [pytest.param(fault, marks=pytest.mark.sweep) for fault in (ALONE, ANOTHER)]


@pytest.mark.parametrize("fault", [HELD, COORDINATOR, *SWEPT])
def test_a_leader_that_is_killed_when_its_replica_has_ended_its_steps(tmp_path: Path, fault: str) -> None:
    """The work is done, and the others end as they should."""
    points = Points(tmp_path)
    with job(tmp_path, replicas=4) as running:
        begin(running)
        points.hold(1, "ending")
        running.drain()
        wait_there(running, points, 1, "ending")
        os.kill(leader_of(tmp_path, 1), signal.SIGKILL)
        if fault == COORDINATOR:
            restart_coordinator(running)
        elif fault == ANOTHER:
            running.kill(3)
        others = {0, 2} if fault == ANOTHER else {0, 2, 3}
        for replica in others if fault == HELD else ():
            assert running.join(replica) == [0, 0], running.errors()
        points.release(1)
        for replica in others:
            assert running.join(replica) == [0, 0], running.errors()
        running.join(1)
        hold_to_promises(running, of(1))
        running.do(running.server.wait_done())
        assert not running.server.failed


# -- stopped -----------------------------------------------------------------------------------------------------------


def stop_leader(running: Job, points: Points, replica: int) -> int:
    """Of which a process is held, which goes on; returns the leader."""
    leader = leader_of(running.folder, replica)
    os.kill(leader, signal.SIGSTOP)
    points.release(replica)
    return leader


@pytest.mark.parametrize("count", [2, pytest.param(None, marks=[pytest.mark.sweep, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize(
    ("replica", "among"), [(JOINER, JOINING + CATCHING_UP), (1, CHANGING)], ids=["a joining", "a change"]
)
def test_a_leader_that_is_stopped_at_a_point_and_goes_on(
    tmp_path: Path, replica: int, among: tuple[str, ...], count: int | None
) -> None:
    """For longer than the heartbeat timeout: its kernel answers, so the joiner comes in when it goes on."""
    points = Points(tmp_path)
    with job(tmp_path, heartbeat_timeout=HEARTBEAT) as running:
        begin(running)
        lose_joiner(running)
        for point in shuffled(among)[:count]:
            seen = len(running.events)
            points.hold(replica, point)
            running.start(JOINER)
            wait_there(running, points, replica, point)
            leader = stop_leader(running, points, replica)
            time.sleep(LONGER)
            os.kill(leader, signal.SIGCONT)
            running.wait_contributing(ALL, since=seen)
            assert not [e for e in running.events[seen:] if "lost" in e.get("why", "")], running.events[seen:]
            lose_joiner(running)
        running.start(JOINER)
        finish(running, ALL)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dies", [False, True], ids=["", "and another replica dies"])
def test_a_leader_that_is_stopped_for_good_at_a_point_of_a_change_is_a_stall(tmp_path: Path, dies: bool) -> None:
    """Which is removed by the number that the user has set, and not before."""
    points = Points(tmp_path)
    with job(tmp_path, replicas=4, **STALL) as running:
        begin(running)
        lose_joiner(running)
        for point in shuffled(CHANGING):
            seen = len(running.events)
            points.hold(1, point)
            running.start(JOINER)
            wait_there(running, points, 1, point)
            leader = stop_leader(running, points, 1)
            if dies:
                running.kill(3)
            wait_without(running, 1, seen)
            go_on(running, {0}, 2)
            running.kill(1)
            os.kill(leader, signal.SIGKILL)
            for replica in (1, 3) if dies else (1,):
                running.start(replica)
            wait_back(running, {0, 1, 2, 3}, (JOINER,), seen)
            lose_joiner(running)
        running.start(JOINER)
        finish(running, {0, 1, 2, 3}, of_or_too_early(1))
