"""Replicas whose ranks are on two hosts: a cut between these proves no end of anybody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftcomm.lab.netns.network import LabNetwork
from tests.process.test_kills import check

from .bodies import columns
from .job import HostJob
from .test_promises import HEARTBEAT, SETTINGS, Watch, cables  # noqa: F401

pytestmark = pytest.mark.protocol


def test_ranks_that_are_cut_from_their_leaders_wait_for_them(cables: LabNetwork, tmp_path: Path) -> None:  # noqa: F811
    """All replicas have rank 0 on one host and rank 1 on another. Neither side loses anybody of its own group, and what
    is said across the cut again is enough for all."""
    with HostJob(tmp_path, cables, replicas=2, ranks=2, elements=1000, **{**SETTINGS, "body": columns}) as job:
        job.wait_contributing({0, 1})
        watch = Watch(job)
        watch.goes_on(watch.everybody)
        with job.apart(0, 1):
            time.sleep(3 * HEARTBEAT)
            watch.goes_on(watch.everybody)
        watch.goes_on(watch.everybody)
        time.sleep(HEARTBEAT)
        watch.no_view()
        assert {event["replica"] for event in job.events if event["kind"] == "not_removed"} == watch.everybody
        job.drain()
        for replica in watch.everybody:
            assert job.join(replica) == [0, 0], job.errors()
        check(job)


def test_a_rank_that_is_killed_on_another_host_than_its_leader_is_missed(cables: LabNetwork, tmp_path: Path) -> None:  # noqa: F811
    """Its host goes on, and refuses its leader. So it does the coordinator, while the rank of another replica there
    takes a connection."""
    with HostJob(tmp_path, cables, replicas=2, ranks=2, elements=1000, **{**SETTINGS, "body": columns}) as job:
        job.wait_contributing({0, 1})
        watch = Watch(job)
        watch.goes_on({0, 1})
        job.processes[1, 1].kill()
        assert watch.without(0, 1) == 1
        assert job.join(1) == [1, -9]
        watch.goes_on({0})
        job.drain()
        assert job.join(0) == [0, 0], job.errors()
        check(job)


def test_a_rank_of_the_last_replica_that_is_killed_on_another_host_is_missed_at_once(
    cables: LabNetwork,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Nobody else is left there to see it, and what the host refuses is no proof."""
    with HostJob(tmp_path, cables, replicas=1, ranks=2, elements=1000, **{**SETTINGS, "body": columns}) as job:
        job.wait_contributing({0})
        Watch(job).goes_on({0})
        job.processes[0, 1].kill()
        job.wait_event("end", lambda events: any(event["kind"] == "failed" for event in events))
        (failed,) = [event["reason"] for event in job.events if event["kind"] == "failed"]
        assert "its shard 1 is lost: its process" in failed
        assert "has ended, says its host" in failed
        assert job.join(0) == [1, -9]


def test_the_last_replica_is_not_lost_by_what_another_host_refuses(cables: LabNetwork, tmp_path: Path) -> None:  # noqa: F811
    """Nobody else holds the state, and a firewall would say the same."""
    with HostJob(tmp_path, cables, replicas=1, elements=1000, **{**SETTINGS, "body": columns}) as job:
        job.wait_contributing({0})
        watch = Watch(job)
        job.kill(0)
        job.wait_event(
            "not_removed", lambda events: any(event["kind"] in ("not_removed", "failed") for event in events)
        )
        watch.no_view()
        job.start(0)  # that it comes with another life is a proof
        job.wait_event("end", lambda events: any(event["kind"] == "failed" for event in events))
