"""FSDP2 with ftcomm beneath, and HSDP over a mesh whose replicas may be lost: what one process alone would train."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ..process.job import Job
from . import fsdp_bodies as bodies
from .test_ddp import start_and_wrap
from .test_steps import ENDLESS, end_together, stepped

STEPS, DIES_AT, VICTIM = 5, 2, 1


def finals(job: Job) -> list[list[list[float]]]:
    return [note["weights"] for _, _, note in job.notes() if note["kind"] == "final"]


def close(got: list[list[float]], wanted: list[list[float]]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-3, atol=1e-5)


def without(events: list[dict[str, Any]], replica: int) -> bool:
    """Whether the newest view has only others, and somebody contributes in it."""
    views = [{x["replica"]: x["contributing"] for x in event["members"]} for event in events if event["kind"] == "view"]
    return bool(views) and replica not in views[-1] and any(views[-1].values())


@pytest.mark.protocol
def test_hsdp_trains_on_when_a_replica_is_lost(tmp_path: Path) -> None:
    replicas = {0, 1, 2}
    with Job(tmp_path, replicas=3, ranks=2, body=bodies.hsdp, steps=STEPS, dies_at=DIES_AT, victim=VICTIM) as job:
        for replica in replicas - {VICTIM}:
            assert job.join(replica) == [0, 0], job.errors()
        got = finals(job)
        sizes = {
            (n["step"], n["replicate"], n["world"]) for r, _, n in job.notes() if n["kind"] == "size" if r != VICTIM
        }
    assert len(got) == 4
    assert all(weights == got[0] for weights in got), "the survivors hold different weights"

    def ranks(step: int) -> list[int]:
        return [2 * r + shard for r in sorted(replicas - {VICTIM} if step >= DIES_AT else replicas) for shard in (0, 1)]

    close(got[0], bodies.alone(STEPS, ranks))
    seen = {step: {size[1:] for size in sizes if size[0] == step} for step in range(STEPS)}
    assert all(seen[step] == {(3, 6)} for step in range(DIES_AT))
    assert seen[DIES_AT] <= {(3, 6), (2, 4)}, "its loss may be known at the boundary, or not"
    assert all(seen[step] == {(2, 4)} for step in range(DIES_AT + 1, STEPS))


def test_fsdp_within_one_replica(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=1, ranks=2, body=bodies.fsdp, steps=3) as job:
        assert job.join(0) == [0, 0], job.errors()
        got = finals(job)
    assert got[0] == got[1]
    close(got[0], bodies.alone(3, lambda step: [0, 1]))


@pytest.mark.shows("own processes", "FSDP2", "RSJE")
def test_a_replica_comes_back_into_hsdp(tmp_path: Path) -> None:
    """Both of its ranks fetch their shards, each from its like, and all bits are equal in the end."""
    with Job(tmp_path, replicas=2, ranks=2, body=bodies.hsdp_with_state, steps=ENDLESS) as job:
        job.wait_contributing({0, 1})
        for victim in (1, 0):
            stepped(job, 4, {0, 1})
            seen = len(job.events)
            job.signal(victim, signal.SIGSTOP)  # so that neither rank lives to say that the other is lost
            job.kill(victim, rank=1 - victim)
            job.wait_event("view without it", lambda _, seen=seen, victim=victim: without(job.events[seen:], victim))
            start_and_wrap(job, victim, {1 - victim})
            job.wait_contributing({0, 1}, since=seen)
        stepped(job, 4, {0, 1})
        end_together(job, {0, 1})
