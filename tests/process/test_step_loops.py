"""Several step loops in one script: a replica that comes back leaves out those that the job has behind it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ftcomm.launch import run

from .test_launch_training import LIVES, Job, here

__all__ = ["here"]

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol]

BEGINS = (
    LIVES
    + """
from ftcomm.training import StepLoop

w = np.zeros(8)

def until(name):
    while not os.path.exists(name):
        time.sleep(0.01)

def train():
    x = np.ones(8)
    ftcomm.allreduce(x, "avg")
    w[:] += x
    time.sleep(0.01)
"""
)
TWO = """
for step in ftcomm.steps(20 FIRST):
    train()
print("between", int(w[0]))
w[:] = 0
for step in ftcomm.steps(300 SECOND):
    if step == 40 and replica == 1 and first_life:
        os.kill(os.getpid(), signal.SIGKILL)
    if step > 50 and not os.path.exists("go"):
        time.sleep(0.3)
    train()
print("end", step, int(w[0]))
"""


def train_through(job: Job) -> None:
    """Until all three have finished, one of whom was killed once, and came back once."""

    def over() -> bool:
        return bool(job.of("failed") or job.of("finished"))

    async def plan() -> None:
        await job.until(lambda: job.contributing() == {0, 2} or over())
        await job.until(lambda: job.contributing() == {0, 1, 2} or over())
        Path("go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert len(job.of("process_started")) == 4, job.lines


@pytest.mark.parametrize("second", [", {'w': w}", ""], ids=["state", "no state"])
def test_a_replica_killed_in_the_second_loop_comes_back_into_that(here: Path, second: str) -> None:
    """The loops have other states, and the steps are counted on from one to the other."""
    script = TWO.replace("FIRST", ", {'v': np.ones(4)}").replace("SECOND", second)
    job = Job(here, BEGINS + script)
    train_through(job)
    assert sorted(line for line in job.lines if line.startswith("between")) == ["between 0", *["between 20"] * 3]
    ends = [line for line in job.lines if line.startswith("end")]
    if second:
        assert ends == ["end 299 280"] * 3
    else:  # nobody has given the joiner what it had missed
        assert sorted(line[:7] for line in ends) == ["end 299"] * 3
        assert ends.count("end 299 280") == 2


def test_a_repeated_step_in_the_first_loop_shifts_no_step_of_the_second(here: Path) -> None:
    """Boundaries and steps are numbered apart by then, of which a joiner without a state hears, too."""
    first = """
    loop = StepLoop(repeat_on=(MemoryError,))
    for step in loop.steps(20):
        with loop.guard():
            if step == 7 and replica == 0 and loop._progress.attempts == 0:
                raise MemoryError
            train()
    """
    second = """
    for step in ftcomm.steps(300):
        x = np.full(8, float(step))
        ftcomm.allreduce(x, "max")
        assert x[0] == step, (x[0], step)
        if step == 40 and replica == 1 and first_life:
            os.kill(os.getpid(), signal.SIGKILL)
        if step > 50 and not os.path.exists("go"):
            time.sleep(0.3)
    print("end", step)
    """
    job = Job(here, BEGINS + textwrap.dedent(first) + textwrap.dedent(second))
    train_through(job)
    assert job.lines.count("end 299") == 3, job.lines


THREE = """
for step in ftcomm.steps(20, {"w": w}):
    train()
if not first_life:
    open("left out", "w").close()
    until("third")
for step in ftcomm.steps(60, {"w": w}):
    if step == 40 and replica == 1 and first_life:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 59:
        until("left out")
    train()
if not first_life:
    until("far")
for step in ftcomm.steps(300, {"w": w, "v": np.ones(4)}):
    open("third", "w").close()
    if step == 70:
        open("far", "w").close()
    if not os.path.exists("go"):
        time.sleep(0.3)
    train()
print("end", step, int(w[0]))
"""


def test_a_job_may_go_on_to_its_next_loop_while_a_replica_comes_back(here: Path) -> None:
    """It was told of the second one, and comes to that when the others are in the third. They do not wait for it to
    come there."""
    job = Job(here, BEGINS + THREE)
    train_through(job)
    assert [line for line in job.lines if line.startswith("end")] == ["end 299 300"] * 3


def test_an_op_before_the_loop_of_the_job_fails_at_who_comes_back_alone(here: Path) -> None:
    before = """
    try:
        ftcomm.allreduce(np.ones(8))
    except ftcomm.FtcommError as error:
        print("refused", error)
    """
    script = textwrap.dedent(before) + TWO.replace("FIRST", "").replace("SECOND", ", {'w': w}")
    job = Job(here, BEGINS + script)
    train_through(job)
    assert [line for line in job.lines if line.startswith("end")] == ["end 299 280"] * 3
    (refused,) = (line for line in job.lines if line.startswith("refused"))
    assert "replica 1 shard 0 comes back to a job that is in step loop 2 of the script" in refused
    assert "has entered 0 so far" in refused


INSIDE = """
steps = ftcomm.steps(3, {"w": w})
try:
    for step in steps:
        for inner in ftcomm.steps(3, {"w": w}):
            train()
except ftcomm.FtcommError as error:
    print("refused", error)
for step in ftcomm.steps(6, {"w": w}):
    train()
print("end", step, int(w[0]))
"""


def test_a_loop_inside_of_another_is_refused_and_the_next_one_goes_on(here: Path) -> None:
    job = Job(here, BEGINS + INSIDE)
    assert job.run() == run.FINISHED, job.said
    assert sum("this step loop ended when another began" in line for line in job.lines) == 3, job.lines
    # The outer loop had step 0, in which nothing was trained.
    assert [line for line in job.lines if line.startswith("end")] == ["end 5 5"] * 3
