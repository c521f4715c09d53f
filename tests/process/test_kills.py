"""The promises under SIGKILL: the survivors finish the same op, with the same bytes, and go on."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from .bodies import reduce_forever
from .job import Job, fewer

pytestmark = pytest.mark.protocol

KILLS = int(os.environ.get("FTCOMM_TEST_KILLS", "1"))  # so many times as many
SEED = int(os.environ.get("FTCOMM_TEST_SEED", str(random.randrange(1 << 30))))
ENDLESS = 10_000_000


def check(job: Job) -> dict[int, dict[int, dict[str, Any]]]:
    """Every step has one result, and every life of a replica an unbroken run of steps.

    Returns what was written down as step -> 100 * replica + rank -> note.
    """
    steps: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    previous: dict[tuple[int, int], int | None] = {}
    for replica, rank, note in job.notes():
        assert note["kind"] != "wrong", f"seed {SEED}: replica {replica}: {note}"
        if note["kind"] == "joined":
            previous[replica, rank] = None
        if note["kind"] != "step":
            continue
        assert note["whole"]
        last = previous[replica, rank]
        assert last is None or note["step"] == last + 1, f"seed {SEED}: replica {replica} lost a step: {last}, {note}"
        previous[replica, rank] = note["step"]
        steps[note["step"]][replica * 100 + rank] = note
    for step, notes in steps.items():
        for rank in {key % 100 for key in notes}:
            results = {(note["crc"], str(note["spans"])) for key, note in notes.items() if key % 100 == rank}
            assert len(results) == 1, f"seed {SEED}: step {step} has several results: {notes}"
    return steps


@pytest.mark.parametrize(
    ("transport", "elements", "kills", "data"),
    [
        ("shm", 1_000_003, 12, "none"),
        ("shm", 300, 8, "none"),
        ("shm", 4 << 20, 4, "none"),
        ("tcp", 300_001, 8, "none"),
        ("tcp", 300_001, 4, "mac"),
        ("tcp", 300_001, 4, "aes-gcm"),
    ],
)
def test_kills_at_random_moments(tmp_path: Path, transport: str, elements: int, kills: int, data: str) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    everybody = set(range(4))
    how = dict(transport=transport, data=data, elements=elements, steps=ENDLESS, pause=0.0)
    with Job(tmp_path, replicas=4, body=reduce_forever, **how) as job:  # type: ignore[arg-type]
        job.wait_contributing(everybody)
        for _ in range(KILLS * fewer(kills)):
            time.sleep(rng.uniform(0.0, 0.03))
            seen = len(job.events)
            victim = rng.randrange(4)
            job.kill(victim)
            job.wait_event(f"view without {victim}", lambda events, seen=seen: _lost(events[seen:], victim))  # noqa: B023
            job.start(victim)
            job.wait_contributing(everybody, since=seen)
        job.drain()
        for replica in everybody:
            assert job.join(replica) == [0]
        assert not job.errors()
        steps = check(job)
    split = sum(len(next(iter(notes.values()))["spans"]) > 1 for notes in steps.values())
    print(f"{len(steps)} steps, {split} of them finished with another set of contributors in some chunks")


def _lost(events: list[dict[str, Any]], victim: int) -> bool:
    return any(e["kind"] == "view" and victim not in [x["replica"] for x in e["members"]] for e in events)
