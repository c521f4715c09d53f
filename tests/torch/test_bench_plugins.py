"""`ftcomm bench plug-ins` takes what a library needs from what it needs with ftcomm's integration, round by round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftcomm.bench import plugins
from ftcomm.bench.plugin_rank import WARM, PluginTask
from ftcomm.cli import commands


def test_both_take_turns_and_the_difference_is_a_share_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PluginTask] = []

    async def took(task: PluginTask) -> float:
        asked.append(task)
        return 500.0 + 250.0 * task.plugin

    monkeypatch.setattr(plugins, "_round", took)
    path = tmp_path / "out.json"
    options = ("-n", "7", "--rounds", "2", "--width", "16", "--layers", "1", "--trainers", "steps")
    done = CliRunner().invoke(commands, ["bench", "plug-ins", *options, "--json", str(path)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert asked == 2 * [PluginTask("steps", plugin, WARM + 7, 2) for plugin in (False, True)]
    [cost] = json.loads(path.read_text())["costs"]
    assert (cost["plain_us"], cost["plugin_us"], cost["added_us"]) == (500.0, 750.0, 250.0)
    assert cost["share_pct"] == pytest.approx(100 * 0.25 / cost["step_ms"])
