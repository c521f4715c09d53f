"""Half of the hosts of a job cannot be reached by the others: who has the coordinator goes on, and nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftcomm.lab.chaos.network_faults import Misrouted
from ftcomm.lab.chaos.plan import COORDINATOR
from ftcomm.lab.chaos.process_faults import ActiveFault
from ftcomm.lab.netns.network import LabNetwork

from .job import Both, HostJob
from .test_promises import HEARTBEAT, SETTINGS, Watch, _made, agree, assert_removed

pytestmark = [pytest.mark.protocol, pytest.mark.timeout(900)]

Cut = Callable[[HostJob], ActiveFault]
HOSTS = 6
HERE, THERE = [0, 1, 2], [3, 4, 5]


@pytest.fixture
def six_hosts() -> Iterator[LabNetwork]:
    yield from _made(lambda: LabNetwork(HOSTS))


def each_alone(job: HostJob) -> ActiveFault:
    return Both(*(job.unplug(host) for host in THERE))


def from_the_rest(job: HostJob) -> ActiveFault:
    """They reach each other, but neither the coordinator nor the other half."""
    status, rest = job._status(), [*HERE, COORDINATOR]
    return Both(Misrouted(status, rest, THERE), Misrouted(status, THERE, rest))


@pytest.mark.parametrize("cut", [each_alone, from_the_rest], ids=lambda cut: cut.__name__)
def test_the_half_with_the_coordinator_goes_on(six_hosts: LabNetwork, tmp_path: Path, cut: Cut) -> None:
    """The others wait, and decide nothing among themselves; they end when they hear that the job went on without them.
    Each is named with its silence, and comes back."""
    with HostJob(tmp_path, six_hosts, elements=1000, **SETTINGS) as job:
        job.wait_contributing(set(range(HOSTS)))
        watch = Watch(job)
        watch.goes_on(watch.everybody)
        seen = len(job.events)
        fault = cut(job)
        job.wait_event("the loss of half of the hosts", lambda _: watch.newest() == set(HERE))
        watch.goes_on(set(HERE))
        stood = {replica: watch.steps(replica) for replica in THERE}
        watch.goes_on(set(HERE))
        assert {replica: watch.steps(replica) for replica in THERE} == stood
        assert watch.newest() == set(HERE)
        removed = {event["replica"]: event["reason"] for event in job.events[seen:] if event["kind"] == "removed"}
        assert sorted(removed) == THERE
        assert all(reason.startswith("silent for ") for reason in removed.values()), removed
        fault.close()
        for replica in THERE:
            assert_removed(job, replica)
        for replica in THERE:
            job.start(replica)
        job.wait_contributing(watch.everybody)
        watch.goes_on(watch.everybody)
        job.drain()
        for replica in watch.everybody:
            assert job.join(replica) == [0], job.errors()
        agree(job)


def test_nobody_has_to_go_while_the_coordinator_alone_does_not_reach_half_of_the_hosts(
    six_hosts: LabNetwork, tmp_path: Path
) -> None:
    """Those reach the other half, too, and hear that it lives: it is the network of the coordinator."""
    with HostJob(tmp_path, six_hosts, elements=1000, **SETTINGS) as job:
        job.wait_contributing(set(range(HOSTS)))
        watch = Watch(job)
        watch.goes_on(watch.everybody)
        status = job._status()
        fault = Both(Misrouted(status, [COORDINATOR], THERE), Misrouted(status, THERE, [COORDINATOR]))
        end = time.monotonic() + 3 * HEARTBEAT
        while time.monotonic() < end:
            watch.goes_on(watch.everybody)
        watch.no_view()
        fault.close()
        watch.goes_on(watch.everybody)
        watch.no_view()
        job.drain()
        for replica in watch.everybody:
            assert job.join(replica) == [0], job.errors()
        agree(job)
