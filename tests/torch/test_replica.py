"""The step loop with votes: ranks that fail inside a step, pauses, policies, with real replicas and real kills."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from ..process.job import Job
from . import voting
from .test_steps import ENDLESS, end_together, finals, reported, stepped

ANYWHERE = ("start", "backward", "end", "nan")


def outcomes(job: Job) -> dict[tuple[int, int], list[tuple[int, str, tuple[int, ...]]]]:
    """What each life of each rank was told, in order."""
    found: dict[tuple[int, int], list[tuple[int, str, tuple[int, ...]]]] = defaultdict(list)
    for replica, rank, note in job.notes():
        if note["kind"] == "outcome":
            found[replica, rank].append((note["step"], note["decision"], tuple(note["counted"])))
    return found


def faults(job: Job, replicas: Container[int] = range(16)) -> set[tuple[str, int]]:
    return {(note["where"], note["step"]) for r, _, note in job.notes() if note["kind"] == "fault" and r in replicas}


@pytest.mark.protocol
def test_errors_inside_steps_are_repeated_with_equal_bits_while_a_replica_dies_and_comes_back(tmp_path: Path) -> None:
    with Job(
        tmp_path, replicas=3, body=voting.train, steps=ENDLESS, seed=12, share=0.2, faults=ANYWHERE, outlast=6
    ) as job:
        job.wait_contributing({0, 1, 2})
        stepped(job, 10, {0, 1, 2})
        seen = len(job.events)
        job.kill(1)
        job.start(1)
        job.wait_contributing({0, 1, 2}, since=seen)
        stepped(job, 10, {0, 1, 2})
        end_together(job, {0, 1, 2})
        assert {where for where, _ in faults(job, {0, 2})} == set(ANYWHERE)  # by this seed in the first ten steps
        assert len({note["steps"] for note in finals(job)}) == 1
        told = outcomes(job)
        assert told[0, 0] == told[2, 0]
        repeated = {step for step, decision, _ in told[0, 0] if decision == "REPEAT"}
        skipped = {step for step, decision, _ in told[0, 0] if decision == "SKIP"}
        failed = {step for where, step in faults(job) if where != "nan" and step <= max(repeated)}
        sure = {step for where, step in faults(job, {0, 2}) if where != "nan" and step <= max(repeated)}
        assert sure <= repeated <= failed, "1 may have died after its fault, before anybody heard of it"
        assert skipped <= {step for where, step in faults(job) if where == "nan"}
        assert skipped, "no fault of that kind came"
        assert [step for step, decision, _ in told[0, 0] if decision != "REPEAT"] == list(
            range(finals(job)[0]["steps"])
        )
        (fetched,) = reported(job, "state_fetched")
        assert fetched["replayed"] > 3, "the transfer did not outlast any steps"


def test_repeated_steps_leave_no_trace(tmp_path: Path) -> None:
    """The same weights as without any error, to the last bit, dropout and all."""
    ends = []
    for share in (0.0, 0.4):
        folder = tmp_path / str(share)
        folder.mkdir()
        passing = ("start", "backward", "end")
        with Job(folder, replicas=2, body=voting.train, steps=20, seed=2, share=share, faults=passing) as job:
            assert [job.join(0), job.join(1)] == [[0], [0]], job.errors()
            assert {where for where, _ in faults(job)} == (set(passing) if share else set())
            ends += [note["digest"] for note in finals(job)]
            repeated = [decision for _, decision, _ in outcomes(job)[0, 0]].count("REPEAT")
            assert bool(repeated) == bool(share)
    assert len(ends) == 4
    assert len(set(ends)) == 1


@pytest.mark.protocol
def test_two_ranks_of_a_replica_vote_as_one(tmp_path: Path) -> None:
    with Job(
        tmp_path, replicas=2, ranks=2, body=voting.train, steps=ENDLESS, seed=1, share=0.15, faults=ANYWHERE
    ) as job:
        job.wait_contributing({0, 1})
        stepped(job, 10, {0, 1})
        seen = len(job.events)
        job.kill(0, rank=1)
        job.wait_event("loss", lambda events: any(event["kind"] == "view" for event in events[seen:]))
        job.start(0)
        job.wait_contributing({0, 1}, since=seen)
        stepped(job, 5, {0, 1})
        end_together(job, {0, 1})
        told = outcomes(job)
        assert told[1, 0] == told[1, 1]
        assert {"REPEAT", "SKIP"} <= {decision for _, decision, _ in told[1, 0]}


@pytest.mark.protocol
def test_training_pauses_below_min_replicas_and_grows_meanwhile(tmp_path: Path) -> None:
    with Job(
        tmp_path, replicas=3, body=voting.train, steps=ENDLESS, seed=0, share=0.0, faults=ANYWHERE, min_replicas=2
    ) as job:
        job.wait_contributing({0, 1, 2})
        stepped(job, 3, {0, 1, 2})
        job.kill(1)
        stepped(job, 3, {0, 2})  # two are enough
        job.kill(2)
        job.wait_event("pause", lambda events: any(event["kind"] == "training_pauses" for event in events))
        job.start(1)
        job.wait_event("the end of it", lambda events: any(event["kind"] == "training_goes_on" for event in events))
        stepped(job, 3, {0, 1})
        end_together(job, {0, 1})
        assert not reported(job, "step_failed"), "a joiner did not know of the pause"
        told = outcomes(job)[0, 0]
        assert [step for step, _, _ in told] == list(range(len(told))), "a step was lost or repeated"
        below = [step for step, _, counted in told if len(counted) < 2]
        assert len(below) <= 1, "it went on below min_replicas for more than the step in which the replica was lost"
        for _, _, note in job.notes():
            if note["kind"] == "step" and note["scale"] != 1.0:
                assert note["scale"] in (math.sqrt(2 / 3), math.sqrt(1 / 3))
        (metrics,) = [note for replica, _, note in job.notes() if note["kind"] == "metrics" and replica == 0]
        assert metrics["paused"] > 0.0
        assert 0.0 < metrics["effective"] < 1.0


@pytest.mark.protocol
def test_a_pause_ends_for_all_when_nobody_comes(tmp_path: Path) -> None:
    with Job(
        tmp_path,
        replicas=3,
        body=voting.train,
        steps=ENDLESS,
        seed=0,
        share=0,
        faults=ANYWHERE,
        min_replicas=3,
        pause_timeout=0.3,
    ) as job:
        job.wait_contributing({0, 1, 2})
        stepped(job, 2, {0, 1, 2})
        job.kill(0)
        assert [job.join(1), job.join(2)] == [[1], [1]]
        errors = [text for _, _, text in job.errors()]
        assert len(errors) == 2
        assert all("training has paused for" in text and "min_replicas=3" in text for text in errors)


@pytest.mark.protocol
def test_begin_and_commit_by_hand(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, body=voting.begin_and_commit, steps=ENDLESS, pace=0.01) as job:
        job.wait_contributing({0, 1, 2})
        seen = len(job.events)
        job.kill(2)
        job.start(2)
        job.wait_contributing({0, 1, 2}, since=seen)
        stepped(job, 8, {0, 1, 2})
        (tmp_path / "over").touch()
        for replica in range(3):
            assert job.join(replica) == [0], job.errors()
        assert len({note["digest"] for note in finals(job)}) == 1
        steps = [
            (note["step"], note["decision"])
            for replica, _, note in job.notes()
            if replica == 0 and note["kind"] == "step"
        ]
        assert [step for step, decision in steps if decision == "COMMIT"] == list(range(steps[-1][0] + 1))
        assert {0, 1, 5, 6} <= {step for step, decision in steps if decision == "REPEAT"}


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_step_that_is_not_finite(tmp_path: Path, policy: str) -> None:
    with Job(tmp_path, replicas=2, body=voting.never_finite, nan=policy) as job:
        codes = [job.join(0), job.join(1)]
        decisions: dict[int, list[Any]] = defaultdict(list)
        for replica, _, note in job.notes():
            if note["kind"] == "step":
                decisions[replica].append((note["step"], note["decision"]))
        assert decisions[0] == decisions[1]
        if policy == "skip":
            assert codes == [[0], [0]]
            assert decisions[0] == [(step, "SKIP" if step == 3 else "COMMIT") for step in range(6)]
        else:
            assert codes == [[1], [1]]
            assert decisions[0][-1] == (3, "RAISE")
            errors = {replica: text for replica, _, text in job.errors()}
            assert "StepError: step 3: another replica has failed in it" in errors[0]
            assert "StepError: step 3: FtcommError: the loss or a gradient is not finite here" in errors[1]


DIFFERENT = {
    "optimizer": "optimizer is of the class AdamW there and SGD here",
    "rate": r"optimizer.param_groups.0.lr is 0.1 there and 0.2 here",
    "model": "model.weight is float32[4, 4] there and float32[5, 4] here",
    "same": None,
}


@pytest.mark.protocol
@pytest.mark.parametrize("what", DIFFERENT)
def test_replicas_that_were_started_differently_are_told_before_the_first_step(tmp_path: Path, what: str) -> None:
    with Job(tmp_path, replicas=3, body=voting.different, what=what) as job:
        codes = [job.join(replica) for replica in range(3)]
        expected = DIFFERENT[what]
        assert codes == ([[0], [0], [0]] if expected is None else [[0], [1], [0]]), job.errors()
        assert expected is None or expected in job.errors()[0][2]
