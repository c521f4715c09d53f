"""A job whose processes are all stopped, as a scheduler suspends it, for longer than an op waits: it goes on as if
nothing had been, and so does what was in progress. So it does if the coordinator alone is, and a member is lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.groups.static_group import StaticGroup

from .bodies import reduce_forever
from .job import Job, Notes
from .test_faults import _until
from .test_held import go_on
from .test_kills import ENDLESS, check

pytestmark = pytest.mark.protocol

SECONDS = 5.0  # that an op may take
CHAIN: dict[str, Any] = dict(op_timeout=SECONDS, heartbeat_timeout=1.0, op_floor=4.0)


def meet_late(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """In step 3, replica 0 waits for a message, 2 for a member of a static group, and 3 for all; 1 holds them up."""
    there = Path(arguments["marks"]) / "go"
    pair = StaticGroup.in_job(group, "pair", [(1, 0), (2, 0)]) if group.replica in (1, 2) else None
    for step in ftcomm.steps(6):
        if step == 3:
            came = np.zeros(2)
            message = group.recv(came, 1, async_op=True, timeout=SECONDS) if group.replica == 0 else None
            notes.write(kind="meets")
            while group.replica == 1 and not there.exists():
                time.sleep(0.01)
            if group.replica == 1:
                group.send(np.full(2, 7.0), 0)
            if message is not None:
                message.wait()
                notes.write(kind="came", values=came.tolist())
            if pair is not None:
                pair.barrier()
        x = np.full(300, 2.0**group.replica)
        group.allreduce(x)
        notes.write(kind="sum", step=step, value=float(x.min()))


def test_a_job_that_is_suspended_goes_on(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=4, body=meet_late, transport="tcp", **CHAIN) as running:
        for _ in _until(lambda: sum(x["kind"] == "meets" for _, _, x in running.notes()) == 4, "they never meet"):
            pass
        seen = len(running.events)
        for replica in range(4):
            running.signal(replica, signal.SIGSTOP)
        time.sleep(2.4 * SECONDS)
        (tmp_path / "go").touch()
        for replica in range(4):
            running.signal(replica, signal.SIGCONT)
        for replica in range(4):
            assert running.join(replica) == [0], running.what_happened()
        told = [event for event in running.events[seen:] if event["kind"] in ("view", "removed")]
    notes = [note for _, _, note in running.notes()]
    assert not told, "in the same view"
    assert [note["values"] for note in notes if note["kind"] == "came"] == [[7.0, 7.0]]
    assert [note["value"] for note in notes if note["kind"] == "sum"] == 24 * [15.0]


def test_who_waits_for_a_lost_member_waits_until_a_stopped_coordinator_goes_on(tmp_path: Path) -> None:
    """And finishes the same op then: no step is lost, and none has two results."""
    with Job(tmp_path, replicas=3, body=reduce_forever, elements=300, steps=ENDLESS, **CHAIN) as running:
        with running.own_coordinator() as own:
            go_on(running, range(3))
            own.signal(signal.SIGSTOP)
            running.kill(2)
            time.sleep(2.4 * SECONDS)
            own.signal(signal.SIGCONT)
            go_on(running, (0, 1))
        for replica in range(2):
            running.kill(replica)
            running.processes[replica, 0].join(10)
        assert not running.errors()
        check(running)


def reduce_by_columns(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Steps of HSDP: reduce between the replicas, then meet inside of this one."""
    inside = StaticGroup.in_job(group, f"inside-{group.replica}", [(group.replica, 0), (group.replica, 1)])
    for step in ftcomm.steps(6):
        if step == 3:
            notes.write(kind="there")
            if group.replica == 2 and group.shard == 0:
                time.sleep(1000)  # it is killed here
        array = np.full(300, 2.0**group.replica, np.float32)
        group.allreduce(array)
        inside.barrier()
        notes.write(kind="sum", step=step, value=float(array.max()))


def test_a_rank_waits_for_one_of_its_replica_that_waits_for_a_lost_member(tmp_path: Path) -> None:
    with (
        Job(tmp_path, replicas=3, ranks=2, body=reduce_by_columns, **CHAIN) as running,
        running.own_coordinator() as own,
    ):
        for _ in _until(lambda: sum(x["kind"] == "there" for _, _, x in running.notes()) == 6, "not all are there"):
            pass
        own.signal(signal.SIGSTOP)
        running.kill(2)
        time.sleep(2.4 * SECONDS)
        own.signal(signal.SIGCONT)
        for key, process in running.processes.items():
            if key[0] < 2:
                process.join(120)
        assert not running.errors()
    ends = {(r, k): x["value"] for r, k, x in running.notes() if x["kind"] == "sum" and x["step"] == 5}
    assert ends == dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 3.0)
