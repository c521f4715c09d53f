"""`ftcomm bench control`, on a job that is as small as it can be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ftcomm.bench.control_plane import ControlRequest
from ftcomm.errors import SettingsError

pytestmark = pytest.mark.protocol


def test_what_is_lost_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "bench", "control", "--smoke", "--json"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads(path.read_bytes())["losses"]
    faults = ("rank", "host", "replica", "coordinator")
    assert [loss["what"] for loss in losses] == ["start", *(x for fault in faults for x in (fault, f"{fault}: return"))]
    assert [loss["survivors"] for loss in losses] == [8, *len(faults) * (4, 8)]
    assert all(0 < loss["p50"] <= loss["p99"] <= loss["max"] for loss in losses)


def test_timeouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingsError, match="--heartbeat: the op timeout of 120 s is not above the heartbeat timeout"):
        ControlRequest(heartbeat=600.0).check()
