"""Static groups and messages between real processes, in a job and without one, and what SIGKILL does to them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.errors import LostError
from ftcomm.groups.static_endpoint import Endpoint
from ftcomm.groups.static_group import StaticGroup
from tests.process.job import DEADLINE, Job, Notes, only_on_host
from tests.rigs.orphan_watch import end_with_pytest

pytestmark = pytest.mark.protocol

SEED = int(os.environ.get("FTCOMM_TEST_SEED", str(random.randrange(1 << 30))))
NEVER = 1000.0  # s; an op that has to wait for its own timeout fails the test
_context = multiprocessing.get_context("forkserver")


# -- in a job --------------------------------------------------------------------------------------------------------


def static_in_job(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Groups of every kind; then all four reduce until they cannot, and who is left goes on in the elastic group."""
    replica, rank = group.replica, group.shard
    number = 2 * replica + rank
    array = np.full(1000, 2.0**number, np.float32)
    with_mine = StaticGroup.in_job(group, f"replica {replica}", [(replica, 0), (replica, 1)])
    notes.write(kind="shards", sum=float(with_mine.allreduce(array.copy())[7]), me=with_mine.rank)
    if replica != rank:
        diagonal = StaticGroup.in_job(group, "diagonal", [(1, 0), (0, 1)])
        notes.write(kind="diagonal", sum=float(diagonal.allreduce(array.copy())[7]), me=diagonal.rank)
        diagonal.close()
    other = np.zeros_like(array)
    sent = group.send(array, 1 - replica, tag=rank, async_op=True)
    received = group.recv(other, tag=rank, async_op=True)
    received.wait()
    sent.wait()
    notes.write(kind="message", value=float(other[7]), source=received.source)

    everybody = StaticGroup.in_job(group, "all", [(0, 0), (0, 1), (1, 0), (1, 1)], op_timeout=NEVER)
    big = np.empty(arguments["elements"], np.float32)
    waiting = group.recv(other, 1 - replica, tag=99, async_op=True, timeout=NEVER)
    notes.write(kind="reducing")
    try:
        while True:
            big[:] = 1.0
            everybody.allreduce(big)
            if not (big == 4.0).all():
                notes.write(kind="wrong", value=float(big.min()))
    except LostError as error:
        notes.write(kind="lost", text=str(error), said=str(everybody.error))
    try:
        waiting.wait()
    except LostError as error:
        notes.write(kind="no message", text=str(error))
    everybody.close()
    notes.write(kind="alone", sum=float(group.allreduce(array.copy())[7]))
    notes.write(kind="shards", sum=float(with_mine.allreduce(array.copy())[7]), me=with_mine.rank)
    with_mine.close()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_lost_replica_ends_the_static_groups_it_is_in(tmp_path: Path, transport: str) -> None:
    """Killed, which is seen at once. One that is stopped lives, and what waits for it has its own timeout."""
    with Job(tmp_path, replicas=2, ranks=2, body=static_in_job, transport=transport, elements=500_000) as job:
        end = time.monotonic() + DEADLINE
        while sum(note["kind"] == "reducing" for _, _, note in job.notes()) < 4:
            assert time.monotonic() < end
            assert not job.errors(), job.errors()
            time.sleep(0.01)
        time.sleep(random.Random(SEED).uniform(0, 0.05))
        job.kill(1)
        assert job.join(0) == [0, 0]
        said: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
        for replica, rank, note in job.notes():
            said.setdefault((note["kind"], replica, rank), []).append(note)
    for replica, rank in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        assert said["shards", replica, rank][0] == {"kind": "shards", "sum": [3.0, 12.0][replica], "me": rank}
        assert said["message", replica, rank][0]["value"] == 2.0 ** (2 * (1 - replica) + rank)
        assert said["message", replica, rank][0]["source"] == 1 - replica
    assert said["diagonal", 1, 0][0] == {"kind": "diagonal", "sum": 6.0, "me": 0}
    assert said["diagonal", 0, 1][0] == {"kind": "diagonal", "sum": 6.0, "me": 1}
    assert not [note for (kind, _, _), note in said.items() if kind == "wrong"]
    for rank in range(2):
        (lost,) = said["lost", 0, rank]
        assert "(replica 1 shard " in lost["text"], f"seed {SEED}: {lost}"
        assert lost["said"] == lost["text"]
        assert "replica 1 was lost" in said["no message", 0, rank][0]["text"]
        assert said["alone", 0, rank][0]["sum"] == 2.0**rank
        assert said["shards", 0, rank][1]["sum"] == 3.0


# -- without a job ---------------------------------------------------------------------------------------------------


def member(pipe: Connection) -> None:
    """Tells its handle, then makes the groups that it is told of, and does in them what it is told to."""
    end_with_pytest()
    endpoint = Endpoint()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    pipe.send(endpoint.handle)
    group: StaticGroup | None = None
    try:
        while True:
            what, *how = pipe.recv()
            if what == "make":
                name, handles, transport = how
                group = StaticGroup.from_handles(
                    endpoint, name, handles, op_timeout=NEVER, timeout=DEADLINE, transport=transport
                )
                pipe.send(group.rank)
            elif what == "close":
                assert group is not None
                group.close()
                group = None
                pipe.send(left(*before))
            else:
                assert group is not None
                pipe.send(work(group, pipe, what, *how))
    except EOFError:
        return


def left(threads: int, descriptors: int) -> tuple[int, int]:
    """Threads and descriptors more than before, when those that end have ended."""
    end = time.monotonic() + DEADLINE
    while True:
        gc.collect()
        now = threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - descriptors
        if max(now) <= 0 or time.monotonic() > end:
            return now
        time.sleep(0.01)


def work(group: StaticGroup, pipe: Connection, what: str, count: int) -> str:
    """All-reduce, or pass arrays around the ring, until that fails; returns with what."""
    array, other = np.empty(count, np.float32), np.empty(count, np.float32)
    size = group.world_size
    pipe.send("begun")
    try:
        while True:
            array[:] = group.rank
            if what == "reduce":
                group.allreduce(array)
                assert (array == size * (size - 1) / 2).all()
            else:
                sent = group.send(array, (group.rank + 1) % size, async_op=True)
                assert (group.recv(other) == (group.rank - 1) % size).all()
                sent.wait()
    except LostError as error:
        return str(error)


class Processes:
    def __init__(self, count: int) -> None:
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for _ in range(count):
            near, far = _context.Pipe()
            process = _context.Process(target=member, args=(far,), daemon=True)
            process.start()
            far.close()
            self.pipes.append(near)
            self.processes.append(process)
        self.handles = [self.hear(i) for i in range(count)]

    def hear(self, i: int) -> Any:
        assert self.pipes[i].poll(DEADLINE), f"process {i} says nothing"
        return self.pipes[i].recv()

    def ask(self, who: list[int], *what: Any) -> list[Any]:
        for i in who:
            self.pipes[i].send(what)
        return [self.hear(i) for i in who]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(DEADLINE)


@pytest.fixture
def processes() -> Iterator[Processes]:
    only_on_host("part in this: static groups without a job are the host's")
    started = Processes(4)
    yield started
    started.close()


def test_survivors_of_sigkill_fail_together_and_make_a_new_group(processes: Processes) -> None:
    """One dies in mid-op, all others hear of it by name; twice in a row, with every kind of op and of memory."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    alive = [0, 1, 2, 3]
    for name, transport, what, count in (
        ("first", "auto", "reduce", 1_000_000),
        ("second", "tcp", "reduce", 100_000),
        ("third", "auto", "ring", 1_000_000),
    ):
        order = rng.sample(alive, len(alive))
        assert processes.ask(order, "make", name, [processes.handles[i] for i in order], transport) == [
            *range(len(order))
        ]
        assert processes.ask(order, what, count) == ["begun"] * len(order)
        time.sleep(rng.uniform(0, 0.05))
        victim = rng.choice(alive)
        os.kill(processes.processes[victim].pid, signal.SIGKILL)
        alive.remove(victim)
        lost = f"rank {order.index(victim)} ("
        for i in alive:
            text = processes.hear(i)
            assert "was lost" in text.partition(lost)[2], f"seed {SEED}: {name}: {text}"
        for threads, descriptors in processes.ask(alive, "close"):
            assert threads <= 0, f"{threads} threads are left of group {name}"
            assert descriptors <= 0, f"{descriptors} descriptors are left of group {name}"
    assert len(alive) == 1
