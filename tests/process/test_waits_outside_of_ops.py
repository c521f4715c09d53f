"""Whoever holds others up outside of ops is named, with the line: a message that is not sent, a vote inside a replica
to which a rank does not come, and a step boundary where the membership changes. In one job, one after the other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.diagnosis.causes import StallCause
from ftcomm.diagnosis.collect import JobPlace, ReplicaPlace, collect
from ftcomm.diagnosis.facts import Rank
from ftcomm.diagnosis.verdict import StallVerdict, judge
from ftcomm.recorder.files import folders
from ftcomm.settings import Settings
from ftcomm.training import StepLoop

from .job import DEADLINE, Job, Notes


def own_runs(settings: Settings, arguments: dict[str, Any]) -> None:
    os.environ["XDG_RUNTIME_DIR"] = arguments["marks"]


def before_the_send(marks: Path) -> None:
    while not (marks / "sends").exists():
        time.sleep(0.02)


def before_the_vote(marks: Path) -> None:
    while not (marks / "votes").exists():
        time.sleep(0.02)


def before_the_boundary(marks: Path) -> None:
    while not (marks / "stands").exists():
        time.sleep(0.02)


def body(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    marks, me, x = Path(arguments["marks"]), (group.replica, group.shard), np.ones(4, np.float32)
    for step in StepLoop(group=group).steps(2):
        if step == 0 and me == (1, 0):
            before_the_send(marks)
            group.send(x, 0, tag=7)
        elif step == 0 and me == (0, 0):
            group.recv(x, 1, tag=7)
        elif step == 1 and me == (0, 1):
            before_the_vote(marks)
    if me == (1, 1):
        before_the_boundary(marks)
    if me == (1, 0):
        group.leave()
    while not group.drained and 1 in group.members:
        group.boundary(group.next_boundary)
        time.sleep(0.02)


def ask(job: Job, folder: Path) -> StallVerdict:
    pids = {rank: process.pid for rank, process in job.processes.items()}
    places = tuple(ReplicaPlace(r, True, "here", {s: pids[r, s] for s in (0, 1)}) for r in (0, 1))
    return judge(collect(JobPlace("", folder, places, 2, 15.0, 60.0, 5.0, 1.5, forming=False)))


@pytest.mark.protocol
def test_whoever_holds_others_up_outside_of_ops_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def told(culprit: Rank, line: str, *waits: str) -> StallVerdict:
        end = time.monotonic() + DEADLINE
        while True:
            verdict = ask(job, next(iter(folders().values()), tmp_path))
            right = verdict.culprits == (culprit,) and line in verdict.who and all(x in verdict.others for x in waits)
            if right and verdict.cause == StallCause.OWN_CODE.value:
                return verdict
            assert time.monotonic() < end, verdict
            time.sleep(0.1)

    with Job(tmp_path, replicas=2, ranks=2, body=body, prepare=own_runs) as job:
        verdict = told((1, 0), "before_the_send", "Replica 0 waits in a recv from replica 1 with tag 7, called at")
        assert f"{Path(__file__).name}:" in verdict.others.partition("called at")[2]
        assert verdict.gives_up is not None
        (tmp_path / "sends").touch()
        told((0, 1), "before_the_vote", "in the vote on step 1 between the ranks of replica 0, called at")
        (tmp_path / "votes").touch()
        # Who stays waits for the leader of the replica that leaves, and that one for its other rank.
        verdict = told((1, 1), "before_the_boundary", "at the step boundary", "Replica 0")
        assert verdict.removal is not None
        (tmp_path / "stands").touch()
        assert job.join(0) == job.join(1) == [0, 0]
