"""The step loop with real replicas: one dies, comes back, catches up, and holds the bits of the others."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..process.job import DEADLINE, Job
from . import bodies

ENDLESS = 1_000_000


def digests(job: Job) -> dict[tuple[int, int], set[str]]:
    """(rank, step) -> the states after it, of the replicas that contribute. Each rank index is a group of its own."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for _, rank, note in job.notes():
        if note["kind"] == "step" and note["digest"]:
            found[rank, note["step"]].add(note["digest"])
    return found


def finals(job: Job, rank: int = 0) -> list[dict[str, Any]]:
    return [note for _, of, note in job.notes() if note["kind"] == "final" and of == rank]


def reported(job: Job, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.events if event["kind"] == kind]


def stepped(job: Job, count: int, replicas: set[int]) -> None:
    """Until each of `replicas` has done `count` steps more."""

    def last() -> dict[int, int]:
        done = {replica: note["step"] for replica, _, note in job.notes() if note["kind"] == "step"}
        return {replica: done.get(replica, -1) for replica in replicas}

    start, deadline = last(), time.monotonic() + DEADLINE
    while min(step - start[replica] for replica, step in last().items()) < count:
        failed = [error for error in job.errors() if error[0] in replicas]
        assert not failed, failed
        assert time.monotonic() < deadline
        time.sleep(0.02)


def catching_up(replica: int) -> Any:
    return lambda events: any(
        not member["contributing"] and member["replica"] == replica
        for event in events
        if event["kind"] == "view"
        for member in event["members"]
    )


def settle(job: Job, replicas: set[int]) -> None:
    """Until these are the members of the newest view, and the coordinator knows that all of them run in it."""
    machine, deadline = job.server._machine, time.monotonic() + DEADLINE
    while not (set(machine.view.replicas) == replicas and machine.job.settled):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end_together(job: Job, replicas: set[int]) -> None:
    """Drain; all leave at one step with one state."""
    job.drain()
    for replica in replicas:
        assert job.join(replica) == [0] * job.ranks, job.errors()
    assert all(len(states) == 1 for states in digests(job).values())
    for rank in range(job.ranks):
        assert len(finals(job, rank)) == len(replicas)
        assert all(note["contributes"] for note in finals(job, rank))
        assert len({note["digest"] for note in finals(job, rank)}) == 1


def test_a_joiner_catches_up_while_the_others_train(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, body=bodies.train, steps=ENDLESS, outlast=6) as job:
        job.wait_contributing({0, 1, 2})
        stepped(job, 5, {0, 1, 2})
        for victim in (1, 0):
            seen = len(job.events)
            job.kill(victim)
            job.start(victim)
            job.wait_contributing({0, 1, 2}, since=seen)
            stepped(job, 3, {0, 1, 2})
        end_together(job, {0, 1, 2})
        fetched = reported(job, "state_fetched")
        assert [event["replica"] for event in fetched] == [1, 0]
        assert all(event["replayed"] > 3 for event in fetched), "the transfer did not outlast any steps"
        assert all(event["bytes"] > 2_000_000 for event in fetched)


@pytest.mark.protocol
def test_a_joiner_that_did_something_else_is_stopped_before_it_contributes(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=2, body=bodies.train, steps=ENDLESS, strays=True) as job:
        job.wait_contributing({0, 1})
        stepped(job, 3, {0, 1})
        seen = len(job.events)
        job.kill(1)
        job.start(1)
        assert job.join(1) != [0]
        [said] = [text for *_, text in job.errors()]
        assert "it has caught up, but its 'optimizer' differ from what replica 0 has" in said
        assert not any(job.contribute({1}, at) for at in range(seen, len(job.events))), "it contributed"
        stepped(job, 3, {0})
        end_together(job, {0})


@pytest.mark.parametrize("ends", ["in the middle", pytest.param("while one is behind", marks=pytest.mark.protocol)])
def test_what_no_optimizer_updates_is_that_of_the_others(tmp_path: Path, ends: str) -> None:
    late = ends == "while one is behind"
    body, outlasts = bodies.train_what_no_optimizer_updates, math.inf if late else 4
    with Job(tmp_path, replicas=3, body=body, steps=ENDLESS, outlast=outlasts) as job:
        job.wait_contributing({0, 1, 2})
        for victim in (1,) if late else (1, 0):
            stepped(job, 3, {0, 1, 2})
            seen = len(job.events)
            job.kill(victim)
            job.start(victim)
            if late:
                job.wait_event("joiner", lambda events, seen=seen: catching_up(1)(events[seen:]))
                stepped(job, 5, {0, 1, 2})
                (tmp_path / "over").touch()
            else:
                job.wait_contributing({0, 1, 2}, since=seen)
        if late:
            for replica in range(3):
                assert job.join(replica) == [0], job.errors()
            assert len({note["digest"] for note in finals(job)}) == 1
        else:
            stepped(job, 3, {0, 1, 2})
            end_together(job, {0, 1, 2})


@pytest.mark.protocol
def test_two_joiners_at_once_and_a_source_that_dies(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=4, body=bodies.train, steps=ENDLESS, outlast=math.inf) as job:
        job.wait_contributing({0, 1, 2, 3})
        stepped(job, 3, {0, 1, 2, 3})
        seen = len(job.events)
        job.kill(2)
        job.kill(3)
        job.start(2)
        job.start(3)
        job.wait_event("joiner", lambda events: catching_up(2)(events[seen:]) and catching_up(3)(events[seen:]))
        # In a view that is given up again, since somebody had not installed it, a joiner may have run: it would end.
        settle(job, {0, 1, 2, 3})
        job.kill(0)
        settle(job, {1, 2, 3})
        (tmp_path / "go").touch()
        job.wait_contributing({1, 2, 3}, since=seen)
        stepped(job, 3, {1, 2, 3})
        end_together(job, {1, 2, 3})


@pytest.mark.protocol
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_each_rank_catches_up_from_its_own_shard_group(tmp_path: Path, transport: str) -> None:
    with Job(tmp_path, replicas=2, ranks=2, body=bodies.train, steps=ENDLESS, slow=0.2, transport=transport) as job:
        job.wait_contributing({0, 1})
        stepped(job, 3, {0, 1})
        seen = len(job.events)
        job.kill(0, rank=1)
        job.wait_event("loss", lambda events: any(event["kind"] == "view" for event in events[seen:]))
        job.start(0)
        job.wait_contributing({0, 1}, since=seen)
        stepped(job, 3, {0, 1})
        end_together(job, {0, 1})
        assert sorted(event["shard"] for event in reported(job, "state_fetched")) == [0, 1]


@pytest.mark.protocol
def test_all_sources_die(tmp_path: Path) -> None:
    """The joiner alone is left: its training cannot be continued, and it says so."""
    with Job(tmp_path, replicas=2, body=bodies.train, steps=ENDLESS, outlast=math.inf) as job:
        job.wait_contributing({0, 1})
        stepped(job, 3, {0, 1})
        seen = len(job.events)
        job.kill(1)
        job.start(1)
        job.wait_event("joiner", lambda events: catching_up(1)(events[seen:]))
        stepped(job, 2, {0})
        job.kill(0)
        assert job.join(1) == [1]
        ((replica, _, text),) = job.errors()
        assert replica == 1
        assert "no replica that holds the state of the training is left" in text or "no source is left" in text


@pytest.mark.protocol
def test_the_job_ends_before_the_state_has_arrived(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, body=bodies.train, steps=ENDLESS, outlast=math.inf) as job:
        job.wait_contributing({0, 1, 2})
        stepped(job, 5, {0, 1, 2})
        seen = len(job.events)
        job.kill(2)
        job.start(2)
        job.wait_event("joiner", lambda events: catching_up(2)(events[seen:]))
        stepped(job, 5, {0, 1, 2})
        (tmp_path / "over").touch()
        for replica in range(3):
            assert job.join(replica) == [0], job.errors()
        (last,) = {max(n["step"] for r, _, n in job.notes() if r == each and n["kind"] == "step") for each in range(3)}
        (fetched,) = reported(job, "state_fetched")
        assert fetched["step"] + fetched["replayed"] > last, "the state came before the end"
        assert len({note["digest"] for note in finals(job)}) == 1
        assert sorted(note["contributes"] for note in finals(job)) == [False, True, True]


@pytest.mark.protocol
def test_a_joiner_with_another_model_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, body=bodies.train, steps=ENDLESS, fresh_width=129) as job:
        job.wait_contributing({0, 1, 2})
        stepped(job, 3, {0, 1, 2})
        job.kill(1)
        job.start(1)
        assert job.join(1) == [1]
        ((replica, _, text),) = job.errors()
        assert replica == 1
        assert "does not fit here: model.0.weight is float32[128, 16] there and float32[129, 16] here" in text
        stepped(job, 5, {0, 2})
        end_together(job, {0, 2})


@pytest.mark.protocol
@pytest.mark.parametrize(
    ("body", "victim"),
    [
        pytest.param(bodies.train_without_state, 2, id="without state it counts at once"),
        pytest.param(bodies.train_by_hand, 0, id="without an optimizer it has the state before its first step"),
    ],
)
def test_a_joiner_that_does_not_wait_for_an_optimizer(tmp_path: Path, body: Callable[..., None], victim: int) -> None:
    with Job(tmp_path, replicas=3, body=body, steps=ENDLESS) as job:
        job.wait_contributing({0, 1, 2})
        stepped(job, 3, {0, 1, 2})
        seen = len(job.events)
        job.kill(victim)
        job.start(victim)
        job.wait_contributing({0, 1, 2}, since=seen)
        stepped(job, 3, {0, 1, 2})
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0], job.errors()
        assert all(len(states) == 1 for states in digests(job).values())
