"""The facts of a job while somebody is removed: what is gone soon is looked at first, and who has suspected whom is a
wait that nobody has seen."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ftcomm.diagnosis import collect
from ftcomm.diagnosis.causes import StallCause
from ftcomm.diagnosis.collect import JobPlace, ReplicaPlace, Suspicion
from ftcomm.diagnosis.connections import Connection
from ftcomm.diagnosis.facts import Rank
from ftcomm.diagnosis.verdict import judge
from ftcomm.recorder.layout import PROCESS_SHAPE, GroupKind
from ftcomm.recorder.reader import Recording
from ftcomm.recorder.recorder import GroupRecorder, Owner, Recorder

ONE, OTHER = ("10.0.0.1", 1000), ("10.0.0.2", 2000)
Sides = dict[Rank, list[Connection]]


class Op:
    place, call, detail, caller, record = 1, 1000 << 16 | 2 << 8, 0, 0, 0


def recorded(folder: Path, replica: int) -> GroupRecorder:
    path = folder / f"replica-{replica}.rank-0.pid-{os.getpid()}.recording"
    with open(path, "w+b") as file:
        file.truncate(PROCESS_SHAPE.size)
        recorder = Recorder(mmap.mmap(file.fileno(), PROCESS_SHAPE.size), PROCESS_SHAPE)
    recorder.describe(Owner(replica, 0, 2, 1, "job", "here"))
    return recorder.group("job", replica, GroupKind.JOB)


def cut(one_way: bool) -> Sides:
    """A connection by which nothing comes to the second; nor to the first, if it is not cut one way alone."""
    to = Connection(ONE, OTHER, waiting=4000, retries=4, acknowledged=9, sent=20, received=20, heard=1.0)
    back = Connection(OTHER, ONE, waiting=4000, retries=4, acknowledged=9, sent=20, received=12, heard=2.0)
    return {(0, 0): [to], (1, 0): [back if one_way else back._replace(sent=28)]}


@pytest.mark.parametrize("suspected", [False, True])
@pytest.mark.parametrize(("one_way", "cause"), [(False, StallCause.CUT), (True, StallCause.CUT_ONE_WAY)])
def test_a_removal_while_recordings_are_read_leaves_the_verdict(
    one_way: bool, cause: StallCause, suspected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [recorded(tmp_path, replica) for replica in (0, 1)]
    op, began = Op(), time.monotonic() - 2.0
    groups[0].called(op, began)
    groups[0].waits(op, (1,), began, began + 1.0)
    sides = cut(one_way)
    read = collect.recordings

    def reads(folder: Path, pids: Mapping[Rank, int], newest: int | None = None) -> dict[Rank, list[Recording]]:
        if not suspected:
            found = read(folder, pids, newest)
        sides.clear()  # it is removed: its connections are gone, and the op ends without it
        groups[0].returned(op, time.monotonic())
        return read(folder, pids, newest) if suspected else found

    def look(place: Any, pids: Mapping[Rank, int]) -> Sides:
        return {rank: sides.get(rank, []) for rank in pids}

    monkeypatch.setattr(collect, "recordings", reads)
    monkeypatch.setattr(collect, "_sides", look)
    members = tuple(ReplicaPlace(replica, "running", True, "here", {0: os.getpid()}) for replica in (0, 1))
    place = JobPlace("run", tmp_path, members, 1, op_floor=4.0, op_timeout=16.0, grace=5.0, presence=1.5, forming=False)
    found = judge(collect.collect(place, [Suspicion(0, 1, began + 1.5)] if suspected else ()))
    assert (found.cause, found.culprits) == (cause.value, ((0, 0), (1, 0)))
