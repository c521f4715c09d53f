"""The demo, as people run it: a kill inside an all-reduce, a replica that comes back, equal weights at the end."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftcomm.cli import commands
from ftcomm.demo.kill import kill_in_mid_op
from ftcomm.demo.show import sparkline
from ftcomm.demo.story import Story
from tests.rigs import preforked_ranks

STEPS = 60


@pytest.mark.protocol
@pytest.mark.slow
@pytest.mark.usefixtures("preforked")
def test_the_demo_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = CliRunner().invoke(commands, ["demo", f"--steps={STEPS}", "--seed=5", f"--out={tmp_path}"])
    assert done.exit_code == 0, done.output
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["missing"] == []
    assert len(set(run["hashes"].values())) == 1
    assert len(run["hashes"]) == 4
    kill = run["kill"]
    assert kill["posted"] > max(kill["reduced"], kill["taken"]), "the victim was not inside an all-reduce"
    survivors = {str(replica) for replica in range(4)} - {str(run["victim"])}
    assert set(run["resumed"]) == survivors
    assert all(event["ops"] > 0 for event in run["resumed"].values())
    assert [mark["kind"] for mark in run["marks"]] == ["killed", "resumed", "rejoined", "caught up"]
    assert run["validation"][-1][1] < run["validation"][0][1] - 2.0, "the loss did not fall"
    assert [step for step, _, _ in run["train"]] == list(range(STEPS))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert run["results"]["recorded as"].startswith("signal, killed by SIGKILL; ")
    assert run["victim_in"].startswith("allreduce ")
    assert "train.py:" in run["victim_in"]
    for line in (
        "live view: http://127.0.0.1:",
        "SIGKILL to replica",
        "weights equal on all replicas",
        "yes (",
        f"0 (each survivor reported all {STEPS})",
    ):
        assert line in done.output


@pytest.mark.protocol
def test_an_interrupted_demo_leaves_in_order(tmp_path: Path) -> None:
    command = ["-u", *preforked_ranks.FTCOMM, "demo", "--replicas=2", f"--out={tmp_path}"]
    demo = preforked_ranks.popen(command, env=os.environ, pass_fds=())
    try:
        assert demo.stdout is not None
        said = io.TextIOWrapper(io.BufferedReader(demo.stdout))  # type: ignore[arg-type]
        assert "2 replicas, 400 steps" in said.readline()
        assert any("view 1" in line for line in said)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(100) == 3
        assert "interrupted at step" in said.read()
    finally:
        demo.kill()
        demo.wait()


def test_a_process_without_a_segment_is_left_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert kill_in_mid_op(child.pid, (), timeout=1.0) is None
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    assert kill_in_mid_op(child.pid, ()) is None


def test_what_did_not_happen_is_missing() -> None:
    story = Story(replicas=2, steps=2)
    story.event({"kind": "a kind of tomorrow", "mono": 0.0})
    for replica, final in ((0, "aa"), (1, "bb")):
        story.event({"kind": "process_started", "mono": 1.0, "replica": replica, "shard": 0, "pid": 1})
        story.event({"kind": "report", "mono": 2.0, "replica": replica, "final_hash": final})
        story.event(
            {"kind": "report", "mono": 2.0, "replica": replica, "step": 0, "loss": 1.0, "tokens": 3, "counted": True}
        )
    assert not story.equal()
    assert story.steps_lost() == 1
    assert story.losses() == [(0, 1.0)]
    assert story.resume_ms() is None


def test_sparklines() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert len(sparkline([float(n) for n in range(1000)], 40)) == 40
