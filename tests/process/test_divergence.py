"""A rank whose memory corrupts data, under `ftcomm run`: found out, removed, started again, caught up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftcomm.launch import run
from tests.process.test_launch_training import Job

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol]

# Replica 1 flips a bit of its result in one step of its first life, before it tells the others that it has the result.
FAULTY = """
import os, time
import numpy as np
import torch
import ftcomm
from ftcomm.collective.algorithms.base import Algorithm

group = ftcomm.init()
first_life = not os.path.exists(f"lived-{group.replica}")
open(f"lived-{group.replica}", "w").close()
fingerprint, faulty = Algorithm.fingerprint, False

def flip(algorithm, slot):
    if faulty and slot.task.chunk == 0 and slot.here.nbytes > 4096:  # not in the op that ends the loop
        slot.here.view(np.uint8)[4096] ^= 1
    return fingerprint(algorithm, slot)

Algorithm.fingerprint = flip
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = {"model": model, "optimizer": optimizer}
for step in ftcomm.steps(1_000_000, state):
    faulty = group.replica == 1 and first_life and step == 20
    gradient = torch.full((200_000,), 1.0 + group.replica)
    ftcomm.allreduce(gradient, "avg")
    model.weight.grad = gradient[:64].reshape(8, 8).clone()
    model.bias.grad = gradient[64:72].clone()
    optimizer.step()
    over = np.array([os.path.exists("go")])
    ftcomm.allreduce(over, "max")
    if over[0]:
        break
    time.sleep(0.005)
print("digest", ftcomm.verify(state))
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_corrupts_a_result_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FTCOMM_LOG", "warning")
    monkeypatch.setenv("FTCOMM_VERIFY", "1")
    job = Job(tmp_path, FAULTY, transport=transport)

    async def plan() -> None:
        await job.until(lambda: job.contributing() == {0, 2})
        await job.until(lambda: job.contributing() == {0, 1, 2})
        (tmp_path / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    found = {(e["replica"], e["chunk"], e["wrong"], e["right"]) for e in job.of("divergence")}
    assert (1, 0, "1", "0, 2") in found
    assert {each[1:] for each in found} == {(0, "1", "0, 2")}
    assert any("DivergenceError: replica 1 cannot go on" in line for line in job.lines), job.lines
    assert [event["replica"] for event in job.of("process_started")] == [0, 1, 2, 1]
    digests = [line for line in job.lines if line.startswith("digest")]
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert re.fullmatch("digest [0-9a-f]{32}", digests[0])
