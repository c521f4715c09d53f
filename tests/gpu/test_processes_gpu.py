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


def gather_on_gpu(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """By the copy engines; into memory of the GPU and into pinned memory."""
    elements, ranks = arguments["elements"], len(group.roster)
    expected = torch.arange(ranks).repeat_interleave(elements).to(torch.int16)
    for place in ({"device": "cuda"}, {"pin_memory": True}):
        out = torch.zeros(ranks * elements, dtype=torch.int16, **place)  # type: ignore[arg-type]
        mine = torch.full((elements,), group.replica, dtype=torch.int16, device="cuda")
        group.allgather(out, mine, copy_engine=True)
        notes.write(kind="gather", right=torch.equal(out.cpu(), expected))


@pytest.mark.parametrize("elements", [3, 3_000_001])
def test_copy_engines_between_processes(tmp_path: Path, elements: int) -> None:
    with Job(tmp_path, replicas=4, body=gather_on_gpu, engine="gpu-kernel", elements=elements) as job:
        for replica in range(4):
            assert job.join(replica, 120) == [0], job.errors()
        assert [note["right"] for _, _, note in job.notes() if note["kind"] == "gather"] == [True] * 8


def send_on_gpu(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """By the copy engines, round the ring; into memory of the GPU and into pinned memory."""
    elements, ranks, me = arguments["elements"], len(group.roster), group.replica
    for place in ({"device": "cuda"}, {"pin_memory": True}):
        out = torch.zeros(elements, **place)  # type: ignore[arg-type]
        sent = group.send(
            torch.full((elements,), float(me), device="cuda"), (me + 1) % ranks, copy_engine=True, async_op=True
        )
        group.recv(out, (me - 1) % ranks, copy_engine=True)
        sent.wait()
        notes.write(kind="ring", right=bool((out == (me - 1) % ranks).all()))


def test_messages_by_copy_engines_between_processes(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=4, body=send_on_gpu, engine="gpu-kernel", elements=3_000_001) as job:
        for replica in range(4):
            assert job.join(replica, 120) == [0], job.errors()
        assert [note["right"] for _, _, note in job.notes() if note["kind"] == "ring"] == [True] * 8


def replay_on_gpu(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Two ops in a graph, the second of them atomic and with what the first has made; in every other step one behind it
    that is called. Each life captures a graph of its own, whatever the others do meanwhile."""
    elements, chunk = arguments["elements"], CHUNK // 4
    first, second, third = (torch.empty(elements, device="cuda") for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.allreduce(first)
        second.copy_(first)
        group.allreduce(second, "max", atomic=True)
    for step in ftcomm.steps(arguments["steps"]):
        first.fill_(2.0**group.replica)
        third.fill_(2.0**group.replica)
        graph.replay()
        if step % 2:
            group.allreduce(third)
        hosts = [array.cpu().numpy() for array in ((first, second, third) if step % 2 else (first, second))]
        edges = np.flatnonzero(np.diff(hosts[0])) + 1
        if (edges % chunk).any() or not np.array_equal(hosts[0], hosts[1]):
            notes.write(kind="wrong", step=step, edges=edges[:8].tolist(), got=[float(host[0]) for host in hosts])
        values = sorted({float(host[at]) for host in hosts for at in (0, *edges.tolist())})
        crc = zlib.crc32(b"".join(host.tobytes() for host in hosts))
        notes.write(kind="step", step=step, crc=crc, spans=values, whole=True)


@pytest.mark.parametrize("elements", [1000, 1_000_003])
def test_eight_processes_by_ipc(tmp_path: Path, elements: int) -> None:
    with Job(tmp_path, replicas=8, body=reduce_on_gpu, engine="gpu-kernel", elements=elements, steps=20) as job:
        for replica in range(8):
            assert job.join(replica, 120) == [0], job.errors()
        steps = check(job)
    assert len(steps) == 20
    assert {note["spans"][0] for note in steps[19].values()} == {255.0}


@pytest.mark.parametrize(
    ("body", "engine", "transport", "elements"),
    [
        *((reduce_on_gpu, "gpu-kernel", "auto", elements) for elements in (1000, 4_000_003)),
        (replay_on_gpu, "gpu-kernel", "auto", 4_000_003),
        *((reduce_on_gpu, "gpu-reduce", transport, 1_000_003) for transport in ("tcp", "auto")),
    ],
)
def test_one_of_eight_processes_is_killed_in_mid_op(
    tmp_path: Path, body: Any, engine: str, transport: str, elements: int
) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    with Job(
        tmp_path, replicas=8, body=body, engine=engine, transport=transport, elements=elements, steps=ENDLESS
    ) as job:
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
    print(f"{len(steps)} steps")  # one, if all were killed within its op: without MPS that takes seconds
