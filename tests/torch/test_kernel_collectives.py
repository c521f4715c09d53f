"""The collectives of groups and of the process group where a kernel runs them: FTCOMM_ENGINE=interpreter-kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcomm.kernels.call_codes import KINDS
from ftcomm.kernels.device import INTERPRETED

from ..process.job import Job
from . import fsdp_bodies
from . import kernel_bodies as bodies
from .test_fsdp import close

pytestmark = pytest.mark.protocol

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)


def job(folder: Path, replicas: int, body: Any, **arguments: Any) -> Job:
    return Job(folder, replicas=replicas, body=body, engine="interpreter-kernel", **arguments)


def test_fsdp_trains_by_kernels(tmp_path: Path) -> None:
    """What one process alone would train; its parameters are gathered and its gradients scattered by kernels."""
    with job(tmp_path, 2, bodies.fsdp, steps=1) as running:
        assert [running.join(replica) for replica in range(2)] == [[0], [0]], running.errors()
        finals = [note for _, _, note in running.notes() if note["kind"] == "final"]
    assert finals[0]["weights"] == finals[1]["weights"]
    close(finals[0]["weights"], fsdp_bodies.alone(1, lambda step: [0, 1]))
    for final in finals:
        assert final["launches"]["allgather"] >= 2
        assert final["launches"]["reduce_scatter"] == 2


def test_ddp_trains_by_kernels(tmp_path: Path) -> None:
    with job(tmp_path, 2, bodies.ddp) as running:
        assert [running.join(replica) for replica in range(2)] == [[0], [0]], running.errors()
        finals = [note for _, _, note in running.notes() if note["kind"] == "final"]
    assert finals[0]["weights"] == finals[1]["weights"], "the weights of rank 0 were not given to all"
    assert finals[0]["grads"] == finals[1]["grads"]
    assert all(final["launches"]["broadcast"] and final["launches"]["allreduce"] for final in finals)


def test_calls_of_a_group(tmp_path: Path) -> None:
    """Dtypes that cannot be reduced, strided arrays, parts in place, each root, parts of unequal lengths."""
    with job(tmp_path, 3, bodies.every_call) as running:
        assert [running.join(replica) for replica in range(3)] == [[0]] * 3, running.errors()
        notes = [note for _, _, note in running.notes()]
    done = [note for note in notes if note["kind"] == "done"]
    assert len(done) == 3
    assert all(set(note["launches"]) == set(KINDS) for note in done)


@pytest.mark.parametrize(
    ("point", "times"),
    [("posted", 2), pytest.param("taken", 19, marks=pytest.mark.sweep), ("taken", 34)],
)
def test_one_is_killed_inside_the_kernel(tmp_path: Path, point: str, times: int) -> None:
    """In the first call, as the root of a scatter, in an alltoall of unequal parts: the others have one outcome, and
    go on with the next call, in the same step."""
    with job(tmp_path, 3, bodies.gather_and_die, steps=3, count=40_000, point=point, times=times) as running:
        assert [running.join(replica) for replica in (0, 2)] == [[0], [0]], running.errors()
        steps = [(who, note) for who, _, note in running.notes() if note["kind"] == "step"]
    by_step = {step: [note for who, note in steps if note["step"] == step and who != 1] for step in range(3)}
    for notes in by_step.values():
        assert len(notes) == 2
        assert notes[0] == notes[1]
    last = {"gathered": [0.0, 2.0], "scattered": [200.0], "collected": True, "exchanged": True, "ones": 2.0}
    assert by_step[2][0] == {"kind": "step", "step": 2, **last}
    of_lost = {19: "scattered", 34: "exchanged"}
    assert times not in of_lost or by_step[0][0][of_lost[times]] == "lost"
    assert by_step[0][0]["gathered"] in ([0.0, 1.0, 2.0], "lost")
