"""A job whose processes are all stopped, as a scheduler suspends it, for longer than an op may take: it goes on as if
nothing had been, and so does what was in progress."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.static.group import StaticGroup

from .job import Job, Notes
from .test_faults import _until

pytestmark = pytest.mark.protocol

SECONDS = 5.0  # that an op may take


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


@pytest.mark.timeout(120)
def test_a_job_that_is_suspended_goes_on(tmp_path: Path) -> None:
    chain: dict[str, Any] = dict(op_timeout=SECONDS, heartbeat_timeout=1.0, op_floor=4.0)
    with Job(tmp_path, replicas=4, body=meet_late, transport="tcp", **chain) as running:
        for _ in _until(lambda: sum(x["kind"] == "meets" for _, _, x in running.notes()) == 4, "they never meet"):
            pass
        seen = len(running.events)
        for replica in range(4):
            running.signal(replica, signal.SIGSTOP)
        time.sleep(1.6 * SECONDS)
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
