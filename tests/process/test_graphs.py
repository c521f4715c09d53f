"""All-reduces inside graphs, in the interpreter of Triton: captured once, replayed, and repaired beneath the replay.

A graph of the interpreted device is the list of what was queued; what is shown here is the host's side of it, and the
kernel's counters. That a real CUDA graph may be made of it is for tests/gpu/test_graph.py.
"""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.kernels.device import INTERPRETED

from . import kernel_stops
from .bodies import seen
from .job import Job, Notes
from .test_kills import ENDLESS, SEED, check

pytestmark = pytest.mark.protocol

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

CHUNK = 64 << 10
ELEMENTS = 50_000  # of float32: four chunks, a lane each, reduced in shards


def job(folder: Path, replicas: int, body: Any, **arguments: Any) -> Job:
    return Job(folder, replicas=replicas, body=body, engine="interpreter-kernel", steps=ENDLESS, **arguments)


class Replayed:
    """Two captured ops, one of them atomic and coded as fp8, and one that is called behind them: what they made of
    2**replica."""

    def __init__(self, group: ftcomm.Group) -> None:
        self.group, self.device = group, group._engine.device
        self.arrays = [np.empty(n, np.float32) for n in (ELEMENTS, ELEMENTS, 3000)]
        with self.device.capture() as self.graph:
            group.allreduce(self.arrays[0])
            group.allreduce(self.arrays[1], atomic=True, compression="fp8")

    def step(self, notes: Notes, step: int) -> None:
        """In every other step nothing is called."""
        arrays = self.arrays if step % 2 else self.arrays[:2]
        for array in arrays:
            array[:] = 2.0**self.group.replica
        self.graph.replay()
        if step % 2:
            self.group.allreduce(self.arrays[2])
        contributed = self.group.contributed()
        spans = [seen(array) for array in arrays]
        if set.intersection(*(set(who) for span in spans for _, _, who in span)) != set(contributed):
            notes.write(kind="wrong", step=step, spans=spans, contributed=contributed)
        for array, who in zip(arrays, spans, strict=True):
            for start, stop, replicas in who:
                if (array[start:stop] != sum(2**replica for replica in replicas)).any():
                    notes.write(kind="wrong", step=step, spans=spans)
        if len(spans[1]) > 1:
            notes.write(kind="wrong", step=step, atomic=spans[1])
        crc = zlib.crc32(b"".join(array.tobytes() for array in arrays))
        notes.write(kind="step", step=step, crc=crc, spans=spans, whole=True, epoch=self.group.epoch)


def in_graph(group: ftcomm.Group) -> bool:
    """Whether the op that runs here is one of a graph."""
    from ftcomm.engines.gpu_kernel.graphs import captured

    running = group._exchange.core.running()  # type: ignore[union-attr]
    return running is not None and captured(running.template)


def replay_forever(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """The n-th life of replica 1 dies as it is about to say for the `left`-th time in a graph what is the n-th of
    `arguments["deaths"]`, (point, left); if it is to die `last`, when the others have said so. It stands still instead
    with `arguments["hold"]`, for as long."""
    marks, last = Path(arguments["marks"]), "last" in arguments
    life = len(list(marks.glob("notes-1-*[0-9]"))) - 1
    point, left = arguments["deaths"][life] if last or group.replica == 1 else ("", 0)

    def at(here: str) -> None:
        nonlocal left
        left -= here == point and in_graph(group)
        if group.replica != 1 or left:
            return
        if "hold" in arguments:
            time.sleep(arguments["hold"])
            return
        end = time.monotonic() + 60
        while last and len(list(marks.glob("has-*"))) < 2 and time.monotonic() < end:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def after(here: str) -> None:
        if last and here == point and left == 0:
            (marks / f"has-{group.replica}").touch()

    if point:
        kernel_stops.before_announce(at, after)
    replayed = Replayed(group)
    for step in ftcomm.steps(arguments["steps"]):
        replayed.step(notes, step)


def _without(running: Job, replica: int, since: int = 0) -> None:
    def found(events: list[dict[str, Any]]) -> bool:
        views = [e for e in events[since:] if e["kind"] == "view"]
        return any(replica not in [m["replica"] for m in view["members"]] for view in views)

    running.wait_event(f"view without {replica}", found)


def _go_on(running: Job, steps: int) -> None:
    def made() -> int:
        return sum(note["kind"] == "step" for replica, _, note in running.notes() if replica == 0)

    goal, end = made() + steps, time.monotonic() + 120
    while made() < goal:
        assert time.monotonic() < end
        time.sleep(0.02)


def _finish(running: Job, replicas: set[int]) -> dict[int, dict[int, dict[str, Any]]]:
    running.drain()
    for replica in replicas:
        assert running.join(replica) == [0], running.errors()
    return check(running)


@pytest.mark.sweep
@pytest.mark.parametrize("atomic", [False, True])
def test_what_the_others_hold_of_a_replay_when_one_dies_in_it(tmp_path: Path, atomic: bool) -> None:
    """In step 1, at the second of four chunks: two are FINAL at the others, with the input of the one that dies. They
    stay, if they may; those of the atomic op are reduced again. What is called behind it goes on among the two."""
    left = 8 + 2 + 4 * atomic
    with job(tmp_path, 3, replay_forever, deaths=[("taken", left)], last=True) as running:
        _without(running, 1)
        _go_on(running, 3)
        steps = _finish(running, {0, 2})
    two, whole, rest = 2 * CHUNK // 4, [[0, ELEMENTS, [0, 2]]], [[0, 3000, [0, 2]]]
    torn = [[0, two, [0, 1, 2]], [two, ELEMENTS, [0, 2]]]
    spans = [[[0, ELEMENTS, [0, 1, 2]]], whole, rest] if atomic else [torn, whole, rest]
    assert [note["spans"] for note in steps[1].values()] == [spans, spans]


@pytest.mark.parametrize("points", [("reduced",), pytest.param(("posted", "taken"), marks=pytest.mark.sweep)])
def test_deaths_in_replays(tmp_path: Path, points: tuple[str, ...]) -> None:
    """At any task; a new life captures a graph of its own, joins, and dies as well, but for the last."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    deaths = [(point, rng.randrange(9, 40)) for point in (*points, "")]
    since = 0
    with job(tmp_path, 3, replay_forever, deaths=deaths) as running:
        for _ in deaths[1:]:
            _without(running, 1, since)
            since = len(running.events)
            running.start(1)
            running.wait_contributing({0, 1, 2}, since=since)
        _go_on(running, 3)
        _finish(running, {0, 1, 2})


@pytest.mark.sweep
def test_the_one_that_stands_still_in_a_replay_is_removed(tmp_path: Path) -> None:
    times = dict(op_timeout=18.0, op_floor=6.0, heartbeat_timeout=4.5)  # a slow interpreter does not stand still
    with job(tmp_path, 3, replay_forever, deaths=[("taken", 12)], hold=60.0, **times) as running:
        _without(running, 1)
        _go_on(running, 3)
        running.kill(1)
        _finish(running, {0, 2})


def replay_others(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """The graph of replica 2 has another op; those of the others, then nobody, raise what came of it."""
    array = np.ones(100, np.float32)
    with group._engine.device.capture() as graph:  # type: ignore[union-attr]
        group.allreduce(array, "max" if group.replica == 2 else "sum")
    for number in range(3):
        graph.replay()
        try:
            group._exchange.wait_all(60)
        except ftcomm.MismatchError as error:
            notes.write(kind="call", number=number, text=str(error), input=float(array[0]))
    notes.write(kind="call", sum=float(group.allreduce(np.ones(5, np.float32))[0]))


def test_different_graphs_are_an_error_on_all_and_the_group_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, 3, replay_others) as running:
        for replica in range(3):
            assert running.join(replica) == [0], running.errors()
        for replica in range(3):
            *said, last = [note for who, _, note in running.notes() if who == replica and note["kind"] == "call"]
            assert [(note["number"], note["input"]) for note in said] == [(0, 1.0), (1, 1.0), (2, 1.0)]
            assert "replicas 0, 1: op 2, allreduce(op='sum')" in said[2]["text"]
            assert "replica 2: op 2, allreduce(op='max')" in said[2]["text"]
            assert last["sum"] == 3.0
