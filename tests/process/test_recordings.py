"""What a killed, a frozen and a waiting rank of a real job have recorded, and the dumps that the launcher writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftcomm.recorder.dump import recordings_in
from ftcomm.recorder.files import folders
from ftcomm.recorder.reader import Recording, lives, read, read_all
from tests.rigs.deadlines import DEADLINE
from tests.unit.test_dumps import analyse

pytestmark = pytest.mark.protocol

SCRIPT = """
import os, time
import numpy as np
import ftcomm

ftcomm.init()
weights, gradient = np.zeros(1000, np.float32), np.ones(1000, np.float32)
for step in ftcomm.steps(1000000, {"weights": weights}):
    ftcomm.allreduce(gradient, "avg")
    weights += gradient
    time.sleep(0.01)
    if os.environ["FTCOMM_REPLICA"] == "0" and os.path.exists("differs"):
        ftcomm.allreduce(gradient[:7])
"""


class Run:
    """`ftcomm run`, which knows by itself when to dump."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        times = ("--heartbeat-timeout", "5", "--op-timeout", "16", "--op-timeout-floor", "6")
        self._said = folder / "said"
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ftcomm.cli", "run", "--replicas", "3", *times, str(folder / "train.py")],
                cwd=folder,
                stdout=said,
                stderr=said,
            )

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def until(self, true: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE
        while not (found := true()):
            assert time.monotonic() < deadline, self.said()[-3000:]
            assert self.process.poll() is None, self.said()[-3000:]
            time.sleep(0.05)
        return found

    def dumped(self, cause: str) -> Path:
        said = rf"{cause}: what all ranks did is in (\S+)"
        return Path(self.until(lambda: re.search(said, self.said())).group(1))


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FTCOMM_DUMP_DIR", str(tmp_path))
    run = Run(tmp_path)
    yield run
    run.process.kill()  # its reaper ends the ranks, also one that is stopped
    run.process.wait()


def training() -> dict[int, Recording]:
    """The living ranks that have done some steps, by replica, if all three have."""
    found = [recording for folder in folders().values() for recording in read_all(folder)[0] if lives(recording)]
    ready = {r.replica: r for r in found if sum(op.returned is not None for op in r.ops) > 20}
    return ready if len(ready) == 3 else {}


def test_what_dead_and_frozen_ranks_did_can_be_read_and_is_dumped(running: Run, tmp_path: Path) -> None:
    before = running.until(training)
    token = Path(f"/proc/{before[0].pid}/environ").read_bytes().split(b"FTCOMM_TOKEN=")[1].split(b"\0")[0]

    os.kill(before[2].pid, signal.SIGKILL)
    running.until(lambda: not lives(before[2]))
    dead = read(before[2].path)
    assert dead.ending == "none"
    assert dead.problems == ()
    last = dead.ops[-1]
    assert (last.group, last.kind, last.epoch >= 1) == ("*", "allreduce", True)
    here = f"{tmp_path / 'train.py'}"
    assert {op.caller for op in dead.ops} == {f"{here}:8 <module>", f"{here}:9 <module>"}  # those of the loop: 8
    mine = [op for op in dead.ops if op.caller == f"{here}:9 <module>"]
    assert {(op.elements, op.dtype, op.reduction) for op in mine} == {(1000, "float32", "avg")}
    steps = [phase for phase in dead.phases if phase.name == "step"]
    assert [step.step for step in steps] == list(range(steps[0].step, steps[0].step + len(steps)))
    assert {"join", "boundary", "vote"} <= {phase.name for phase in dead.phases}
    assert any(dead.step(op) == steps[-2].step for op in mine)
    assert before[2].path.rpartition("/")[2] in {Path(r.path).name for r in recordings_in(running.dumped("crash"))[0]}

    after = running.until(training)  # it is back, in another process
    assert after[2].pid != before[2].pid
    assert {"fetch", "load"} <= {phase.name for phase in read(after[2].path).phases}
    os.kill(after[1].pid, signal.SIGSTOP)
    stalled = running.dumped("stall")
    found, problems = recordings_in(stalled)
    assert problems == []
    waiting = {r.replica: r for r in found if r.pid == after[r.replica].pid}
    waits = [wait for wait in waiting[0].waits if wait.replica == 1 and wait.seconds > 5]
    assert waits, waiting[0].waits[-5:]
    [stuck] = [op for op in waiting[0].ops if op.returned is None]
    assert stuck.number == waits[-1].op
    assert max(op.number for op in waiting[1].ops) in (stuck.number, stuck.number - 1)

    running.process.send_signal(signal.SIGUSR1)
    asked = running.dumped("signal")
    for path in (*stalled.iterdir(), *asked.iterdir(), *Path(found[0].path).parent.iterdir()):
        assert token not in path.read_bytes(), path
    matched, _ = analyse(stalled)
    assert matched.collectives
    output = tmp_path / "trace.json"
    command = [sys.executable, "-m", "ftcomm.cli", "trace", str(asked), "-o", str(output)]
    subprocess.run(command, check=True, timeout=DEADLINE)
    traced = json.loads(output.read_text())["traceEvents"]
    assert len({event["pid"] for event in traced if event["ph"] == "X"}) >= 3


def test_a_job_that_fails_since_all_scripts_do_is_dumped_and_told_why(running: Run, tmp_path: Path) -> None:
    running.until(training)
    (tmp_path / "differs").touch()
    assert running.process.wait(DEADLINE) == 1
    said = running.said()
    assert "why: Members called different ops as op" in said, said[-3000:]
    for cause in ("mismatch", "crash"):
        found, problems = recordings_in(Path(re.search(rf"{cause}: what all ranks did is in (\S+)", said).group(1)))
        assert (len(found), problems) == (3, [])
