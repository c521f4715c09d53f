"""DistributedDataParallel, as it is, over ftcomm: gloo's bits, and the right average when a replica is lost in it."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ..process.job import DEADLINE, Job
from . import ddp_bodies as bodies
from .test_steps import ENDLESS, end_together, stepped

ELEMENTS = 1_000_000  # 8 chunks of a sum in float32


def test_bits_are_those_of_gloo_in_every_way_of_using_ddp(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=2, body=bodies.beside_gloo) as job:
        for replica in range(2):
            assert job.join(replica) == [0], job.errors()
    digests = defaultdict(set)
    for _, _, note in job.notes():
        if note["kind"] == "digest":
            digests[note["way"]].add(note["digest"])
    assert set(digests) == set(bodies.WAYS)
    assert {way: len(of_all) for way, of_all in digests.items()} == dict.fromkeys(bodies.WAYS, 1)
    assert len(set.union(*digests.values())) > 3, "ways that differ have the same result"
    unfinished = "Expected to have finished reduction in the prior iteration before starting a new one"
    raised = [note["said"] for _, _, note in job.notes() if note["kind"] == "raised"]
    assert raised == [[["of the model", unfinished, unfinished], 4.0]] * 4


@pytest.mark.parametrize(("victim", "wire"), [pytest.param(0, None, marks=pytest.mark.protocol), (2, "fp8")])
def test_the_average_is_of_those_who_contributed(tmp_path: Path, victim: int, wire: str | None) -> None:
    """Also in the step in which one dies: part of its gradient is in the sum, and then counts."""
    near = {"rel": 1e-6 if wire is None else 1 / 16}
    survivors = [replica for replica in range(3) if replica != victim]
    with Job(tmp_path, replicas=3, body=bodies.one_dies, elements=ELEMENTS, steps=6, victim=victim, wire=wire) as job:
        for replica in survivors:
            assert job.join(replica) == [0], job.errors()
    every, rest = 7 / 3, sum(2**replica for replica in survivors) / 2
    for replica, _, note in job.notes():
        if note["kind"] != "step" or replica == victim:
            continue
        if note["step"] < 2:
            assert note["values"] == [pytest.approx(every, **near)], note
        elif note["step"] == 2:
            assert len(note["values"]) == 2, "the victim has died before or after the sum, not in it"
            assert note["values"] == pytest.approx(sorted([every, rest]), **near)
        else:
            assert note["values"] == [pytest.approx(rest, **near)], note
        assert note["size"] == (3 if note["step"] <= 2 else 2)
        assert note["rank"] == (replica if note["step"] <= 2 else survivors.index(replica))


def start_and_wrap(job: Job, joiner: int, others: set[int]) -> None:
    """The others train on while the joiner wraps its model and stands before its loop, and are in no view with it."""
    go = job.folder / "go"
    go.unlink(missing_ok=True)
    job.wait_event("loss", lambda events: all(x["replica"] != joiner for x in newest(events)))
    wrapped = len([note for _, _, note in job.notes() if note["kind"] == "wrapped"])
    job.start(joiner)
    deadline = time.monotonic() + DEADLINE
    while len([note for _, _, note in job.notes() if note["kind"] == "wrapped"]) < wrapped + job.ranks:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stepped(job, 10, others)
    assert {x["replica"] for x in newest(job.events)} == others
    go.touch()


def newest(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The members of the newest view."""
    return [event for event in events if event["kind"] == "view"][-1]["members"]  # type: ignore[no-any-return]


def test_a_replica_comes_back_into_a_training_with_ddp(tmp_path: Path) -> None:
    """It wraps its model, gathers objects and waits at a barrier while the others train; then it has their bits. Also
    as rank 0, from which DDP takes buffers; and its buckets are theirs in its first iteration."""
    with Job(tmp_path, replicas=3, body=bodies.train_with_ddp, steps=ENDLESS) as job:
        job.wait_contributing({0, 1, 2})
        for victim in (1, 0):
            stepped(job, 5, {0, 1, 2})
            seen = len(job.events)
            job.kill(victim)
            start_and_wrap(job, victim, {0, 1, 2} - {victim})
            job.wait_contributing({0, 1, 2}, since=seen)
        stepped(job, 5, {0, 1, 2})
        end_together(job, {0, 1, 2})
        assert not [note for _, _, note in job.notes() if note["kind"] == "stale"], "buffers of one who catches up"
        buckets = [note for _, _, note in job.notes() if note["kind"] == "buckets"]
    assert {(note["made"], note["again"]) for note in buckets} == {("6416, 27200", "6416, 27200")}


@pytest.mark.parametrize("late", ["plain", "hook"])
def test_backward_raises_what_its_all_reduce_fails_with_and_can_be_called_again(tmp_path: Path, late: str) -> None:
    """torch carries the error of a hook's future as a RuntimeError with its type and text, and no other. After a
    timeout it can not be called again: the op that goes on would write into a bucket that was filled anew."""
    with Job(tmp_path, replicas=2, body=bodies.failing_ops, late=late) as job:
        assert [job.join(replica) for replica in range(2)] == [[0], [0]], job.errors()
    raised = {note["what"]: note for _, _, note in job.notes() if note["kind"] == "raised"}
    assert ["to_dense()" in note["text"] for _, _, note in job.notes() if note["kind"] == "sparse"] == [True] * 2
    assert raised["plain, other calls"]["type"] == "MismatchError"
    assert raised["hook, other calls"]["type"] == "RuntimeError"
    assert "MismatchError: " in raised["hook, other calls"]["text"]
    assert [note["gradient"] for _, _, note in job.notes() if note["kind"] == "after"] == [1.5] * 4
    assert raised[f"{late}, late"]["type"] == ("CollectiveTimeout" if late == "plain" else "RuntimeError")
    assert "not done within the timeout" in raised[f"{late}, late"]["text"]
    assert raised[f"{late}, again"]["type"] == "CollectiveTimeout"
    assert "is at its end" in raised[f"{late}, again"]["text"]


def test_who_was_stopped_in_a_backward_and_removed_is_told_so(tmp_path: Path) -> None:
    """By its error: torch's thread that waited for the all-reduce does not end the process by a signal."""
    times = {"heartbeat_timeout": 2.0, "op_timeout": 8.0, "op_floor": 4.0}
    with Job(tmp_path, replicas=2, body=bodies.stopped_in_backward, **times) as job:
        job.wait_contributing({0, 1})
        job.wait_event("view without 1", lambda events: [x["replica"] for x in newest(events)] == [0])
        os.kill(job.processes[1, 0].pid, signal.SIGCONT)
        assert job.join(1) == [1]
        [(replica, _, text)] = job.errors()
        assert (replica, text.partition(":")[0]) == (1, "RemovedError")
        job.drain()
        assert job.join(0) == [0]


@pytest.mark.parametrize("error", ["LostError", "DivergenceError"])
def test_backward_says_how_its_group_has_ended(tmp_path: Path, error: str) -> None:
    with Job(tmp_path, replicas=2, body=bodies.group_that_ends, error=error) as job:
        codes = [job.join(replica) for replica in range(2)]
    assert codes[0] == [0], job.errors()
    said = [note for replica, _, note in job.notes() if replica == 0 and note["kind"] in ("raised", "returned")]
    assert [(note["kind"], note.get("type"), note.get("text")) for note in said] == [("raised", error, "that is it")]
