"""send and recv with copy_engine=True in real processes, with copies of host memory for copy engines: kills too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.kernels.device import INTERPRETED
from ftcomm.p2p.slots import AHEAD

from .job import Job, Notes
from .test_kills import ENDLESS

pytestmark = pytest.mark.protocol

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

CHUNK = 64 << 10  # bytes in a slot
SIZE = 20 * CHUNK + 5  # no message of it is whole when its 15th piece is copied
DYING = 2  # the step


def part(step: int, source: int, target: int) -> np.ndarray:
    return np.random.default_rng([step, source, target]).integers(0, 256, SIZE, np.uint8)


def exchange_forever(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Each sends to each, behind an all-reduce. Replica 1 dies in a copy of step 2, as a sender or as a receiver."""
    me = group.replica
    _watch()
    for step in ftcomm.steps(arguments["steps"]):
        if me == 1 and step == DYING:
            _die_in(arguments["what"])
        group.allreduce(np.ones(10, np.float32))
        roster = group.roster
        others = [rank for rank, who in enumerate(roster) if who != me]
        sources = {rank: part(step, me, roster[rank]) for rank in others}
        outs = {rank: np.zeros(SIZE, np.uint8) for rank in others}
        _used.clear()
        sent = {rank: group.send(x, rank, step, copy_engine=True, async_op=True) for rank, x in sources.items()}
        heard = {rank: group.recv(out, rank, step, copy_engine=True, async_op=True) for rank, out in outs.items()}
        lost, right = set(), set()
        for rank in others:
            for message in (sent[rank], heard[rank]):
                try:
                    message.wait()
                except ftcomm.LostError:
                    lost.add(roster[rank])
            if roster[rank] not in lost and (outs[rank] == part(step, roster[rank], me)).all():
                right.add(roster[rank])
        notes.write(kind="step", step=step, lost=sorted(lost), right=sorted(right), slots=len(_used))


_used: set[int] = set()  # pairs of slots of this rank through which something went in this step: one for a receiver


def _watch() -> None:
    from ftcomm.engines.gpu_kernel import slots

    put = slots.DeviceSlots.put

    def watched(self: slots.DeviceSlots, slot: int, source: int, nbytes: int) -> None:
        _used.add(slot // AHEAD)
        put(self, slot, source, nbytes)

    slots.DeviceSlots.put = watched  # type: ignore[method-assign]


def _die_in(what: str) -> None:
    from ftcomm.engines.gpu_kernel import slots

    left, copy = 15, getattr(slots.DeviceSlots, what)

    def watched(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        copy(*arguments)

    setattr(slots.DeviceSlots, what, watched)


@pytest.mark.parametrize("what", ["put", "take"])
def test_the_others_go_on_when_one_dies_in_a_copy(tmp_path: Path, what: str) -> None:
    """Its messages fail; those between the others do not, in that step and later."""
    body: Any = exchange_forever
    with Job(tmp_path, replicas=3, body=body, engine="interpreter-kernel", steps=ENDLESS, what=what) as running:

        def steps(replica: int) -> list[dict[str, Any]]:
            return [note for who, _, note in running.notes() if who == replica and note["kind"] == "step"]

        end = time.monotonic() + 120
        while any(len(steps(replica)) < 6 for replica in (0, 2)):
            assert time.monotonic() < end
            time.sleep(0.02)
        running.drain()
        for replica in (0, 2):
            assert running.join(replica) == [0], running.errors()
            notes = {note["step"]: note for note in steps(replica)}
            for step, note in notes.items():
                if step < DYING:
                    assert (note["lost"], note["right"], note["slots"]) == ([], sorted([1, 2 - replica]), 2)
                elif step == DYING or (step == DYING + 1 and note["lost"]):
                    assert (note["lost"], note["right"]) == ([1], [2 - replica])
                else:
                    assert (note["lost"], note["right"], note["slots"]) == ([], [2 - replica], 1)
