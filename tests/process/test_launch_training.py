"""`Launcher` with scripts that take part in a job: leaving, coming back, a coordinator that is away, late deaths."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcomm.control import removals
from ftcomm.control.store import ViewStore
from ftcomm.control.views import View
from ftcomm.launch import Launcher, RunOptions, policy, run
from ftcomm.launch.admin.handlers import status
from ftcomm.launch.policy import State
from tests.rigs.certificates import Authority, environment
from tests.rigs.deadlines import DEADLINE

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol]

LIVES = """
import os, signal, sys, time
import numpy as np
import ftcomm
group = ftcomm.init()
replica = group.replica
first_life = not os.path.exists(f"lived-{replica}")
open(f"lived-{replica}", "w").close()
"""
TRAIN = (
    LIVES
    + """
for step in ftcomm.steps(int(sys.argv[1])):
    x = np.ones(8, np.float32)
    ftcomm.allreduce(x)
    ftcomm.report(step=step)
    time.sleep(0.01)
"""
)
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
                planned = asyncio.ensure_future(plan())
                await asyncio.wait({running, planned}, return_when=asyncio.FIRST_COMPLETED)
                if not planned.done() and running.exception() is not None:
                    planned.cancel()
                    await running  # raises
                await planned
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

    def kill_and_drain(self) -> None:
        """Replica 1 is killed, and comes back; some steps later all leave, and say "state ..." as their last line."""

        async def plan() -> None:
            await self.until(lambda: self.steps() > 5)
            os.kill(self.launcher.pids()[1, 0], signal.SIGKILL)
            await self.until(lambda: self.contributing() == {0, 2})
            await self.until(lambda: self.contributing() == {0, 1, 2})
            step = self.steps()
            await self.until(lambda: self.steps() > step + 5)
            self.launcher.interrupt()

        assert self.run(plan) == run.DRAINED, (self.said, self.lines)
        states = [line for line in self.lines if line.startswith("state ")]
        assert len(states) == 3, self.lines
        assert len(set(states)) == 1, states


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


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_killed_replica_comes_back_and_all_finish(here: Path, monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    if tls:
        for name, path in environment(Authority(here).files()).items():
            monkeypatch.setenv(name, path)
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


HOLDS = """
import ctypes
from ftcomm.training import joiner
if not first_life:
    fetch = joiner.Fetch
    def later(*args):  # when all that it is to fetch from hold their interpreters
        while not (os.path.exists("held-0") and os.path.exists("held-2")):
            time.sleep(0.01)
        return fetch(*args)
    joiner.Fetch = later
class State:
    value = 7
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, value): self.value = value["value"]
state, held = State(), False
for step in ftcomm.steps(1000000, {"state": state}):
    if first_life and not held and 1 in group.members and group.epoch > 2:
        held = True
        open(f"held-{replica}", "w").close()
        ctypes.PyDLL(None).usleep(12_000_000)  # longer than a source is waited for that others could stand in for
    ftcomm.allreduce(np.ones(8, np.float32))
    ftcomm.report(step=step)
    time.sleep(0.01)
"""


def test_a_joiner_waits_for_sources_that_all_hold_their_interpreters(here: Path) -> None:
    job = Job(here, TRAIN[: TRAIN.index("for step")] + HOLDS, heartbeat_timeout=3.2)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        os.kill(job.launcher.pids()[1, 0], signal.SIGKILL)
        await job.until(lambda: job.contributing() == {0, 2} or job.of("failed"))
        await job.until(
            lambda: job.contributing() == {0, 1, 2} or job.of("failed") or len(job.of("process_started")) > 4
        )
        job.launcher.interrupt()

    assert job.run(plan) == run.DRAINED, job.said
    assert [event["replica"] for event in job.of("process_started")] == [0, 1, 2, 1], job.said
    assert job.of("state_fetched")


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


SPOILT = {
    "garbage": lambda views: views.write_bytes(views.read_bytes() + b'{"broken\n'),
    "a folder": lambda views: (views.unlink(), views.mkdir()),
}


@pytest.mark.parametrize("how", list(SPOILT))
def test_a_store_that_cannot_be_opened_ends_no_job(here: Path, how: str) -> None:
    """The job trains on without a coordinator, and has one again when that is mended."""
    job = Job(here, TRAIN, FOREVER)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        (views,) = here.glob("ftcomm-*/*/views")
        whole = views.read_bytes()
        SPOILT[how](views)
        returning = job.launcher.restart_coordinator()
        await job.until(lambda: job.of("store") or returning.done())
        step = job.steps()
        assert not returning.done(), job.said
        if views.is_dir():
            views.rmdir()
        views.write_bytes(whole)
        await returning
        await job.until(lambda: job.steps() > step + 20)
        os.kill(job.launcher.pids()[0, 0], signal.SIGKILL)
        await job.until(lambda: job.contributing() == {1, 2})
        await job.until(lambda: job.contributing() == {0, 1, 2})
        job.launcher.interrupt()

    assert job.run(plan) == run.DRAINED, job.said
    first, *_, last = [event["text"] for event in job.of("store")]
    assert "Until then no replica joins, leaves or is replaced" in first
    assert last == "the coordinator is back"


STAND = """
while not os.path.exists("go"):
    time.sleep(0.01)
print("saved")
"""


def test_who_finishes_while_the_coordinator_is_away_waits_and_says_so(here: Path) -> None:
    job = Job(here, TRAIN + STAND, "20")

    async def plan() -> None:
        await job.until(lambda: len(job.of("trained")) == 3)
        returning = job.launcher.restart_coordinator(5.0)  # longer than one that is there may take
        await job.until(lambda: job.of("coordinator_stopped"))
        (here / "go").touch()
        await returning

    assert job.run(plan) == run.FINISHED, job.said
    assert {event["replica"] for event in job.of("finished")} == {0, 1, 2}
    assert not job.of("failed"), job.said


def test_a_verdict_of_the_coordinator_ends_nobody_who_has_done_all_steps(here: Path) -> None:
    """It was not there when they said so, and has found nobody since."""
    job = Job(here, TRAIN + STAND, "20")

    async def plan() -> None:
        await job.until(lambda: len(job.of("trained")) == 3)
        job.launcher._events.hear({"kind": "failed", "reason": "no replica that holds the state is left"})
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert job.lines == ["saved"] * 3


@pytest.mark.parametrize(
    "how", ["os._exit(0)", "import atexit; atexit.register(os._exit, 0); raise RuntimeError('in the step')"]
)
def test_exit_code_0_of_who_did_not_say_that_it_finished_is_a_death(here: Path, how: str) -> None:
    dies = f"""
    if step == 20 and replica == 1 and first_life:
        {how}
""".lstrip("\n")
    job = Job(here, TRAIN + dies + UNTIL_BACK + "print('end', step)", "300")

    async def plan() -> None:
        await job.until(lambda: job.launcher.states().get(1, State.RUNNING) is not State.RUNNING)
        await job.until(lambda: len(job.of("process_started")) == 4 or job.launcher.states()[1] is State.FINISHED)
        await job.until(lambda: job.contributing() == {0, 2} or job.launcher.states()[1] is State.FINISHED)
        await job.until(lambda: job.contributing() == {0, 1, 2} or job.launcher.states()[1] is State.FINISHED)
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert job.lines.count("end 299") == 3, job.said
    assert any("exited with code 0 before it had said that it finished or left; restart" in text for text in job.said)


def test_who_has_done_one_loop_and_dies_in_the_next_has_not_finished(here: Path) -> None:
    """Exit code 0 again, which is the death that nobody but the launcher sees."""
    second = """
    state = {"w": np.ones(8, np.float32)}
    for step in ftcomm.steps(300, state):
        if step == 40 and replica == 1 and first_life:
            os._exit(0)
        if step > 50 and not os.path.exists("go"):
            time.sleep(0.3)
        ftcomm.allreduce(np.ones(8, np.float32))
    print("end", step)
    """
    job = Job(here, TRAIN + textwrap.dedent(second), "20")

    def over() -> bool:
        return job.launcher.states().get(1) is State.FINISHED

    async def plan() -> None:
        await job.until(lambda: job.of("restarting") or over())
        await job.until(lambda: len(job.of("process_started")) == 4 or over())
        await job.until(lambda: job.contributing() == {0, 2} or over())
        await job.until(lambda: job.contributing() == {0, 1, 2} or over())
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert job.lines.count("end 299") == 3, job.said
    assert any("exited with code 0 before it had said that it finished or left; restart" in text for text in job.said)


def test_a_training_that_all_leave_by_exit_code_0_has_failed(here: Path) -> None:
    job = Job(here, TRAIN + "    if step == 20:\n        os._exit(0)\n", "60", max_restarts=0)
    assert job.run() == run.FAILED, job.said


def test_a_full_disk_ends_no_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loss nobody hears before its view is written down, and then all goes on."""
    append, full = ViewStore.append, here / "full"
    attempts: list[int] = []

    def append_if_there_is_room(store: ViewStore, view: View) -> None:
        if full.exists():
            attempts.append(view.epoch)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(store, view)

    monkeypatch.setattr(ViewStore, "append", append_if_there_is_room)
    job = Job(here, TRAIN + UNTIL_BACK + "print('end', step)", "300")

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        full.touch()
        os.kill(job.launcher.pids()[1, 0], signal.SIGKILL)
        await job.until(lambda: len(attempts) > 2 or job.of("failed"))
        assert job.contributing() == {0, 1, 2}, job.said
        full.unlink()
        await job.until(lambda: job.contributing() == {0, 2} or job.of("failed"))
        await job.until(lambda: job.contributing() == {0, 1, 2} or job.of("failed"))
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert job.lines == ["end 299"] * 3
    assert len(set(attempts)) == 1
    said = [event["text"] for event in job.of("store")]
    assert len(said) == 2
    assert "No space left on device; free space there" in said[0]
    assert "are stored" in said[1]


def test_all_killed_at_once_is_a_lost_job(here: Path) -> None:
    job = Job(here, TRAIN, FOREVER, backoff=30.0)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 5)
        for pid in job.launcher.pids().values():
            os.kill(pid, signal.SIGKILL)

    assert job.run(plan) == run.FAILED
    assert len(job.of("process_started")) == 3
    assert any(text.startswith("the job failed: ") and "checkpoint" in text for text in job.said)


SHORT: dict[str, Any] = dict(op_timeout=10.0, heartbeat_timeout=3.2, op_timeout_floor=3.4)  # a stall goes after 8 s
HANG = {
    "sleeps": "time.sleep(1000)",  # input that does not come, a dead lock
    "stops": "os.kill(os.getpid(), signal.SIGSTOP)",  # as a process does that the kernel keeps waiting
}
HANGS = TRAIN + "    if replica == 1 and first_life and step == 5: "


@pytest.mark.parametrize("how", HANG)
def test_a_removed_replica_whose_process_lives_is_ended_and_started_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(policy, "TERM_TO_KILL", 1.0)
    job = Job(here, HANGS + HANG[how] + "\n" + UNTIL_BACK + "print('end', step)", FOREVER, **SHORT)

    async def plan() -> None:
        await job.until(lambda: job.of("removed"))
        reason = job.of("removed")[0]["reason"]
        await job.until(lambda: status(job.launcher).replicas[1].reason)
        assert status(job.launcher).replicas[1].reason == reason
        await job.until(lambda: job.contributing() == {0, 1, 2} and len(job.of("process_started")) > 3)
        assert status(job.launcher).replicas[1].reason == ""
        job.launcher.interrupt()
        (here / "go").touch()

    assert job.run(plan) == run.DRAINED, job.said
    assert [event["replica"] for event in job.of("process_started")] == [0, 1, 2, 1]
    (ended,) = job.of("ending_removed")
    assert ended["replica"] == 1
    assert any(text.startswith(f"replica 1 was removed ({ended['reason']}) and still runs") for text in job.said)
    assert any("was killed by SIGKILL; restarting it" in text for text in job.said), job.said


def test_a_rank_whose_control_thread_ends_is_told_and_started_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port refuses, so it is lost like a dead one; but its process lives, and the script does not end it."""
    monkeypatch.setattr(policy, "REMOVED_TO_TERM", 0.5)
    closes = textwrap.dedent("""
    try:
        for step in ftcomm.steps(int(sys.argv[1])):
            if replica == 1 and first_life and step == 5:
                os.closerange(3, 1024)  # as daemonizers do
            x = np.ones(8, np.float32)
            ftcomm.allreduce(x)
            time.sleep(0.01)
    except ftcomm.RemovedError as error:
        print("told", error, flush=True)
        time.sleep(1000)
    """)
    job = Job(here, LIVES + closes, FOREVER)

    async def plan() -> None:
        await job.until(lambda: job.contributing() == {0, 1, 2} and len(job.of("process_started")) > 3)
        job.launcher.interrupt()

    assert job.run(plan) == run.DRAINED, job.said
    (told,) = (line for line in job.lines if line.startswith("told"))
    assert told.startswith("told replica 1 shard 0: the control thread has ended: a file descriptor of it was closed ")
    assert "let it close its own, or do so before ftcomm.init()" in told
    assert not any("Exception ignored" in line for line in job.lines), job.lines
    (ended,) = job.of("ending_removed")
    assert ended["replica"] == 1
    assert ended["reason"].startswith("lost 1: its process ")
    assert [event["replica"] for event in job.of("process_started")] == [0, 1, 2, 1]


def test_a_drain_ends_a_removed_replica_and_is_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost before, and cannot leave with the others."""
    monkeypatch.setattr(policy, "TERM_TO_KILL", 1.0)
    monkeypatch.setattr(policy, "REMOVED_TO_TERM", DEADLINE)
    job = Job(here, HANGS + HANG["sleeps"], FOREVER, **SHORT)

    async def plan() -> None:
        await job.until(lambda: job.of("removed"))
        job.launcher.interrupt()

    assert job.run(plan) == run.DRAINED, job.said
    assert len(job.of("ending_removed")) == 1


def test_a_job_ends_without_a_replica_that_hangs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "TERM_TO_KILL", 1.0)
    job = Job(here, HANGS + HANG["sleeps"], "30", **SHORT)
    assert job.run() == run.FINISHED, job.said
    assert job.launcher.states() == {0: State.FINISHED, 1: State.STOPPED, 2: State.FINISHED}
    assert job.said[-1] == "the training is complete on replicas 0, 2; replica 1 was not back in time"
    for told in {event["replica"]: event for event in job.of("metrics")}.values():
        assert told["stalled"] > SHORT["op_timeout_floor"], "what stood still is reported no sooner"
        assert told["effective"] == pytest.approx(told["training"] / told["total"], abs=0.01)
        assert told["training"] + told["stalled"] < told["total"]


DEATHS = {
    "os._exit": "os._exit(3)",
    "os._exit(0)": "os._exit(0)",  # which looks as if it had finished
    "sys.exit": "sys.exit(3)",
    "SystemExit": "raise SystemExit(3)",  # of which a process of the tests, which run it by `exec`, cannot know
    "exception": "raise ValueError('bad batch')",
    "crash": "signal.signal(signal.SIGSEGV, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGSEGV)",
    "signal": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("how", DEATHS)
def test_the_exit_code_of_a_job_does_not_tell_how_a_replica_died(here: Path, how: str) -> None:
    """That is what a job outlives. Here the others finish before it is started again."""
    job = Job(here, HANGS + DEATHS[how], "100", backoff=100.0, backoff_limit=100.0)
    assert job.run() == run.FINISHED, job.said
    assert job.launcher.states() == {0: State.FINISHED, 1: State.STOPPED, 2: State.FINISHED}
    assert job.said[-1] == "the training is complete on replicas 0, 2; replica 1 was not back in time"


WITHOUT_STEP_LOOP = """
import os, signal, sys, time
import numpy as np
import ftcomm
group = ftcomm.init()
ftcomm.allreduce(np.ones(8, np.float32))
if group.replica == 1:
    {death}
while not os.path.exists("go"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("exception", run.FAILED),
        ("sys.exit", run.FAILED),
        ("os._exit(0)", run.FAILED),
        ("crash", run.FAILED),
        ("signal", run.FINISHED),
    ],
)
def test_without_a_step_loop_an_error_fails_the_job_though_the_others_finish(here: Path, how: str, code: int) -> None:
    """Nobody says that the others have done all that there was to do, so the error may not be passed over. A signal
    from outside is none."""
    job = Job(here, WITHOUT_STEP_LOOP.format(death=DEATHS[how]), backoff=100.0, backoff_limit=100.0)

    async def plan() -> None:
        await job.until(lambda: job.of("restarting"))
        (here / "go").touch()

    assert job.run(plan) == code, job.said
    said = {run.FAILED: "replica 1 failed", run.FINISHED: "replica 1 was not back in time"}[code]
    assert job.said[-1] == f"the training is complete on replicas 0, 2; {said}"


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


@pytest.mark.parametrize("how", ["sys.exit(1)", "raise SystemExit(1)"])
def test_who_gives_up_in_the_middle_is_restarted(here: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a `raise SystemExit` a process of the tests cannot know, which run it by `exec`: it says that it has ended
    well, and the launcher corrects that."""
    monkeypatch.setattr(removals, "LINGER", DEADLINE)
    script = TRAIN + f"    if replica == 1 and first_life and step == 5:\n        {how}\n" + UNTIL_BACK
    job = Job(here, script + "print('end', step)", "300")

    async def plan() -> None:
        await job.until(lambda: [event["replica"] for event in job.of("joined")].count(1) == 2)
        await job.until(lambda: job.contributing() == {0, 1, 2})
        (here / "go").touch()

    assert job.run(plan) == run.FINISHED, job.said
    assert [line for line in job.lines if line.startswith("end")] == ["end 299"] * 3
    assert any("exited with code 1; restarting it" in text for text in job.said)
    losses = [event["why"] for event in job.of("view") if "lost 1" in event["why"]]
    assert "exited with code 1" in losses[0], losses
    assert [event["replica"] for event in job.of("finished")].count(1) == (2 if "raise" in how else 1)


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


@pytest.mark.parametrize("how", ["exception", "sys.exit", "os._exit"])
def test_who_fails_behind_its_last_step_has_failed(here: Path, how: str) -> None:
    """A checkpoint that cannot be written, say, though the others have all of the training."""
    at_end = f"""
    if replica == 0:
        {DEATHS[how]}
    while not os.path.exists("go"):
        time.sleep(0.01)
    """
    told = """
    while replica == 0 and not os.path.exists("told"):
        time.sleep(0.01)
    """
    job = Job(here, TRAIN + textwrap.dedent(told) + textwrap.dedent(at_end), "5", backoff=100.0, backoff_limit=100.0)

    async def plan() -> None:
        await job.until(lambda: [event["replica"] for event in job.of("trained")].count(0))
        (here / "told").touch()
        await job.until(lambda: job.of("restarting"))
        (here / "go").touch()

    assert job.run(plan) == run.FAILED, job.said
    assert job.said[-1] == "the training is complete on replicas 1, 2; replica 0 failed"


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
    assert any(line.startswith("ftcomm: replica 2 ") for line in job.lines), "a plain line"
    assert not any("Traceback" in line for line in job.lines)


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
