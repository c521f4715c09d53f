"""Groups of some replicas of a job: they keep its promises among themselves, whoever dies, comes back or closes one."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.errors import ArgumentError, FtcommError, LostError

from .bodies import seen
from .job import Job, Notes, fewer, only_on_host
from .test_kills import ENDLESS, SEED, _lost
from .test_stalls import CHAIN

pytestmark = pytest.mark.protocol

GROUPS = {"low": (0, 1, 2), "odd": (1, 3), "whole": (0, 1, 2, 3)}  # and that of the job


def make(group: ftcomm.Group) -> dict[str, Any]:
    made = {name: group.subgroup(name, among) for name, among in GROUPS.items() if group.replica in among}
    return {**made, "all": group}


def reduce_in_all(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """In each step an all-reduce and a broadcast from the highest rank in each group, and what came of them."""
    groups = make(group)
    array = np.empty(arguments["elements"], np.float32)
    late: list[Any] = []
    for step in ftcomm.steps(ENDLESS):
        assert all(work.done() for work in late), "a boundary was passed with ops in flight"
        for name, some in groups.items():
            array[:] = 2.0**group.replica
            if step % 2:
                some.allreduce(array, async_op=True).wait()
            else:
                some.allreduce(array)
            spans, crc = seen(array), zlib.crc32(array.view(np.uint8).data)
            array[:] = step + group.replica
            try:
                some.broadcast(array, len(some.roster) - 1)
                got = f"{array.min()} {array.max()}"
            except LostError as error:
                got = str(error)
            notes.write(kind="did", group=name, step=step, crc=crc, spans=spans, got=got, roster=some.roster)
        late = [some.barrier(async_op=True) for some in groups.values()]


@pytest.mark.parametrize(("transport", "kills"), [("shm", 8), ("tcp", 4)])
def test_kills_at_random_moments(tmp_path: Path, transport: str, kills: int) -> None:
    """What was said of a step is said alike by all of a group, its roster too; nobody is in it who does not belong."""
    if transport == "shm":
        only_on_host("broadcast")
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    everybody = set(range(4))
    with Job(tmp_path, replicas=4, body=reduce_in_all, transport=transport, elements=200_003) as job:
        job.wait_contributing(everybody)
        for _ in range(fewer(kills)):
            time.sleep(rng.uniform(0.0, 0.05))
            since, victim = len(job.events), rng.randrange(4)
            job.kill(victim)
            job.wait_event(f"view without {victim}", lambda events, s=since, v=victim: _lost(events[s:], v))
            job.start(victim)
            job.wait_contributing(everybody, since=since)
        job.drain()
        for replica in everybody:
            assert job.join(replica) == [0], (SEED, job.errors())
        assert not job.errors(), SEED
    did: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    fewer_there = 0
    for replica, _, note in job.notes():
        if note["kind"] == "did":
            among = set(GROUPS.get(note["group"], everybody))
            assert {r for _, _, who in note["spans"] for r in who} <= among, (SEED, note)
            assert set(note["roster"]) <= among, (SEED, note)
            fewer_there += len(note["roster"]) < len(among)
            did[note["group"], note["step"]][replica] = str([note["crc"], note["spans"], note["got"], note["roster"]])
    for where, said in did.items():
        assert len(set(said.values())) == 1, f"seed {SEED}: {where}: {said}"
    assert fewer_there, "no group has ever gone on without a member"


def one_by_one(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Replica 3 dies before it has made the group of all but one, replica 2 in it, replica 1 closes it at once."""
    with pytest.raises(ArgumentError, match="expected this one among them"):
        group.subgroup("without me", [replica for replica in range(4) if replica != group.replica])
    marks = Path(arguments["marks"])
    if group.replica == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    some = group.subgroup("some", [1, 2, 3]) if group.replica else None
    for step in ftcomm.steps(3):
        (marks / f"passed-{group.replica}-{step}").touch()
        if some is not None and not (step == 2 and group.replica == 1):
            if step == 1 and group.replica == 2:
                while not (marks / "passed-1-1").exists():
                    time.sleep(0.002)
                os.kill(os.getpid(), signal.SIGKILL)
            x = np.full(3, 2.0**group.replica)
            if step < 2:
                some.allreduce(x)
            notes.write(kind="did", step=step, got=x[0], roster=some.roster)
            if step == 0:
                assert (some.rank, some.world_size) == (some.roster.index(group.replica), len(some.roster))
                if some.rank == 0:
                    some.send(x + 1, 1)
                else:
                    some.recv(x, 0)
                notes.write(kind="message", got=x[0])
        if some is not None and step == 1:
            some.close()
            with pytest.raises(FtcommError, match="group 'some', replica 1 was closed; make a new one"):
                some.barrier()
            some = group.subgroup("some", [1])
    notes.write(kind="after", members=group.members)


def test_a_group_is_made_used_and_closed_while_members_are_lost(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=4, body=one_by_one) as job:
        for replica in (0, 1):
            assert job.join(replica) == [0], job.errors()
    did = {(r, note["step"]): (note["got"], note["roster"]) for r, _, note in job.notes() if note["kind"] == "did"}
    # Replica 3 may be missed before step 0 begins or in it, and replica 0, which waits for nobody, may have passed
    # further boundaries by then: it leaves the roster at the next one that none has passed.
    first, second = did[1, 0][1], did[1, 1][1]
    assert first in ([1, 2], [1, 2, 3])
    assert second in ([1, 2], first)
    assert did == {(1, 0): (6.0, first), (2, 0): (6.0, first), (1, 1): (2.0, second)}
    assert [note["got"] for _, _, note in job.notes() if note["kind"] == "message"] == [
        6.0,
        7.0,
    ]  # as it was sent, and as it came


def forgets(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A replica that comes back does not make the group again."""
    some = None if group.internals.outside else group.subgroup("all", range(3))
    for step in ftcomm.steps(ENDLESS):
        group.allreduce(np.ones(1))
        if some is not None:
            some.allreduce(np.ones(1))
        notes.write(kind="step", step=step)
        time.sleep(0.01)


def test_who_does_not_make_a_group_again_is_removed_and_not_those_who_wait_for_it(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, body=forgets, **CHAIN) as job:
        job.wait_contributing({0, 1, 2})
        job.kill(1)
        job.wait_event("view without 1", lambda events: _lost(events, 1))
        since = len(job.events)
        job.start(1)
        job.wait_event("view with 1", lambda events: _with(events[since:], 1))
        since = next(i for i, event in enumerate(job.events) if i >= since and _with([event], 1))
        job.wait_event("view without it", lambda events: _lost(events[since:], 1))
        (view,) = [event for event in job.events if event["kind"] == "view"][-1:]
        assert [member["replica"] for member in view["members"]] == [0, 2]
        assert job.join(1) == [1]
        job.drain()
        for replica in (0, 2):
            assert job.join(replica) == [0], job.errors()
    assert [replica for replica, _, _ in job.errors()] == [1]


def _with(events: list[dict[str, Any]], replica: int) -> bool:
    return any(e["kind"] == "view" and replica in [x["replica"] for x in e["members"]] for e in events)
