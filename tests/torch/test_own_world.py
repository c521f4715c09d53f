"""Replicas with groups of another backend inside: a rank is lost, its replica goes and comes back, others train on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ..process.job import DEADLINE, Job
from . import own_world_bodies as bodies
from .test_steps import ENDLESS, end_together, reported, stepped

VICTIM = 0
COMPILER = os.environ.get("FTCOMM_TEST_PIPELINE", "")  # a backend of torch.compile


def lose_one(job: Job, rank: int) -> list[int | None]:
    """SIGKILL to this rank of the victim alone, and no launcher ends the others. Returns how they end."""
    job.processes[VICTIM, rank].kill()
    return job.join(VICTIM)


@pytest.mark.shows("own processes", "FSDP2 x TP", "RSJE")
def test_a_replica_of_fsdp_and_tensor_parallelism_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Its groups of gloo are made anew, while those of the other replica train on. All bits are equal in the end."""
    with Job(tmp_path, replicas=2, ranks=4, body=bodies.two_dimensions_inside, steps=ENDLESS) as job:
        job.wait_contributing({0, 1})
        stepped(job, 2, {0, 1})
        seen = len(job.events)
        assert lose_one(job, 3) == [1, 1, 1, -9]
        job.start(VICTIM)
        job.wait_contributing({0, 1}, since=seen)
        stepped(job, 2, {1})  # and so the other, too, which has noted errors of its first life
        end_together(job, {0, 1})


@pytest.mark.skipif("FTCOMM_TEST_PIPELINE" not in os.environ, reason="twelve processes compile: make test-pipeline")
@pytest.mark.shows("own processes", "FSDP2 x PP, compiled", "RSJE")
def test_a_replica_of_a_compiled_pipeline_with_a_scaled_loss_is_lost_and_comes_back(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=2, ranks=4, body=bodies.pipeline_inside, steps=ENDLESS, backend=COMPILER) as job:
        job.wait_contributing({0, 1})
        stepped(job, 5, {0, 1})
        seen = len(job.events)
        assert lose_one(job, 1) == [1, -9, 1, 1]
        job.start(VICTIM)
        job.wait_contributing({0, 1}, since=seen)
        stepped(job, 5, {1})  # and so the other, too, which has noted errors of its first life
        end_together(job, {0, 1})
        assert len({note["scale"] for _, _, note in job.notes() if note["kind"] == "step"}) > 1
        assert all(event["replayed"] > 3 for event in reported(job, "state_fetched"))


@pytest.mark.skipif("FTCOMM_TEST_PIPELINE" not in os.environ, reason="24 processes: make test-pipeline")
@pytest.mark.shows("own processes", "FSDP2 x TP x PP", "RSJE")
def test_a_replica_of_a_pipeline_of_fsdp_and_tensor_parallelism_is_lost_and_comes_back(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=2, ranks=8, body=bodies.three_dimensions_inside, steps=ENDLESS) as job:
        job.wait_contributing({0, 1})
        stepped(job, 2, {0, 1})
        seen = len(job.events)
        assert lose_one(job, 5) == [1, 1, 1, 1, 1, -9, 1, 1]
        job.start(VICTIM)
        job.wait_contributing({0, 1}, since=seen)
        stepped(job, 2, {1})  # and so the other, too, which has noted errors of its first life
        end_together(job, {0, 1})


def test_groups_inside_are_aborted_when_the_replica_has_lost_a_rank(tmp_path: Path) -> None:
    """A rank that waits in one gets an error, which `guard` lets through, as the others of its replica are gone."""
    with Job(tmp_path, replicas=2, ranks=2, body=bodies.stuck_inside, steps=40) as job:
        deadline = time.monotonic() + DEADLINE
        while sum(note["kind"] == "stuck" for _, _, note in job.notes()) < 2:
            assert time.monotonic() < deadline, job.errors()
            time.sleep(0.02)
        assert lose_one(job, 1) == [1, -9]
        assert job.join(1) == [0, 0], job.errors()
        assert [error for replica, _, error in job.errors() if replica == VICTIM] == [
            "RuntimeError: the communicator was aborted"
        ]
