"""The promises over NIXL: kills in the middle of ops, joins, and a member that is stopped with puts under way."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from . import torn
from .bodies import reduce_forever, reduce_fresh
from .job import STALL, Job
from .test_fencing import VICTIM, disturbed, go_on, kinds, set_aside, wait_lost, wait_stopped, wake
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


@pytest.mark.timeout(240)
def test_who_was_not_killed_can_put_on(tmp_path: Path) -> None:
    """The survivors of several losses, with puts under way to the dead, in memory that is always another."""
    victim, survivors = 2, {0, 1}
    with Job(tmp_path, replicas=3, body=reduce_fresh, transport="nixl", elements=1_500_000, steps=ENDLESS) as job:
        job.wait_contributing({0, 1, 2})
        for _ in range(KILLS):
            seen = len(job.events)
            job.kill(victim)
            job.wait_event("loss", lambda events, seen=seen: _has(events[seen:], survivors))  # type: ignore[misc]
            job.start(victim)
            job.wait_contributing({0, 1, 2}, since=seen)
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0]
        lost = [event["why"] for event in job.events if event["kind"] == "view" and "lost" in (event["why"] or "")]
        assert len(lost) == KILLS, lost
        assert all(why.startswith(f"lost {victim}: ") for why in lost), lost
        assert not job.errors()
        results: dict[int, set[int]] = {}
        for *_, note in job.notes():
            if note["kind"] == "fresh":
                results.setdefault(note["step"], set()).add(note["crc"])
        assert len(results) > KILLS
        assert all(len(crcs) == 1 for crcs in results.values())


def _has(events: list[dict[str, Any]], members: set[int]) -> bool:
    return any(e["kind"] == "view" and {x["replica"] for x in e["members"]} == members for e in events)


@pytest.mark.timeout(240)
def test_stopped_with_puts_under_way(tmp_path: Path) -> None:
    """It stops in the middle of a put, is expelled, and wakes when its next life is in the view under its number.

    What it had under way goes to mirrors that nobody reads any more; what the others had under way to it is announced
    to it by nobody.
    """
    arguments: dict[str, Any] = dict(victim=(VICTIM, 0), place="put", times=40, steps=ENDLESS, elements=ELEMENTS)
    with Job(tmp_path, replicas=3, body=torn.reduce_and_stop, transport="nixl", **STALL, **arguments) as job:
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
