"""Replicas that do not begin with the same state are told so before the first step, or take that of the lowest."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcomm.launch import run

from .test_launch_training import Job, here

__all__ = ["here"]

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol]

UNEQUAL = """
import os, sys
import numpy as np
import torch
import ftcomm

group = ftcomm.init()
torch.manual_seed(SEED)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
w = np.full(100, float(SEED))
for step in ftcomm.steps(5, {"model": model, "optimizer": optimizer, "w": w}):
    for p in model.parameters():
        p.grad = torch.full_like(p, step)
        ftcomm.allreduce(p.grad, op="avg")
    optimizer.step()
digest = ftcomm.verify({"model": model, "optimizer": optimizer, "w": w}) if "verify" in sys.argv else "different"
print("state", w[0], digest)
"""


@pytest.mark.parametrize(
    ("seed", "who"),
    [
        ("3 if group.replica == 1 else 7", "the state of replica 1 differs from that of replicas 0, 2"),
        ("group.replica", "none has a majority"),
    ],
)
def test_another_state_is_an_error_on_all_that_names_who_differs(here: Path, seed: str, who: str) -> None:
    job = Job(here, UNEQUAL.replace("SEED", seed), max_restarts=0)
    assert job.run() == run.FAILED
    told = [line for line in job.lines if line.startswith("ftcomm.errors.StateError")]
    assert len(told) == 3, job.lines
    for line in told:
        assert who in line
        assert "in 5 of " in line
        assert "model.0.bias, model.0.weight, model.1.bias and 2 more. Build it alike" in line
    assert not any(line.startswith("state") for line in job.lines)


def test_all_take_the_state_of_the_lowest_if_so_set(here: Path) -> None:
    job = Job(here, UNEQUAL.replace("SEED", "3 + group.replica"), "verify", env={"FTCOMM_START": "lowest"})
    assert job.run() == run.FINISHED, job.lines
    states = [line for line in job.lines if line.startswith("state")]
    assert len(states) == 3
    assert len(set(states)) == 1
    assert states[0].startswith("state 3.0 ")
    assert {event["of"] for event in job.of("state_taken")} == {0}


def test_nobody_looks_if_so_set(here: Path) -> None:
    script = UNEQUAL.replace("SEED", "group.replica").replace('"w": w}):', '"w": w}, initial_state="trust"):')
    job = Job(here, script)
    assert job.run() == run.FINISHED, job.lines
    assert {line.split()[1] for line in job.lines if line.startswith("state")} == {"0.0", "1.0", "2.0"}


TERMS = """
import os
import numpy as np
import ftcomm
from ftcomm.training import StepLoop

group = ftcomm.init()
ONE = group.replica == 1
x = np.empty(1)
seen = []
for step in StepLoop(ARGUMENTS):
    x[:] = step
    ftcomm.allreduce(x, op="avg")
    seen.append((step, float(x[0])))
print("steps", seen)
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{'w': np.ones(3)}, start=5 if ONE else 0", "start=0 on replicas 0, 2, start=5 on replica 1"),
        (
            "{'w': np.ones(3)}, start=5 if ONE else None, initial_state='trust'",
            "start=0 on replicas 0, 2, start=5 on replica 1",
        ),
        ("start=5 if ONE else 0", "start=0 on replicas 0, 2, start=5 on replica 1"),
        ("vote=False, start=5 if ONE else None", "start=0 on replicas 0, 2, start=5 on replica 1"),
        (
            "{'w': np.ones(3)}, initial_state='trust' if ONE else None",
            "initial_state='check' (FTCOMM_START) on replicas 0, 2, initial_state='trust' (FTCOMM_START) on replica 1",
        ),
        ("vote=not ONE", "vote=True on replicas 0, 2, vote=False on replica 1"),
        ("lr='linear' if ONE else 'none'", "lr='none' on replicas 0, 2, lr='linear' on replica 1"),
        (").steps(6 if ONE else 9", "total=9 on replicas 0, 2, total=6 on replica 1"),
        (").steps(6 if ONE else None", "total=None on replicas 0, 2, total=6 on replica 1"),
    ],
)
def test_loops_that_would_do_other_things_are_an_error_on_all(here: Path, arguments: str, said: str) -> None:
    call = arguments if "steps(" in arguments else arguments + ").steps(8"
    job = Job(here, TERMS.replace("ARGUMENTS", call), max_restarts=0)
    assert job.run() == run.FAILED
    told = [line for line in job.lines if line.startswith("ftcomm.errors.StateError")]
    assert len(told) == 3, job.lines
    assert all(f"do not begin alike: {said}. Pass the same arguments" in line for line in told), told
    assert not any(line.startswith("steps") for line in job.lines)


def test_all_begin_where_the_lowest_does_if_so_set(here: Path) -> None:
    arguments = "{'w': np.full(3, group.replica)}, start=5 - group.replica, initial_state='lowest'"
    job = Job(here, TERMS.replace("ARGUMENTS", arguments + ").steps(8"))
    assert job.run() == run.FINISHED, job.lines
    assert [line for line in job.lines if line.startswith("steps")] == ["steps [(5, 5.0), (6, 6.0), (7, 7.0)]"] * 3
