"""The facts of a job while somebody is removed: what is gone soon is looked at first, and who has suspected whom is a
wait that nobody has seen."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftcomm.diagnosis import collect
from ftcomm.diagnosis.causes import StallCause
from ftcomm.diagnosis.collect import JobPlace, ReplicaPlace, Suspicion
from ftcomm.diagnosis.connections import TcpConnection
from ftcomm.diagnosis.facts import Rank
from ftcomm.diagnosis.verdict import judge
from ftcomm.recorder.layout import PROCESS_SHAPE, GroupKind, PhaseKind
from ftcomm.recorder.reader import Recording
from ftcomm.recorder.recorder import GroupRecorder, Owner, Recorder

ONE, OTHER = ("10.0.0.1", 1000), ("10.0.0.2", 2000)
Sides = dict[Rank, list[TcpConnection]]


class Op:
    call, detail, caller, record = 1000 << 16 | 2 << 8, 0, 0, 0

    def __init__(self, place: int = 1) -> None:
        self.place = place


def recorded(folder: Path, replica: int, began: float) -> GroupRecorder:
    path = folder / f"replica-{replica}.shard-0.pid-{os.getpid()}.recording"
    with open(path, "w+b") as file:
        file.truncate(PROCESS_SHAPE.size)
        recorder = Recorder(mmap.mmap(file.fileno(), PROCESS_SHAPE.size), PROCESS_SHAPE)
    recorder.clock = lambda: began
    recorder.describe(Owner(replica, 0, 2, 1, "job", "here"))
    return recorder.group("job", replica, GroupKind.JOB)


def job(folder: Path) -> JobPlace:
    members = tuple(ReplicaPlace(replica, True, "here", {0: os.getpid()}) for replica in (0, 1))
    return JobPlace("run", folder, members, 1, op_floor=4.0, op_timeout=16.0, grace=5.0, presence=1.5, forming=False)


def cut(one_way: bool) -> Sides:
    """A connection by which nothing comes to the second; nor to the first, if it is not cut one way alone."""
    to = TcpConnection(ONE, OTHER, waiting=4000, retries=4, acknowledged=9, sent=20, received=20, heard=1.0)
    back = TcpConnection(OTHER, ONE, waiting=4000, retries=4, acknowledged=9, sent=20, received=12, heard=2.0)
    return {(0, 0): [to], (1, 0): [back if one_way else back._replace(sent=28)]}


@pytest.mark.parametrize("suspected", [None, "in an op", "behind it"])
@pytest.mark.parametrize(("one_way", "cause"), [(False, StallCause.CUT), (True, StallCause.CUT_ONE_WAY)])
def test_a_removal_while_recordings_are_read_leaves_the_verdict(
    one_way: bool, cause: StallCause, suspected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, began = Op(), time.monotonic() - 2.0
    groups = [recorded(tmp_path, replica, began) for replica in (0, 1)]
    groups[0].called(op, began)
    groups[0].waits(op, (1,), began, began + 1.0)
    sides = cut(one_way)
    read = collect.recordings

    def reads(folder: Path, pids: Mapping[Rank, int], newest: int | None = None) -> dict[Rank, list[Recording]]:
        if not suspected:
            found = read(folder, pids, newest)
        sides.clear()  # it is removed: its connections are gone, and the op ends without it
        groups[0].returned(op, began + 1.2 if suspected == "behind it" else time.monotonic())
        return read(folder, pids, newest) if suspected else found

    def look(place: Any, pids: Mapping[Rank, int]) -> Sides:
        return {rank: sides.get(rank, []) for rank in pids}

    monkeypatch.setattr(collect, "recordings", reads)
    monkeypatch.setattr(collect, "_sides", look)
    found = judge(collect.collect(job(tmp_path), [Suspicion(0, 1, began + 1.5)] if suspected else ()))
    assert (found.cause, found.culprits) == (cause.value, ((0, 0), (1, 0)))


@pytest.mark.parametrize("grows", [False, True])
def test_a_wait_that_does_not_grow_is_of_a_rank_that_does_not_run(
    grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, began = Op(), time.monotonic() - 9.0
    groups = [recorded(tmp_path, replica, began) for replica in (0, 1)]
    groups[0].called(op, began)
    groups[0].waits(op, (1,), began, began + 5.0)
    read = collect.recordings

    def reads(folder: Path, pids: Mapping[Rank, int], newest: int | None = None) -> dict[Rank, list[Recording]]:
        found = read(folder, pids, newest)
        if grows:
            groups[0].waits(op, (1,), began, began + 6.0)
        return found

    monkeypatch.setattr(collect, "recordings", reads)
    found = judge(collect.collect(job(tmp_path)))
    assert found.culprits == (((1, 0),) if grows else ())


def test_a_job_that_pauses_for_too_few_replicas_is_told_so_with_those_that_are_away(
    tmp_path: Path,
) -> None:
    began = time.monotonic() - 9.0
    recorder = recorded(tmp_path, 0, began).recorder
    begun = recorder.begin(PhaseKind.PAUSE, step=47, number=1, note="2 needed", lasts=600.0)
    there, away = job(tmp_path).replicas
    away = msgspec.structs.replace(away, member=False, pids={}, reason="exited with code 1")
    place = msgspec.structs.replace(job(tmp_path), replicas=(there, away))
    found = judge(facts := collect.collect(place))
    assert (found.cause, found.culprits, found.removal) == (StallCause.PAUSE.value, (), None)
    said = " ".join(found.sentences(facts.at))
    assert "before step 47: too few replicas contribute (1 when that began, 2 needed). Since" in said
    assert "Not back yet: replica 1 (exited with code 1). If nothing moves, the step loop fails at" in said
    assert found.gives_up is not None
    assert 0.0 < found.gives_up[0] - facts.at <= 591.0
    recorder.finish(begun)
    assert judge(collect.collect(place)).cause == StallCause.NONE.value


@pytest.mark.parametrize(
    ("returned", "came_back", "waited"),
    [
        pytest.param(None, False, [("op 1", 9.5)], id="still in that op"),
        pytest.param(7.0, False, [("op 1", 2.5)], id="in an earlier op"),
        pytest.param(8.5, False, [("a sign of life", 9.5)], id="between ops"),
        pytest.param(None, True, [], id="who has come back"),
    ],
)
def test_a_suspicion_is_a_wait_of_the_op_and_the_life_that_it_was_told_of(
    returned: float | None, came_back: bool, waited: list[tuple[str, float]], tmp_path: Path
) -> None:
    """Else an op that has just begun would be taken for a stall of many seconds when who was removed is back."""
    now = time.monotonic()
    group, op, later = recorded(tmp_path, 0, now - 60.0), Op(1), Op(2)
    recorded(tmp_path, 1, now - 1.0 if came_back else now - 60.0)
    group.called(op, now - 9.0)
    if returned is not None:
        group.returned(op, now - returned)
        group.called(later, now - 6.0)
    facts = collect.collect(job(tmp_path), [Suspicion(0, 1, now - 8.0)])
    took = time.monotonic() - now
    seen = facts if facts.earlier is None else facts.earlier
    waits = [(what.within, wait.seconds) for rank in seen.ranks for what in rank.inside for wait in what.waits]
    assert len(waits) == len(waited)
    for (within, seconds), (what, expected) in zip(waits, waited, strict=True):
        assert what in within
        assert expected - 1.0 < seconds < expected + 1.0 + took
