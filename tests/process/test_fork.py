"""Children of a rank can neither speak for it, nor end its connections, nor hide its death."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from pathlib import Path

import pytest

from .forking_ranks import FORKER, STEPS, reduce_and_fork, reduce_with_workers
from .job import Job, only_on_host
from .test_faults import _members

pytestmark = pytest.mark.protocol

_NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not importlib.util.find_spec("nixl_cu12"), reason="no NIXL"))
NEVER = 90.0  # s, a heartbeat timeout that ends no wait of these tests
SLOWEST = 200.0  # s for some twenty children, one after the other, and forty steps, on a busy host


@pytest.mark.parametrize(
    "transport",
    [
        "shm",
        pytest.param("tcp", marks=pytest.mark.sweep),
        pytest.param("nixl", marks=[*_NIXL.marks, pytest.mark.sweep]),
    ],
)
def test_children_are_refused_and_leave_the_rank_alone(tmp_path: Path, transport: str) -> None:
    only_on_host("subgroups of what kernels run")
    unhurried = dict(heartbeat_timeout=NEVER, op_timeout=2 * NEVER)
    with Job(tmp_path, replicas=3, body=reduce_and_fork, transport=transport, elements=300_001, **unhurried) as job:
        assert [job.join(replica, SLOWEST) for replica in range(3)] == [[0]] * 3, job.errors()
    notes = list(job.notes())
    steps = [note for _, _, note in notes if note["kind"] == "step"]
    assert len(steps) == 3 * STEPS
    assert all(note["sums"] == [7.0] and note["members"] == [0, 1, 2] for note in steps)
    assert not [event for event in job.events if event["kind"] == "view" and event["epoch"] > 1], job.events

    refused = {note["call"]: note["text"] for _, _, note in notes if note["kind"] == "refused"}
    assert len(refused) == 16
    for text in refused.values():
        assert f"replica {FORKER} shard 0" in text
        assert "forkserver" in text
    wrong = [note for _, _, note in notes if note["kind"] == "child"]
    assert [note["type"] for note in wrong] == ["ValueError", "SystemExit"]
    assert [note["found"] for _, _, note in notes if note["kind"] in ("pool", "loaded")] == [[1, 2], 28.0]


@pytest.mark.parametrize("transport", ["shm", "tcp", _NIXL])
def test_a_death_is_known_though_its_children_live(tmp_path: Path, transport: str) -> None:
    """By nothing but the end of its connections, or the kernel's mark: silence would take longer than the test."""
    with Job(
        tmp_path,
        replicas=3,
        body=reduce_with_workers,
        transport=transport,
        heartbeat_timeout=NEVER,
        op_timeout=2 * NEVER,
    ) as job:
        job.wait_contributing({0, 1, 2})
        job.wait_event("children", lambda _: len(_workers(job)) == 2)
        workers = _workers(job)
        try:
            job.kill(FORKER)
            job.wait_event("view without it", lambda events: any(_members(event) == [0, 2] for event in events))
            alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        finally:
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert workers[0] in alive
        assert not job.errors()


def _workers(job: Job) -> list[int]:
    return [note["pid"] for _, _, note in job.notes() if note["kind"] == "worker"]
