"""32 members on eight hosts, four on each: in a tree what is small, around the ring what is large, and kills."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftcomm.errors import SettingsError
from ftcomm.lab.netns.network import LabNetwork

from .bodies import mixed
from .job import HostJob
from .test_promises import ENDLESS, SEED, Watch, agree

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("FTCOMM_TEST_MANY"),
        reason="32 processes on a machine of two cores take minutes: make test-many",
    ),
]

MEMBERS, HOSTS = 32, 8


@pytest.fixture
def eight_hosts() -> Iterator[LabNetwork]:
    try:
        network = LabNetwork(HOSTS)
    except SettingsError as error:
        pytest.skip(str(error))
    yield network
    network.close()


@pytest.mark.parametrize("elements", [300, 100_000])
def test_32_members_on_eight_hosts_lose_three_and_get_them_back(
    eight_hosts: LabNetwork, tmp_path: Path, elements: int
) -> None:
    """One dies, then two on different hosts at once; each time the others go on with equal bytes, and it comes back."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    # All powers of two up to 2^31 have a sum that float64 holds. Nobody may be lost because 32 processes share a core.
    patient = dict(heartbeat_timeout=20.0, op_timeout=120.0)
    with HostJob(
        tmp_path,
        eight_hosts,
        replicas=MEMBERS,
        body=mixed,
        steps=ENDLESS,
        elements=elements,
        dtype="float64",
        **patient,
    ) as job:
        watch = Watch(job)
        job.wait_contributing(watch.everybody)
        watch.goes_on(watch.everybody)
        for count in (1, 2):
            victims = set(rng.sample(range(HOSTS), count))  # one of a host each
            seen = len(job.events)
            for victim in victims:
                job.kill(victim)
            job.wait_event(
                f"view without {victims}",
                lambda events, seen=seen, victims=victims: any(
                    event["kind"] == "view" and not victims & {member["replica"] for member in event["members"]}
                    for event in events[seen:]
                ),
            )
            watch.goes_on(watch.everybody - victims)
            for victim in victims:
                job.start(victim)
            job.wait_contributing(watch.everybody, since=seen)
        watch.goes_on(watch.everybody)
        job.drain()
        for replica in watch.everybody:
            assert job.join(replica) == [0], job.errors()
        agree(job)
