"""allgather(copy_engine=True) in real processes, with copies of host memory for copy engines: kills, other calls."""

from __future__ import annotations

import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.kernels.device import INTERPRETED

from .job import DEADLINE, Job, Notes
from .test_kills import ENDLESS

pytestmark = pytest.mark.protocol

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

CHUNK = 64 << 10  # bytes in a slot
SIZE = 3 * CHUNK + 5
PIECES = 4


def job(folder: Path, replicas: int, body: Any, **arguments: Any) -> Job:
    return Job(folder, replicas=replicas, body=body, engine="interpreter-kernel", steps=ENDLESS, **arguments)


def part(step: int, replica: int) -> np.ndarray:
    return np.random.default_rng([step, replica]).integers(0, 256, SIZE, np.uint8)


def gather_forever(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Behind an all-reduce each time. Replica 1 dies in step 2 before it says for the `at`-th time that it has taken a
    piece: in each round it takes one of replica 2, then one of 0. In odd steps its part lies in the result before.
    With `uncounted` the input of replica 0 changes no minimum, as that of one that catches up does not."""
    if group.replica == 0 and arguments.get("uncounted"):
        _count_not(group)
    if arguments["at"] == "verdict":
        _differ_about_the_epoch(group)
    elif group.replica == 1:
        _die_at(2 * 2 * PIECES + arguments["at"])
    for step in ftcomm.steps(arguments["steps"]):
        group.allreduce(np.ones(10, np.float32))
        out = np.zeros((len(group.roster), SIZE), np.uint8)
        mine = part(step, group.replica)
        if step % 2:
            own = out[group.roster.index(group.replica)]
            own[:] = mine
            mine = own
        try:
            result = group.allgather(out, mine, copy_engine=True)
        except ftcomm.LostError as error:
            notes.write(kind="gather", step=step, lost=str(error))
            continue
        right = result is out and all((out[i] == part(step, who)).all() for i, who in enumerate(group.roster))
        notes.write(kind="gather", step=step, right=right, crc=zlib.crc32(out.tobytes()), roster=group.roster)


def _die_at(count: int) -> None:
    from ftcomm.engines.gpu_kernel import copies

    left, say = count, copies.Copies._raise

    def watched(self: copies.Copies, word: int, counter: int) -> None:
        nonlocal left
        left -= word >= copies.TAKEN
        if left == 0:
            time.sleep(0.3)  # nothing is awaited here: time for the others to be through, if they can
            os.kill(os.getpid(), signal.SIGKILL)
        say(self, word, counter)

    copies.Copies._raise = watched  # type: ignore[method-assign]


def _count_not(group: ftcomm.Group) -> None:
    allreduce = group.allreduce

    def uncounted(x: np.ndarray, op: str = "sum", **how: Any) -> Any:
        if op == "min":
            x[:] = 1
        return allreduce(x, op, **how)

    group.allreduce = uncounted  # type: ignore[method-assign]


def _differ_about_the_epoch(group: ftcomm.Group) -> None:
    """In step 2, when the copies are whole on all, replica 1 dies, and 0 has said that they are before 2 looks."""
    from ftcomm.engines.gpu_kernel import gather

    lost, calls = gather._agree_on_lost, 0

    def watched(calling: Any, exchange: Any, roster: Any, epoch: int | None) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and group.replica == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + 30
        while calls == 3 and group.replica == 2 and exchange.view.epoch == epoch and time.monotonic() < end:
            time.sleep(0.001)
        return lost(calling, exchange, roster, epoch)

    gather._agree_on_lost = watched


def _gathered(running: Job, replica: int) -> dict[int, dict[str, Any]]:
    return {n["step"]: n for who, _, n in running.notes() if who == replica and n["kind"] == "gather"}


@pytest.mark.parametrize(
    ("at", "uncounted"), [pytest.param(1, False, marks=pytest.mark.sweep), (2 * PIECES, True), ("verdict", False)]
)
def test_all_have_the_same_of_a_gather_in_which_one_dies(tmp_path: Path, at: int | str, uncounted: bool) -> None:
    """In the second case it has told replica 2 that it has all, and not 0, whose failure is in no minimum. All fail
    alike, and go on as two."""
    with job(tmp_path, 3, gather_forever, at=at, uncounted=uncounted) as running:
        end = time.monotonic() + DEADLINE
        while len(_gathered(running, 0)) < 6:
            assert time.monotonic() < end
            time.sleep(0.02)
        running.drain()
        for replica in (0, 2):
            assert running.join(replica) == [0], running.errors()
        first, second = _gathered(running, 0), _gathered(running, 2)
        steps = sorted(first.keys() & second.keys())
        assert [first[step] for step in steps] == [second[step] for step in steps]
        assert "replica 1 of ranks (0, 1, 2) went before all had the parts of all" in first[2]["lost"]
        others = [first[step] for step in steps if step != 2]
        assert all(note["right"] for note in others)
        assert [note["roster"] for note in others[:2]] == [[0, 1, 2]] * 2
        assert all(note["roster"] == [0, 2] for note in others[2:])


def gather_others(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    size = 9 if group.replica == 1 else 8
    with pytest.raises(ftcomm.MismatchError) as raised:
        group.allgather(np.zeros(2 * size, np.uint8), np.ones(size, np.uint8), copy_engine=True)
    notes.write(kind="call", text=str(raised.value))
    out = np.zeros(2 * 3, np.complex128)
    for wrong in (dict(out=out[1:]), dict(x=out[2:5]), dict(x=out[::2])):
        arguments = {"out": out, "x": np.ones(3, np.complex128), **wrong}
        with pytest.raises(ftcomm.ArgumentError):
            group.allgather(**arguments, copy_engine=True)
    group.allgather(out, np.full(3, 1j + group.replica), copy_engine=True)
    group.allgather(np.zeros(0), np.zeros(0), copy_engine=True)
    notes.write(kind="call", right=out.tolist() == [1j] * 3 + [1 + 1j] * 3)


def test_other_sizes_are_an_error_on_all_and_the_group_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, 2, gather_others) as running:
        for replica in range(2):
            assert running.join(replica) == [0], running.errors()
            said = [note for who, _, note in running.notes() if who == replica and note["kind"] == "call"]
            assert "replica 0: op 0, allgather() of 8 x" in said[0]["text"]
            assert "replica 1: op 0, allgather() of 9 x" in said[0]["text"]
            assert said[1]["right"]
