"""Replicas whose ranks are on two hosts: a cut between these proves no end of anybody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftcomm.lab.netns.network import Network
from tests.process.test_kills import check

from .bodies import columns
from .job import HostJob
from .test_promises import HEARTBEAT, SETTINGS, Watch, cables  # noqa: F401

pytestmark = [pytest.mark.protocol, pytest.mark.timeout(240)]


def test_ranks_that_are_cut_from_their_leaders_wait_for_them(cables: Network, tmp_path: Path) -> None:  # noqa: F811
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
        assert {event["replica"] for event in job.events if event["kind"] == "spared"} == watch.everybody
        job.drain()
        for replica in watch.everybody:
            assert job.join(replica) == [0, 0], job.errors()
        check(job)
