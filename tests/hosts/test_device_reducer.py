"""Hosts of their own whose kernels reduce what comes over the network between them, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ftcomm.errors import SettingsError
from ftcomm.kernels.device import INTERPRETED
from ftcomm.lab.netns.network import LabNetwork
from tests.process.test_kills import ENDLESS

from .bodies import mixed
from .job import HostJob
from .test_promises import Watch, agree, assert_removed

pytestmark = pytest.mark.protocol

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

ELEMENTS = 30_000


@pytest.fixture
def cables() -> Iterator[LabNetwork]:
    try:
        network = LabNetwork(3)
    except SettingsError as error:
        pytest.skip(str(error))
    yield network
    network.close()


def test_who_is_killed_and_who_is_cut_off(tmp_path: Path, cables: LabNetwork) -> None:
    """Equal bytes on the survivors, which lose no step, and every collective goes on; the killed one comes back, and is
    cut off then."""
    settings = dict(elements=ELEMENTS, steps=ENDLESS, heartbeat_timeout=5.0, op_timeout=30.0)
    with HostJob(tmp_path, cables, body=mixed, engine="interpreter-reduce", **settings) as job:
        job.wait_contributing({0, 1, 2})
        watch = Watch(job)
        watch.goes_on({0, 1, 2})
        job.kill(2)
        watch.without(2)
        watch.comes_back(2)
        watch.goes_on({0, 1, 2})
        active = job.unplug(2)
        watch.without(2)
        watch.goes_on({0, 1})
        active.close()
        assert_removed(job, 2)
        job.drain()
        for replica in (0, 1):
            assert job.join(replica) == [0], job.errors()
        agree(job)
