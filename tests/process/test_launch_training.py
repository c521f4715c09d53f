"""`Launcher` with scripts that take part in a job: leaving, coming back, a coordinator that is away, late deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcomm.launch import Launcher, RunOptions, run
from ftcomm.launch.policy import State

DEADLINE = 200.0  # s; these take a few, most of them for imports
pytestmark = [pytest.mark.protocol, pytest.mark.timeout(DEADLINE + 40)]

TRAIN = """
import os, sys, time
import numpy as np
import ftcomm
group = ftcomm.init()
replica = group.replica
first_life = not os.path.exists(f"lived-{replica}")
open(f"lived-{replica}", "w").close()
for step in ftcomm.steps(int(sys.argv[1])):
    x = np.ones(8, np.float32)
    ftcomm.allreduce(x)
    ftcomm.report(step=step)
    time.sleep(0.01)
"""
FOREVER = "1000000"

# All stand in step 30 until somebody was killed, so that nobody has finished by then.
UNTIL_KILLED = """
    while step == 30 and not os.path.exists("killed"):
        time.sleep(0.01)
""".lstrip("\n")
# The last steps are slow until the one that was started again is in the job: boundaries have to be passed for that.
UNTIL_BACK = """
    if step > 50 and not os.path.exists("go"):
        time.sleep(0.3)
""".lstrip("\n")


class Job:
    """A launcher, its events, and a coroutine beside it that makes things happen."""

    def __init__(self, directory: Path, script: str, *args: str, **options: Any) -> None:
        path = directory / "script.py"
        path.write_text(textwrap.dedent(script))
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.said: list[str] = []
        options = {"backoff": 0.01, **options}
        self.launcher = Launcher(
            RunOptions(replicas=3, script=str(path), args=args, **options),
            self.events.append,
            lambda replica, rank, line: self.lines.append(line),
            self.said.append,
        )

    def run(self, plan: Callable[[], Any] | None = None) -> int:
        async def main() -> int:
            running = asyncio.ensure_future(self.launcher.run())
            if plan is not None:
                await plan()
            return await running

        return asyncio.run(asyncio.wait_for(main(), DEADLINE))

    async def until(self, true: Callable[[], object]) -> None:
        while not true():
            await asyncio.sleep(0.01)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def steps(self) -> int:
        return max((event["step"] for event in self.of("report")), default=0)

    def kill(self, replica: int) -> None:
        os.kill(self.launcher.pids()[replica, 0], signal.SIGKILL)
        Path("killed").touch()

    def contributing(self) -> set[int]:
        """Of the latest view."""
        views = self.of("view")
        return {member["replica"] for member in views[-1]["members"] if member["contributing"]} if views else set()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FTCOMM_LOG", "warning")
    return tmp_path


def test_a_drain_lets_all_leave_at_one_step(here: Path) -> None:
    job = Job(here, TRAIN + "print(step, group.drained)", FOREVER)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        job.launcher.interrupt()

    assert job.run(plan) == run.DRAINED, job.said
    assert len(set(job.lines)) == 1
    assert len(job.lines) == 3
    assert job.lines[0].endswith(" True")
    assert set(job.launcher.states().values()) == {State.STOPPED}


def test_a_killed_replica_comes_back_and_all_finish(here: Path) -> None:
    job = Job(here, TRAIN + UNTIL_BACK + "print('end', step)", "300")

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        os.kill(job.launcher.pids()[1, 0], signal.SIGKILL)
        await job.until(lambda: job.contributing() == {0, 2})
        await job.until(lambda: job.contributing() == {0, 1, 2})
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert job.lines == ["end 299"] * 3
    assert [event["replica"] for event in job.of("process_started")] == [0, 1, 2, 1]


def test_training_does_not_notice_that_the_coordinator_is_replaced(here: Path) -> None:
    """And the new one knows the job: it still restarts, lets in and drains."""
    job = Job(here, TRAIN, FOREVER)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        await job.launcher.restart_coordinator()
        step = job.steps()
        await job.until(lambda: job.steps() > step + 20)
        assert len(job.of("view")) == 1
        os.kill(job.launcher.pids()[0, 0], signal.SIGKILL)
        await job.until(lambda: job.contributing() == {1, 2})
        await job.until(lambda: job.contributing() == {0, 1, 2})
        job.launcher.interrupt()

    assert job.run(plan) == run.DRAINED, job.said


def test_all_killed_at_once_is_a_lost_job(here: Path) -> None:
    job = Job(here, TRAIN, FOREVER, backoff=30.0)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        for pid in job.launcher.pids().values():
            os.kill(pid, signal.SIGKILL)

    assert job.run(plan) == run.FAILED
    assert len(job.of("process_started")) == 3
    assert any(text.startswith("the job failed: ") and "checkpoint" in text for text in job.said)


def test_who_is_killed_after_its_training_is_not_restarted(here: Path) -> None:
    script = """
    ftcomm.shutdown()
    if replica == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists("go"):
        time.sleep(0.01)
    """
    job = Job(here, TRAIN.replace("import os,", "import signal, os,") + textwrap.dedent(script), "5")

    async def plan() -> None:
        await job.until(lambda: job.of("failed"))
        (here / "go").touch()

    assert job.run(plan) == run.FAILED
    assert any("was killed by SIGKILL; it is not restarted: its training had finished" in text for text in job.said)
    assert job.said[-1] == "the training is complete on replicas 1, 2; replica 0 failed"
    assert len(job.of("process_started")) == 3


def test_who_gives_up_in_the_middle_is_restarted(here: Path) -> None:
    """By sys.exit, of which Python tells nobody: at exit it looks as if the script had ended well."""
    script = TRAIN + "    if replica == 1 and first_life and step == 5:\n        sys.exit(1)\n" + UNTIL_BACK
    job = Job(here, script + "print('end', step)", "300")

    async def plan() -> None:
        await job.until(lambda: [event["replica"] for event in job.of("joined")].count(1) == 2)
        await job.until(lambda: job.contributing() == {0, 1, 2})
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert [line for line in job.lines if line.startswith("end")] == ["end 299"] * 3
    assert any("exited with code 1; restarting it" in text for text in job.said)


def test_who_fails_after_its_training_has_failed(here: Path) -> None:
    """Though the restart finds nobody to catch up from, and is turned away."""
    script = """
    if replica == 0:
        ftcomm.shutdown()
        sys.exit(3)
    while not os.path.exists("go"):
        time.sleep(0.01)
    """
    job = Job(here, TRAIN + textwrap.dedent(script), "5")

    async def plan() -> None:
        await job.until(lambda: job.of("restarting"))
        (here / "go").touch()

    assert job.run(plan) == run.FAILED, job.said
    assert job.launcher.states() == {0: State.FAILED, 1: State.FINISHED, 2: State.FINISHED}


def test_who_is_turned_away_when_the_others_have_finished_is_no_failure(here: Path) -> None:
    """Nor is it started again and again while they live on."""
    script = """
    ftcomm.shutdown()
    open(f"over-{replica}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.01)
    """
    late = """if os.path.exists("lived-2") and os.environ["FTCOMM_REPLICA"] == "2":
    while not (os.path.exists("over-0") and os.path.exists("over-1")):
        time.sleep(0.01)
group = """
    job = Job(here, TRAIN.replace("group = ", late) + UNTIL_KILLED + textwrap.dedent(script), "60")

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        job.kill(2)
        await job.until(lambda: job.launcher.states()[2] is State.STOPPED)
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert any("exited with code 1; it was not back in the job when the others finished" in text for text in job.said)
    assert len(job.of("process_started")) == 4


def test_who_is_committed_for_a_boundary_that_nobody_reaches_is_no_failure(here: Path) -> None:
    """Named in a view that nobody installs."""
    script = """
        if step == 40:
            open("standing", "w").close()
            while not os.path.exists("go"):
                time.sleep(0.01)
            break
    """
    late = """while os.path.exists("lived-2") and not os.path.exists("standing"):
    time.sleep(0.01)
group = """
    job = Job(here, TRAIN.replace("group = ", late) + textwrap.dedent(script).replace("\n", "\n    "), FOREVER)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        os.kill(job.launcher.pids()[2, 0], signal.SIGKILL)
        # The survivors stand in step 40, which is their last: a boundary that is agreed on now is never reached.
        await job.until(lambda: any("join 2" in str(view["why"]) for view in job.of("view")))
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert job.launcher.states() == {0: State.FINISHED, 1: State.FINISHED, 2: State.STOPPED}


def test_who_comes_back_when_all_is_over_is_ended(here: Path) -> None:
    """It would wait for a job that is no more."""
    script = TRAIN.replace(
        "group = ",
        'if os.path.exists("lived-2") and os.environ["FTCOMM_REPLICA"] == "2":\n    time.sleep(600)\ngroup = ',
    )
    job = Job(here, script + UNTIL_KILLED, "60")

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        job.kill(2)

    assert job.run(plan) == run.FINISHED, job.said
    assert any("replica 2 is ended: the others finished before it could rejoin" in text for text in job.said)
