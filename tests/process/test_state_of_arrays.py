"""State that is no module: what cannot be sent is refused at the first boundary, and never ends a healthy source."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ftcomm.launch import run
from ftcomm.launch.policy import State

from .test_launch_training import FOREVER, Job, here

__all__ = ["here"]

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol]

KEEPS = """
import os, sys, time, zlib
sys.modules["torch"] = None  # as if it were not installed: a job of NumPy arrays does not need it
import numpy as np
import ftcomm

mine = "lived-" + os.environ["FTCOMM_REPLICA"]
first_life = not os.path.exists(mine)
open(mine, "w").close()

class Keeps:
    def __init__(self, value):
        self.value = value
    def state_dict(self):
        if os.path.exists("broken") and first_life:
            raise RuntimeError("the file of weights is gone")
        return {"w": self.value}
    def load_state_dict(self, state):
        self.value = state["w"]

w = np.zeros(1000)
momentum = {"m": np.zeros(1000), "count": 0}
state = {"w": w, "momentum": momentum, "own": Keeps(np.ones(3))}
group = ftcomm.init()
for step in ftcomm.steps(int(sys.argv[1]), state):
    g = np.full(1000, float(step))
    ftcomm.allreduce(g, op="avg")
    momentum["m"] += g
    momentum["count"] += 1
    w -= 0.1 * momentum["m"]
    ftcomm.report(step=step)
    time.sleep(0.02)
print("state", step, momentum["count"], zlib.crc32(w), zlib.crc32(momentum["m"]))
"""


@pytest.mark.shows("ftcomm run", "NumPy arrays", "RSJE")
def test_arrays_are_taken_over_by_a_replica_that_comes_back(here: Path) -> None:
    Job(here, KEEPS, FOREVER).kill_and_drain()


KEEPS_CUPY = f"""
import sys, time, zlib
sys.modules["torch"] = None
sys.path.insert(0, {str(ROOT)!r})
from tests.rigs import cupy_stub
sys.modules["cupy"] = cupy = cupy_stub.module()
import numpy as np
import ftcomm

w, adam = cupy.array(np.zeros(1000), np.float64), {{"m": cupy.array(np.zeros(1000), np.float64), "count": 0}}
group = ftcomm.init()
for step in ftcomm.steps(int(sys.argv[1]), {{"w": w, "adam": adam}}):
    g = cupy.array(np.full(1000, step + 0.5 * group.replica), np.float64)
    ftcomm.allreduce(g, op="avg")
    adam["m"][...] = cupy.asarray(adam["m"].get() + g.get())
    adam["count"] += 1
    w[...] = cupy.asarray(w.get() - 0.1 * adam["m"].get())
    ftcomm.report(step=step)
    time.sleep(0.02)
print("state", step, adam["count"], zlib.crc32(w.get()), zlib.crc32(adam["m"].get()))
"""


def test_arrays_of_cupy_are_taken_over_too(here: Path) -> None:
    """By a stand-in for CuPy, whose arrays lie on the host."""
    Job(here, KEEPS_CUPY, FOREVER).kill_and_drain()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Keeps({'a': {1, 2}})", "own.w.a is a builtins.set, which cannot be sent to another replica"),
        ("object()", "the entry 'own' of `state` is a builtins.object, which a replica that comes back cannot take"),
    ],
)
def test_what_cannot_be_sent_is_an_error_at_the_first_boundary(here: Path, value: str, text: str) -> None:
    job = Job(here, KEEPS.replace("Keeps(np.ones(3))", value), "50", max_restarts=0)
    assert job.run() == run.FAILED
    assert sum(text in line for line in job.lines) == 3, job.lines
    assert job.steps() == 0
    assert not job.of("report"), "not a step was done"


def test_a_state_that_breaks_later_ends_no_source(here: Path) -> None:
    job = Job(here, KEEPS, FOREVER, max_restarts=1)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        (here / "broken").touch()
        os.kill(job.launcher.pids()[1, 0], signal.SIGKILL)
        await job.until(lambda: job.launcher.states()[1] is State.FAILED)
        step = job.steps()
        await job.until(lambda: job.steps() > step + 5)
        job.launcher.interrupt()

    job.run(plan)
    reason = "its state cannot be copied (RuntimeError: the file of weights is gone)"
    assert any("StateError" in line and reason in line for line in job.lines), job.lines
    assert {event["replica"] for event in job.of("state_broken")} <= {0, 2}
    assert job.of("state_broken")
    assert [event["replica"] for event in job.of("process_started")] == [0, 1, 2, 1]
