"""The all-reduce on a real GPU, of eight processes that reach each other's memory by CUDA IPC; some of them are killed.

Without MPS processes take turns on a GPU, milliseconds each, so ops are slow, and a kill is mostly within one.
"""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ftcomm
from tests.process.job import Job, Notes
from tests.process.test_kills import ENDLESS, SEED, check

from .rig import gpu

pytestmark = [*gpu, pytest.mark.timeout(300)]

CHUNK = 256 << 10


def reduce_on_gpu(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """As `bodies.reduce_forever`, with the array on the GPU."""
    elements, chunk = arguments["elements"], CHUNK // 4
    array = torch.empty(elements, device="cuda")
    for step in ftcomm.steps(arguments["steps"]):
        array.fill_(2.0**group.replica)
        group.allreduce(array, atomic=step % 4 == 3)
        host = array.cpu().numpy()  # in order with the stream that waits for the op
        edges = np.flatnonzero(np.diff(host)) + 1
        values = {float(host[at]) for at in (0, *edges.tolist())}
        if (edges % chunk).any() or not all(value.is_integer() and 0 < value < 256 for value in values):
            notes.write(kind="wrong", step=step, edges=edges[:8].tolist(), values=sorted(values)[:8])
        notes.write(kind="step", step=step, crc=zlib.crc32(host.tobytes()), spans=sorted(values), whole=True)


@pytest.mark.parametrize("elements", [1000, 1_000_003])
def test_eight_processes_by_ipc(tmp_path: Path, elements: int) -> None:
    with Job(tmp_path, replicas=8, body=reduce_on_gpu, engine="cuda", elements=elements, steps=20) as job:
        for replica in range(8):
            assert job.join(replica, 120) == [0], job.errors()
        steps = check(job)
    assert len(steps) == 20
    assert {note["spans"][0] for note in steps[19].values()} == {255.0}


@pytest.mark.parametrize("elements", [1000, 4_000_003])
def test_one_of_eight_processes_is_killed_in_mid_op(tmp_path: Path, elements: int) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    with Job(tmp_path, replicas=8, body=reduce_on_gpu, engine="cuda", elements=elements, steps=ENDLESS) as job:
        alive = set(range(8))
        job.wait_contributing(alive)
        for _ in range(3):
            time.sleep(rng.uniform(0.2, 1.0))
            victim = rng.choice(sorted(alive))
            seen = len(job.events)
            job.kill(victim)
            alive.discard(victim)
            job.wait_contributing(alive, since=seen)
        job.drain()
        for replica in sorted(alive):
            assert job.join(replica, 120) == [0], job.errors()
        assert not job.errors()
        steps = check(job)
    print(f"{len(steps)} steps")
    assert max(steps) > min(steps)
