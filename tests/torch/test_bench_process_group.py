"""What the process group adds is measured of the product's own one: it has to take what DDP and `dist` call."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from ftcomm.cli import commands


def test_both_ways_to_call_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = CliRunner().invoke(commands, ["bench", "process-group", "--smoke", "--json", str(path)])
    assert done.exit_code == 0, (done.output, done.exception)
    costs = json.loads(path.read_text())["costs"]
    assert [cost["way"] for cost in costs] == ["waits", "takes a future"]
    assert all(cost["ops_per_step"] > 0 and cost["step_ms"] > 0 and len(cost["round_added_us"]) == 2 for cost in costs)
