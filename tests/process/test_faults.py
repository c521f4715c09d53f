"""Losses of every kind but the plain kill: several at once, one rank of two, a frozen one, the coordinator."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.control.rank_node import RankNode
from ftcomm.control.views import View

from .bodies import end_apart, reduce_forever
from .job import DEADLINE, SILENCE, SLOWER, Job, Notes, fewer
from .test_kills import ENDLESS, check

pytestmark = pytest.mark.protocol

BIG = 2_000_003  # elements; an op takes some milliseconds, so that a kill falls into one


def job(folder: Path, replicas: int = 4, steps: int = ENDLESS, elements: int = BIG, **settings: object) -> Job:
    """Without a pause where ops are big: a kill then falls into one."""
    if elements == BIG:
        settings["pause"] = 0.0
    return Job(folder, replicas=replicas, body=reduce_forever, steps=steps, elements=elements, **settings)  # type: ignore[arg-type]


def finish(running: Job, replicas: set[int]) -> dict[int, dict[int, dict[str, object]]]:
    """Drain, and hold what was written down against the promises."""
    running.drain()
    for replica in replicas:
        assert running.join(replica) == [0] * running.ranks
    assert not running.errors()
    return check(running)


def steps_of(running: Job, replica: int) -> list[int]:
    return [note["step"] for r, _, note in running.notes() if r == replica and note["kind"] == "step"]


def go_on(running: Job, replicas: Iterable[int], steps: int = 3) -> None:
    """Until each of these has made so many steps more. However long that takes on a busy machine, one that makes none
    has failed."""
    for replica in replicas:
        done = len(steps_of(running, replica))
        goal = done + steps
        while done < goal:
            for _ in _until(lambda r=replica, n=done: len(steps_of(running, r)) > n, f"{replica} makes no steps"):  # type: ignore[misc]
                pass
            done = len(steps_of(running, replica))


@pytest.mark.parametrize("victims", [(1, 3), (0, 1, 2)])
def test_several_at_once(tmp_path: Path, victims: tuple[int, ...]) -> None:
    """All but one, too: the last one goes on alone."""
    survivors = set(range(4)) - set(victims)
    with job(tmp_path) as running:
        running.wait_contributing(set(range(4)))
        seen = len(running.events)
        for victim in victims:
            running.kill(victim)
        running.wait_event(
            f"view of {survivors} alone",
            lambda events: any(
                e["kind"] == "view" and {x["replica"] for x in e["members"]} == survivors for e in events[seen:]
            ),
        )
        for victim in victims:
            running.start(victim)
        running.wait_contributing(set(range(4)), since=seen)
        finish(running, set(range(4)))


def test_one_after_the_other_until_one_is_left(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        running.wait_contributing(set(range(4)))
        for victim in (2, 0, 3):
            running.kill(victim)
        running.wait_event("view of 1 alone", lambda events: any(_members(e) == [1] for e in events))
        done = len(steps_of(running, 1))
        for _ in _until(lambda: len(steps_of(running, 1)) > done + 2, "the last one did not go on"):
            pass
        steps = finish(running, {1})
        alone = [notes[100] for notes in steps.values() if 100 in notes and notes[100]["spans"][0][2] == [1]]  # type: ignore[index]
        assert alone, "the last one did not go on"


def _members(event: dict[str, object]) -> list[int]:
    return [x["replica"] for x in event["members"]] if event["kind"] == "view" else []  # type: ignore[index, attr-defined]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_of_two_ranks_dies_as_one(tmp_path: Path, rank: int) -> None:
    """Whichever of its ranks dies, the leader or the other: both shard groups go on without the replica."""
    with job(tmp_path, replicas=3, ranks=2, elements=300_001) as running:
        running.wait_contributing({0, 1, 2})
        for victim in (1, 0):
            seen = len(running.events)
            running.kill(victim, rank)
            running.wait_event(
                f"view without {victim}",
                lambda events, seen=seen, victim=victim: any(  # type: ignore[misc]
                    e["kind"] == "view" and victim not in _members(e) for e in events[seen:]
                ),
            )
            running.start(victim)
            running.wait_contributing({0, 1, 2}, since=seen)
        finish(running, {0, 1, 2})


@pytest.mark.parametrize("slow", [0, 1])
def test_the_ranks_of_a_replica_end_apart(tmp_path: Path, slow: int) -> None:
    """The one that is ready waits for the other: neither is taken for lost, and the job ends well."""
    with Job(tmp_path, replicas=2, ranks=2, body=end_apart, slow=slow, seconds=3.0) as running:
        assert running.join(0) == running.join(1) == [0, 0]
        assert not running.errors()
        running.do(running.server.wait_done())
        assert not running.server.failed
        assert not [event for event in running.events if event["kind"] in ("suspect", "failed")]


def test_the_coordinator_dies_and_nobody_notices(tmp_path: Path) -> None:
    with job(tmp_path, replicas=3, elements=1000) as running:
        running.wait_contributing({0, 1, 2})
        running.stop_coordinator()
        before = len(steps_of(running, 0))
        for _ in _until(lambda: len(steps_of(running, 0)) > before + fewer(50), "no steps without the coordinator"):
            pass
        running.start_coordinator()
        seen = len(running.events)
        running.kill(1)  # it is back: what it is needed for works
        running.wait_event("view without 1", lambda events: any(_members(e) == [0, 2] for e in events[seen:]))
        running.start(1)
        running.wait_contributing({0, 1, 2}, since=seen)
        epochs = [e["epoch"] for e in running.events if e["kind"] == "view"]
        assert epochs == sorted(set(epochs)), "an epoch was used twice"
        finish(running, {0, 1, 2})


def test_a_replica_that_dies_while_the_coordinator_is_away_is_lost_when_it_is_back(tmp_path: Path) -> None:
    with job(tmp_path, replicas=3, elements=1000, heartbeat_timeout=SILENCE) as running:
        running.wait_contributing({0, 1, 2})
        running.stop_coordinator()
        running.kill(2)
        running.start_coordinator()
        running.wait_event("view without 2", lambda events: any(_members(e) == [0, 1] for e in events))
        finish(running, {0, 1})


def test_a_coordinator_of_its_own_is_killed_and_started_again(tmp_path: Path) -> None:
    """`ftcomm coordinator` gets SIGKILL; while it is away the training goes on, and after it a loss is dealt with."""
    with job(tmp_path, replicas=3, elements=1000, heartbeat_timeout=SILENCE) as running:

        def steps(replica: int, more: int) -> None:
            goal = len(steps_of(running, replica)) + fewer(more)
            for _ in _until(lambda: len(steps_of(running, replica)) >= goal, f"replica {replica} makes no steps"):
                pass

        with running.own_coordinator() as own:
            steps(0, 40)
            own.kill()
            steps(0, 40)
            running.kill(2)
            own.start()
            steps(0, 40)
            running.start(2)
            steps(2, 40)
        for replica in range(3):
            running.kill(replica)
            running.processes[replica, 0].join(10)
        check(running)


def test_a_coordinator_that_comes_back_when_all_have_ended_keeps_its_store(tmp_path: Path) -> None:
    """Whether they had finished it cannot know."""
    with job(tmp_path, replicas=2, elements=1000, heartbeat_timeout=SILENCE) as running:
        with running.own_coordinator() as own:
            goal = len(steps_of(running, 0)) + fewer(40)
            for _ in _until(lambda: len(steps_of(running, 0)) >= goal, "no steps"):
                pass
            own.kill()
            for replica in range(2):
                running.kill(replica)
                running.processes[replica, 0].join(10)
            own.start()
            assert own.wait() == 1
        said = (tmp_path / "coordinator.log").read_text()
        assert "whether they had finished is not known" in said
        assert "no replica that holds the state" not in said
        assert (tmp_path / "views").read_bytes()


def test_drain_ends_all_at_the_same_step(tmp_path: Path) -> None:
    with job(tmp_path, elements=1000) as running:
        for replica in range(4):  # the first boundary would do, too
            for _ in _until(lambda r=replica: bool(steps_of(running, r)), f"replica {replica} makes no steps"):  # type: ignore[misc]
                pass
        finish(running, {0, 1, 2, 3})
        assert len({steps_of(running, replica)[-1] for replica in range(4)}) == 1
        refusals = [note["text"] for _, _, note in running.notes() if note["kind"] == "left"]
        assert len(refusals) == 4
        assert all("has left the job" in text for text in refusals), "an op after leaving would wait for nobody"


def test_a_job_that_ends_by_itself(tmp_path: Path) -> None:
    with job(tmp_path, replicas=2, elements=1000, steps=200) as running:
        assert running.join(0) == running.join(1) == [0]
        assert not running.errors()
        assert [len(steps_of(running, replica)) for replica in (0, 1)] == [200, 200]
        running.do(running.server.wait_done())


PATIENCE = DEADLINE if SLOWER == 1 else 1.5 * DEADLINE  # s


def _until(condition: object, text: str, seconds: float = PATIENCE) -> object:
    """Look again and again, for what no event tells."""
    end = time.monotonic() + seconds
    for _ in itertools.count():
        if condition():  # type: ignore[operator]
            return
        assert time.monotonic() < end, text
        yield time.sleep(0.02)


def late_to_hear(settings: Any, arguments: dict[str, Any]) -> None:
    """The control plane is told half a second late that ops run in a new view, as on a busy machine."""
    entered = RankNode.entered

    def late(self: RankNode, view: View, *args: Any) -> list[Any]:
        if self.view is not None:
            time.sleep(0.5)
        return entered(self, view, *args)

    RankNode.entered = late  # type: ignore[method-assign]


def note_members(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Who is in the result of an op, and who contributes says the group behind it; whenever that changes."""
    array, last = np.empty(1 << 18, np.float32), None
    for _ in ftcomm.steps(ENDLESS):
        array[:] = 2.0**group.replica
        group.allreduce(array)
        seen = [replica for replica in range(3) if int(array[-1]) >> replica & 1]
        now = seen, sorted(group.contributing)
        if now != last:
            notes.write(kind="step", seen=seen, contributing=now[1])
        last = now


def test_after_an_op_the_group_is_in_the_view_in_which_it_returned(tmp_path: Path) -> None:
    def steps(replica: int) -> list[dict[str, Any]]:
        return [note for who, _, note in job.notes() if who == replica and note["kind"] == "step"]

    with Job(tmp_path, replicas=3, body=note_members, prepare=late_to_hear) as job:
        job.wait_contributing({0, 1, 2})
        for survivor in (0, 2):
            for _ in _until(lambda s=survivor: steps(s)[-1:] and steps(s)[-1]["seen"] == [0, 1, 2], "no op of all"):  # type: ignore[misc]
                pass
        job.kill(1)
        for survivor in (0, 2):
            for _ in _until(lambda s=survivor: steps(s)[-1]["seen"] == [0, 2], "no op of those that are left"):  # type: ignore[misc]
                pass
            seen = [(step["seen"], step["contributing"]) for step in steps(survivor)]
            assert ([0, 2], [0, 1, 2]) not in seen[seen.index(([0, 1, 2], [0, 1, 2])) :]
