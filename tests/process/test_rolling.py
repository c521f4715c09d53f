"""Leaving in order: SIGTERM to a replica, `ftcomm restart`, and the socket of a running job, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ftcomm.cli import commands
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch import Launcher, RunOptions, run
from ftcomm.launch.admin import client, protocol
from ftcomm.launch.commands import rolling_restart
from ftcomm.launch.policy import State
from ftcomm.launch.rundir import short
from tests.rigs.deadlines import DEADLINE

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol]


# Each rank writes down every step that it makes, with what the weights are then: reports get lost while the coordinator
# is away.
TRAIN = """
import sys, time, zlib
import numpy as np
import torch
import ftcomm

class Weights:
    def __init__(self):
        self.values = np.zeros(1000, np.float32)
    def state_dict(self):
        return {"values": torch.from_numpy(self.values)}
    def load_state_dict(self, state):
        self.values[:] = state["values"].numpy()

weights = Weights()
group = ftcomm.init()
notes = open(f"notes-{group.replica}.{group.shard}", "a", buffering=1)
gradient = np.empty(1000, np.float32)
for step in ftcomm.steps(1000000, {"weights": weights}):
    gradient[:] = np.arange(1000) * (group.replica + 1) + step
    ftcomm.allreduce(gradient, "avg")
    weights.values[:] = weights.values * np.float32(0.9) + gradient
    group.report(step=step)
    notes.write(f"{step} {zlib.crc32(weights.values.data)}\\n")
    time.sleep(0.01)
"""


class Job:
    """A launcher in this process, and a plan that runs beside it on the same loop."""

    def __init__(self, directory: Path, script: str = TRAIN, **options: Any) -> None:
        path = directory / "script.py"
        path.write_text(script)
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.lines: list[str] = []
        # Nothing here waits for a timeout; they are long, so that a busy machine loses nobody.
        options = {"replicas": 3, "backoff": 0.01, "heartbeat_timeout": 20.0, "env": {"FTCOMM_LOG": "error"}, **options}
        self.launcher = Launcher(
            RunOptions(script=str(path), **options),
            self.events.append,
            lambda replica, rank, line: self.lines.append(f"{replica}.{rank} {line}"),
            self.said.append,
        )

    def run(self, plan: Callable[[], Any]) -> int:
        async def main() -> int:
            running = asyncio.ensure_future(self.launcher.run())
            planned = asyncio.ensure_future(plan())
            await asyncio.wait({running, planned}, return_when=asyncio.FIRST_COMPLETED)
            if planned.done() and planned.exception() is not None:
                running.cancel()
            elif not planned.done():
                planned.cancel()
                await asyncio.wait({planned})
            if planned.cancelled():
                raise AssertionError(f"the job ended before its time: {self.said[-5:]} {self.lines[-20:]}")
            await planned
            return await running

        try:
            return asyncio.run(asyncio.wait_for(main(), DEADLINE))
        except asyncio.TimeoutError:
            last = [event for event in self.events if event["kind"] != "report"][-8:]
            raise AssertionError(f"hangs: {self.said[-8:]} {self.lines[-8:]} {last} at step {self.steps()}") from None

    async def until(self, true: Callable[[], object]) -> None:
        while not true():
            await asyncio.sleep(0.01)

    def steps(self) -> int:
        return max((event["step"] for event in self.of("report")), default=0)

    def trained(self, steps: int = 3) -> bool:
        """Whether each rank has made so many: the ranks of a replica are not in step, and one that has not come to its
        loop would die of SIGTERM."""
        options = self.launcher.options
        names = [f"notes-{r}.{k}" for r in range(options.replicas) for k in range(options.ranks_per_replica)]
        return all(os.path.exists(name) and Path(name).read_bytes().count(b"\n") >= steps for name in names)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def starts(self) -> list[int]:
        return [replica.starts for replica in self.launcher.replicas]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def check_steps(folder: Path, ranks: int) -> None:
    """No step was lost or made twice by anybody, and all held the same weights after each."""
    for rank in range(ranks):
        weights: dict[int, set[str]] = {}
        for path in folder.glob(f"notes-*.{rank}"):
            lines = [line.split() for line in path.read_text().splitlines()]
            steps = [int(step) for step, _ in lines]
            assert steps == sorted(set(steps)), f"{path.name}: a step was made twice"
            for step, crc in lines:
                weights.setdefault(int(step), set()).add(crc)
        assert {step for step, crcs in weights.items() if len(crcs) > 1} == set(), "weights differ"
        assert sorted(weights) == list(range(len(weights))), "a step is missing"
        assert len(weights) > 3


# -- leaving ---------------------------------------------------------------------------------------------------------


def test_who_gets_sigterm_leaves_in_order_and_is_not_restarted_until_asked(here: Path) -> None:
    job = Job(here)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 3)
        os.kill(job.launcher.pids()[1, 0], signal.SIGTERM)
        await job.until(lambda: job.launcher.states()[1] is State.LEFT)
        assert job.launcher.contributing() == {0, 2}
        assert job.starts() == [1, 1, 1]
        job.launcher.restart_replica(1)
        await job.until(lambda: job.launcher.contributing() == {0, 1, 2})
        os.kill(job.launcher.pids()[1, 0], signal.SIGTERM)
        await job.until(lambda: job.launcher.states()[1] is State.LEFT)
        job.launcher.drain()

    assert job.run(plan) == run.DRAINED, job.said
    assert job.starts() == [1, 2, 1]
    assert not job.of("suspect")
    assert [event["code"] for event in job.of("process_exited")] == [0] * 4
    check_steps(here, 1)


def test_all_that_get_sigterm_one_by_one_is_a_drain(here: Path) -> None:
    """One rank of a replica is enough."""
    job = Job(here, replicas=2, ranks_per_replica=2)

    async def plan() -> None:
        await job.until(job.trained)
        os.kill(job.launcher.pids()[0, 1], signal.SIGTERM)
        await job.until(lambda: job.launcher.states()[0] is State.LEFT)
        with pytest.raises(FtcommError, match="no other replica contributes now"):
            job.launcher.restart_replica(1)
        os.kill(job.launcher.pids()[1, 0], signal.SIGTERM)

    assert job.run(plan) == run.DRAINED, job.said
    assert set(job.launcher.states().values()) == {State.LEFT}
    check_steps(here, 2)


def test_a_handler_of_the_program_is_left_alone(here: Path) -> None:
    script = TRAIN.replace("import sys,", "import signal, sys,").replace(
        "group = ", "signal.signal(signal.SIGTERM, lambda *_: print('mine', flush=True))\ngroup = "
    )
    job = Job(here, script, replicas=1)

    async def plan() -> None:
        await job.until(lambda: job.steps() > 3)
        os.kill(job.launcher.pids()[0, 0], signal.SIGTERM)
        await job.until(lambda: job.lines)
        step = job.steps()
        await job.until(lambda: job.steps() > step + 3)
        job.launcher.drain()

    assert job.run(plan) == run.DRAINED, job.said
    assert job.lines == ["0.0 mine"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rolling_restart_loses_no_step(here: Path, ranks: int) -> None:
    """By the command; or by its parts, and the coordinator is away for a moment in the middle of it."""
    job = Job(here, ranks_per_replica=ranks)
    told: list[str] = []

    def restart_all() -> None:
        if ranks == 1:
            result = CliRunner().invoke(commands, ["restart", "--all", "--yes"])
            assert result.exit_code == 0, result
            return
        with client.AdminClient(client.find(None)) as connection:
            for number in rolling_restart.which(connection.status(), (), True):
                if number == 1:
                    connection.ask(protocol.RestartCoordinator(1.5))
                rolling_restart.restart(connection, number, DEADLINE, told.append)

    async def plan() -> None:
        await job.until(job.trained)
        await asyncio.to_thread(restart_all)
        assert job.launcher.contributing() == {0, 1, 2}
        job.launcher.drain()

    assert job.run(plan) == run.DRAINED, (job.said, job.lines)
    assert job.starts() == [2, 2, 2]
    assert {event["code"] for event in job.of("process_exited")} == {0}
    assert not job.of("suspect")
    assert ranks == 1 or {"leaves at a coming step", "starts"} <= set(told)
    check_steps(here, ranks)


def test_a_job_is_made_smaller_and_larger_again_and_loses_no_step(here: Path) -> None:
    """By the command. Who is killed on its way out stays away, too; and who would take the state along may not go."""
    job = Job(here)

    def resize(count: int) -> str:
        result = CliRunner().invoke(commands, ["resize", str(count), "--yes"])
        assert result.exit_code == 0, (result, result.output)
        return result.output

    async def plan() -> None:
        await job.until(job.trained)
        await asyncio.to_thread(resize, 1)
        assert job.launcher.contributing() == {0}
        assert set(job.launcher.states().values()) == {State.RUNNING, State.LEFT}
        step = job.steps()
        await job.until(lambda: job.steps() > step + 3)
        await asyncio.to_thread(resize, 3)
        assert job.launcher.contributing() == {0, 1, 2}
        for pid in (pid for (replica, _), pid in job.launcher.pids().items() if replica == 2):
            os.kill(pid, signal.SIGSTOP)
            job.launcher.resize(2)
            os.kill(pid, signal.SIGKILL)
        await job.until(lambda: job.launcher.states()[2] is State.LEFT and job.launcher.contributing() == {0, 1})
        os.kill(job.launcher.pids()[0, 0], signal.SIGTERM)
        await job.until(lambda: job.launcher.states()[0] is State.LEFT)
        for count, reason in ((1, "none of the replicas 0 to 0 contributes"), (4, r"1 .* to 3 \(--replicas\)")):
            with pytest.raises(FtcommError, match=reason):
                job.launcher.resize(count)
        job.launcher.drain()
        with pytest.raises(FtcommError, match="the job is ending"):
            job.launcher.resize(2)

    assert job.run(plan) == run.DRAINED, (job.said, job.lines)
    assert job.starts() == [1, 2, 2]
    assert [event["replica"] for event in job.of("leave_asked")] == [1, 2, 2]
    check_steps(here, 1)


# A joiner takes its time, and gets SIGTERM in its loop on the way into the job.
PREPARES = """
import os, signal
while not group.contributes and not os.path.exists("go"):
    time.sleep(0.01)
ready = group.ready
def told_to_leave():
    group.ready = ready
    signal.raise_signal(signal.SIGTERM)
    ready()
if not group.contributes:
    group.ready = told_to_leave
"""


def test_one_that_builds_its_model_is_seen_and_may_be_told_to_leave(here: Path) -> None:
    """`ftcomm status` says that it prepares; others train on. SIGTERM when its loop waits to be let in: it leaves."""
    job = Job(here, TRAIN.replace("notes = open(", PREPARES + "notes = open("), replicas=2)
    shown: list[str] = []

    async def plan() -> None:
        await job.until(lambda: job.steps() > 3)
        os.kill(job.launcher.pids()[1, 0], signal.SIGKILL)
        await job.until(lambda: job.launcher.replicas[1].joining == "prepares")
        step = job.steps()
        await job.until(lambda: job.steps() > step + 20)
        shown.append((await asyncio.to_thread(CliRunner().invoke, commands, ["status"])).output)
        (here / "go").touch()
        await job.until(lambda: job.launcher.states()[1] is State.LEFT)
        job.launcher.drain()

    assert job.run(plan) == run.DRAINED, (job.said, job.lines)
    (line,) = [line for line in shown[0].splitlines() if "prepares" in line]
    assert line.split()[1] == "1"
    assert [event["replica"] for event in job.of("dismissed")] == [1]
    assert job.starts() == [1, 2]
    assert not any(member["replica"] == 1 for view in job.of("view")[1:] for member in view["members"])
    check_steps(here, 1)


WAITS = """
import os, time
import numpy as np
import ftcomm

group = ftcomm.init()
for step in ftcomm.steps(10**9, {"x": np.zeros(1)}):
    while group.replica == 1 and step == 3 and not os.path.exists("go"):
        time.sleep(0.01)
    ftcomm.allreduce(np.ones(1))
    time.sleep(0.01)
"""


def test_status_says_on_which_host_ranks_are_and_for_how_long_each_waits(here: Path) -> None:
    job = Job(here, WAITS)
    shown: list[Any] = []

    def waits() -> dict[int, dict[str, float]]:
        said = CliRunner().invoke(commands, ["status", "--json"]).output
        return {replica["replica"]: replica["waits"] for replica in json.loads(said)["replicas"]} if said else {}

    async def plan() -> None:
        await job.until(lambda: job.of("view"))
        while not all(shown and shown[-1].get(replica, {}).get("0", 0.0) > 0.3 for replica in (0, 2)):
            shown.append(await asyncio.to_thread(waits))
        shown.append((await asyncio.to_thread(CliRunner().invoke, commands, ["status"])).output)
        (here / "go").touch()
        job.launcher.drain()

    assert job.run(plan) == run.DRAINED, (job.said, job.lines)
    *_, found, table = shown
    assert found[1] == {"0": 0.0}, "the one for whom the others wait"
    assert " on 127.0.0.1, running, " in table.splitlines()[0]
    assert [" s │" in line for line in table.splitlines() if "contributes" in line] == [True, False, True], table


# -- the socket ------------------------------------------------------------------------------------------------------


def ask(path: Path, *lines: bytes) -> list[dict[str, Any]]:
    """Raw lines, and the answer to each."""
    with short(path) as address, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(address)
        answers = []
        file = connection.makefile("rb")
        for line in lines:
            connection.sendall(line)
            answers.append(json.loads(file.readline()))
        return answers


def test_every_wrong_line_is_answered(here: Path) -> None:
    job = Job(here, "import time\ntime.sleep(600)", replicas=2)
    answers: list[dict[str, Any]] = []
    shown: list[Any] = []

    def visit() -> None:
        path = client.find(None)
        assert client.find(path.parent.name[:6]) == path
        with pytest.raises(SettingsError, match="--job zzz: no running job is named so; these run: "):
            client.find("zzz")
        wrong = (b"garbage", b"{}", b'{"ask":"fly"}', b'{"ask":"status","more":1}', b'{"ask":"\xff"}', b"[" * 3000)
        answers.extend(ask(path, *(line + b"\n" for line in wrong)))
        numbers = (b"-1", b"9", b"1e9", b'"0"', b"null", b"0")
        answers.extend(ask(path, *(b'{"ask":"restart_replica","replica":%s}\n' % number for number in numbers)))
        answers.extend(ask(path, b'{"ask":"restart_coordinator","away":1e9}\n'))
        answers.extend(ask(path, b"x" * 10_000 + b"\n"))
        [status] = ask(path, b'{"ask":"status"}\n')
        shown.append(status)
        shown.append(CliRunner().invoke(commands, ["status"]))
        watching = subprocess.Popen(
            [sys.executable, "-c", "from ftcomm.cli import main; main()", "status", "--json", "--watch", "0.05"],
            stdout=subprocess.PIPE,
        )
        assert watching.stdout is not None
        shown.append([watching.stdout.readline(), watching.stdout.readline()])
        shown.append(watching)
        for arguments in ([], ["--all", "--replica", "0"], ["--replica", "9"], ["--all"]):
            assert isinstance(CliRunner().invoke(commands, ["restart", *arguments]).exception, SettingsError)
        assert ask(path, b'{"ask":"drain"}\n') == [{"answer": "done"}]

    async def plan() -> None:
        await job.until(lambda: len(job.of("process_started")) == 2)
        await asyncio.to_thread(visit)

    assert job.run(plan) == run.DRAINED, job.said
    assert [answer["answer"] for answer in answers] == ["refused"] * len(answers)
    assert "there is no replica 9; this job has 0 to 1" in [answer["reason"] for answer in answers]
    status, command, lines, watching = shown
    assert watching.wait(60) == 0, "it does not end with the job"
    watching.stdout.close()
    assert [json.loads(line)["replicas"] for line in lines] == [status["replicas"]] * 2
    assert all(0 < time.time() - replica["since"] < 600 for replica in status["replicas"])
    assert [replica["state"] for replica in status["replicas"]] == ["running", "running"]
    assert status["replicas"][1]["pids"]["0"] == job.of("process_started")[1]["pid"]
    assert command.exit_code == 0
    assert "job " in command.output
    assert "running" in command.output


def test_without_a_job_or_with_several_it_says_so(here: Path) -> None:
    with pytest.raises(SettingsError, match="no job of yours is running here"):
        client.find(None)
    jobs = [Job(here, "import time\ntime.sleep(600)", replicas=1) for _ in range(2)]

    async def main() -> list[int]:
        running = [asyncio.ensure_future(job.launcher.run()) for job in jobs]
        for job in jobs:
            await job.until(lambda job=job: job.of("process_started"))
        with pytest.raises(SettingsError, match="2 jobs are running; say which with --job: "):
            await asyncio.to_thread(client.find, None)
        for job in jobs:
            job.launcher.drain()
        return [await each for each in running]

    assert asyncio.run(asyncio.wait_for(main(), DEADLINE)) == [run.DRAINED] * 2


def test_events_reach_who_subscribed_and_who_does_not_read_is_cut_off(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftcomm.launch.admin.server.BEHIND", 1 << 16)
    script = "import time\nwhile True:\n    time.sleep(600)"
    job = Job(here, script, replicas=1)
    seen: list[dict[str, Any]] = []

    async def plan() -> None:
        await job.until(lambda: job.of("process_started"))
        path = await asyncio.to_thread(client.find, None)
        with client.AdminClient(path) as quick, client.AdminClient(path) as slow:
            for each in (quick, slow):
                await asyncio.to_thread(each.ask, protocol.GetEvents())
            reading = asyncio.ensure_future(asyncio.to_thread(read, quick))
            for number in range(2000):
                job.launcher._report.emit("test", number=number, text="x" * 1000)
                # As fast as the quick one reads: it must not be cut off for want of a core.
                while number % 20 == 0 and not (
                    reading.done() or any(event.get("number") == number for event in seen[-20:])
                ):
                    await asyncio.sleep(0.001)
            await reading
            with pytest.raises(client.JobEnded):
                await asyncio.to_thread(lambda: list(iter_all(slow)))
        job.launcher.drain()

    def read(connection: client.AdminClient) -> None:
        for event in iter_all(connection):
            seen.append(event)
            if event.get("number") == 1999:
                return

    def iter_all(connection: client.AdminClient) -> Iterator[dict[str, Any]]:
        while True:
            yield from connection.follow(time.monotonic() + 1.0)

    assert job.run(plan) == run.DRAINED, job.said
    assert [event["number"] for event in seen if event["kind"] == "test"] == list(range(2000))
