"""The promises over NIXL: kills in the middle of ops, joins, and a member that is stopped with puts under way."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from . import torn
from .bodies import reduce_forever
from .job import Job
from .test_fencing import SILENCE, VICTIM, disturbed, go_on, kinds, set_aside, wait_lost, wait_stopped, wake
from .test_kills import ENDLESS, SEED, check

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")
pytestmark = pytest.mark.protocol

ELEMENTS = 300_001  # three chunks, in puts; the last is cut where nothing divides
KILLS = 5


@pytest.mark.timeout(240)
def test_kills_and_joins(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    everybody = set(range(3))
    settings: dict[str, Any] = dict(transport="nixl", elements=ELEMENTS, steps=ENDLESS)
    with Job(tmp_path, replicas=3, body=reduce_forever, **settings) as job:
        job.wait_contributing(everybody)
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.0, 0.05))
            seen = len(job.events)
            victim = rng.randrange(3)
            job.kill(victim)
            lost = set(everybody - {victim})
            job.wait_event(f"view without {victim}", lambda events, seen=seen, left=lost: _has(events[seen:], left))  # type: ignore[misc]
            job.start(victim)
            job.wait_contributing(everybody, since=seen)
        job.drain()
        for replica in everybody:
            assert job.join(replica) == [0]
        assert not job.errors()
        assert len(check(job)) > KILLS


def _has(events: list[dict[str, Any]], members: set[int]) -> bool:
    return any(e["kind"] == "view" and {x["replica"] for x in e["members"]} == members for e in events)


@pytest.mark.timeout(240)
def test_stopped_with_puts_under_way(tmp_path: Path) -> None:
    """It stops in the middle of a put, is expelled, and wakes when its next life is in the view under its number.

    What it had under way goes to mirrors that nobody reads any more; what the others had under way to it is announced
    to it by nobody.
    """
    arguments: dict[str, Any] = dict(victim=(VICTIM, 0), place="put", times=40, steps=ENDLESS, elements=ELEMENTS)
    with Job(
        tmp_path, replicas=3, body=torn.reduce_and_stop, transport="nixl", heartbeat_timeout=SILENCE, **arguments
    ) as job:
        wait_stopped(job)
        wait_lost(job)
        go_on(job)
        seen = len(job.events)
        set_aside(job, VICTIM, 100)
        job.start(VICTIM)
        job.wait_contributing({0, 1, 2}, since=seen)
        seen = len(job.events)
        job.signal(100, signal.SIGCONT)
        wake(job, 100)
        after = kinds(job)[kinds(job).index("woke") + 1 :]
        assert after[0] == "error", "it returned an op that the others had without it"
        go_on(job, replicas=(0, 1, 2))
        assert not disturbed(job, seen, {0, 1, 2})
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0]
        check(job)
