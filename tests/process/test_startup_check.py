"""Replicas that do not begin with the same state are told so before the first step, or take that of the lowest."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcomm.launch import run

from .test_launch_training import DEADLINE, Job, here

__all__ = ["here"]

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol, pytest.mark.timeout(DEADLINE + 40)]

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
