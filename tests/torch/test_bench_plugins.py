"""`ftcomm bench plug-ins` takes what a library needs from what it needs with ftcomm's integration, round by round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch._dynamo  # if it is imported later, torch keeps a group for good
from click.testing import CliRunner

from ftcomm.bench import plugins
from ftcomm.bench.plugin_rank import TRAINERS, WARM, PluginTask, Tiny
from ftcomm.cli import commands
from tests.ports import free_port


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


def gloo_threads() -> int:
    return sum("gloo_run" in (each / "comm").read_text() for each in Path("/proc/self/task").iterdir())


def test_ddp_is_not_the_last_to_let_gloo_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch frees DDP with the interpreter held, and gloo's threads need that in order to end: both wait for ever."""
    assert torch._dynamo
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    before, model = gloo_threads(), Tiny()
    TRAINERS["steps"](PluginTask("steps", False, WARM + 1, 1), model)  # DDP is gone, and the group was destroyed
    assert gloo_threads() > before
    del model
    assert gloo_threads() == before
