"""Many groups of real processes within a small limit of staging, which they lend to each other, while members die."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import zlib
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.groups.static_endpoint import Endpoint
from ftcomm.groups.static_group import StaticGroup
from ftcomm.transport.segment import PLACE
from ftcomm.transport.slab import SLAB
from tests.rigs.deadlines import DEADLINE

from .bodies import seen
from .job import Job, Notes, fewer, only_on_host
from .test_kills import ENDLESS, SEED, _lost

pytestmark = pytest.mark.protocol

LIMIT = 16 << 20  # bytes; without it 64 groups stage in 128 MB
GROUPS = 64
AT_ONCE = 20
LARGE = 600_000  # elements: five chunks


def use_many(me: int, members: int, transport: str, pipe: Connection) -> None:
    """Use `GROUPS` groups in turn, and then some of them at once; tell what was staged meanwhile."""
    SLAB._limit = LIMIT
    endpoint = Endpoint()
    pipe.send(endpoint.handle)
    handles = pipe.recv()
    made = [
        StaticGroup.from_handles(endpoint, f"group{number}", handles, timeout=DEADLINE, transport=transport)
        for number in range(GROUPS)
    ]
    in_turn = 0
    for turn in range(3):
        for number, group in enumerate(made):
            for size in (16, LARGE if (number + turn) % 2 else 1000):
                array = np.full(size, turn + number + me, np.float32)
                group.allreduce(array)
                assert (array == members * (turn + number) + sum(range(members))).all()
        in_turn = max(in_turn, SLAB.reserved)
    arrays = [np.full(LARGE, number + me, np.float32) for number in range(AT_ONCE)]
    order = list(range(AT_ONCE))
    random.Random(me).shuffle(order)  # so that each waits for others in most of them
    works = {number: made[number].allreduce(arrays[number], async_op=True) for number in order}
    for number, work in works.items():
        work.wait()
        assert (arrays[number] == members * number + sum(range(members))).all()
    moves = sum(group.internals._segment.words[PLACE] for group in made)
    pipe.send((in_turn, SLAB.reserved, moves))
    pipe.recv()  # the others are through, too
    for group in made:
        group.close()
    pipe.send(SLAB.reserved)
    endpoint.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_groups_used_in_turn_stay_within_the_limit_and_those_in_use_at_once_all_finish(transport: str) -> None:
    members = 2
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(members)]
    processes = [
        context.Process(target=use_many, args=(me, members, transport, there), daemon=True)
        for me, (_, there) in enumerate(pairs)
    ]

    def all_say() -> list[Any]:
        said = []
        for here, _ in pairs:
            assert here.poll(2 * DEADLINE), "a member says nothing"
            said.append(here.recv())
        return said

    try:
        for process, (_, there) in zip(processes, pairs, strict=True):
            process.start()
            there.close()
        handles = all_say()
        for here, _ in pairs:
            here.send(handles)
        for in_turn, at_once, moves in all_say():
            assert in_turn <= LIMIT
            assert LIMIT < at_once <= (AT_ONCE + 8) * (4 << 20)
            assert moves > GROUPS
        for here, _ in pairs:
            here.send(None)
        assert all_say() == [0, 0], "what is left when all groups are closed"
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE)


def reduce_in_many(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """In each step all-reduces in turn and at once in many groups, and what came of them."""
    SLAB._limit = arguments["limit"]
    made = {f"some{number}": group.subgroup(f"some{number}", range(group.replicas)) for number in range(10)}
    for step in ftcomm.steps(ENDLESS):
        works = []
        for number, (name, some) in enumerate(made.items()):
            for size in (8, 200_003):
                array = np.full(size, 2.0**group.replica, np.float32)
                if (step + number) % 4 == 0:
                    works.append((name, array, some.allreduce(array, async_op=True)))
                else:
                    works.append((name, array, None))
                    some.allreduce(array)
        for place, (name, array, work) in enumerate(works):
            if work is not None:
                work.wait()
            crc = zlib.crc32(array.view(np.uint8).data)
            notes.write(kind="did", group=name, step=step, place=place, crc=crc, spans=seen(array))
        moves = sum(some.internals._communicator.segment.words[PLACE] for some in made.values())
        notes.write(kind="moved", step=step, moves=moves)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_kills_at_random_moments_while_groups_lend_to_each_other(tmp_path: Path, transport: str) -> None:
    only_on_host("subgroups lend")
    print(f"seed {SEED}, process {os.getpid()}")
    rng = random.Random(SEED)
    everybody = {0, 1, 2}
    with Job(tmp_path, replicas=3, body=reduce_in_many, transport=transport, limit=8 << 20) as job:
        job.wait_contributing(everybody)
        for _ in range(fewer(5)):
            time.sleep(rng.uniform(0.0, 0.2))
            since, victim = len(job.events), rng.randrange(3)
            job.kill(victim)
            job.wait_event(f"view without {victim}", lambda events, s=since, v=victim: _lost(events[s:], v))
            job.start(victim)
            job.wait_contributing(everybody, since=since)
        job.drain()
        for replica in everybody:
            assert job.join(replica) == [0], (SEED, job.errors())
        assert not job.errors(), SEED
    did: dict[tuple[str, int, int], dict[int, str]] = defaultdict(dict)
    moves = 0
    for replica, _, note in job.notes():
        if note["kind"] == "did":
            said = str([note["crc"], note["spans"]])
            assert {r for _, _, who in note["spans"] for r in who} <= everybody, (SEED, note)
            did[note["group"], note["step"], note["place"]][replica] = said
        elif note["kind"] == "moved":
            moves = max(moves, note["moves"])
    for where, said_of in did.items():
        assert len(set(said_of.values())) == 1, f"seed {SEED}: {where}: {said_of}"
    assert moves > 20
