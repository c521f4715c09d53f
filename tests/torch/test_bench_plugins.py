"""`ftcomm bench plug-ins` takes what a library needs from what it needs with ftcomm's integration, round by round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # if it is imported later, torch keeps a group for good
from click.testing import CliRunner

from ftcomm.bench import plugins
from ftcomm.bench.job import Records
from ftcomm.bench.plugin_rank import TRAINERS, WARM, PluginTask, Tiny, Took
from ftcomm.cli import commands
from ftcomm.errors import FtcommError
from tests.rigs.ports import free_port


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


@pytest.mark.parametrize(
    ("trainer", "plugin", "job"),
    [
        ("steps", True, (2, 1)),
        ("lightning-fsdp2", True, (1, 2)),
        ("lightning-fsdp2", False, (2, 1)),
        ("ray", True, None),
    ],
)
def test_all_ranks_are_started_and_say_what_a_step_took(
    monkeypatch: pytest.MonkeyPatch, trainer: str, plugin: bool, job: tuple[int, int] | None
) -> None:
    """By the launcher, with FSDP2 as one replica of the integration, or by the library."""
    started: list[tuple[int, int] | None] = []
    ranks = 2

    def write(path: str) -> None:
        for rank in range(ranks):
            Records(str(Path(path).parent), rank).write(Took(100.0 + rank))

    class Ended:
        def __init__(self, options: Any) -> None:
            started.append((options.replicas, options.ranks_per_replica))
            write(options.args[1])

        async def __aenter__(self) -> Ended:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def finish(self) -> None:
            pass

        def finished(self) -> None:
            pass

    async def driven(arguments: Sequence[str]) -> None:
        started.append(None)
        write(arguments[1])

    monkeypatch.setattr(plugins, "Job", Ended)
    monkeypatch.setattr(plugins, "_driven", driven)
    task = PluginTask(trainer, plugin, WARM + 1, 2)
    assert asyncio.run(plugins._round(task)) == 100.5
    assert started == [job]
    ranks = 1
    with pytest.raises(FtcommError, match=f"1 of 2 ranks have written down what a step of {trainer} took"):
        asyncio.run(plugins._round(task))


def test_a_driver_that_fails_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(FtcommError, match=r"failed \(exit code 1\); its last lines:(.|\n)*No module named 'nowhere'"):
        asyncio.run(plugins._driven(("nowhere:train", str(tmp_path / "none"))))


def gloo_threads() -> int:
    return sum("gloo_run" in (each / "comm").read_text() for each in Path("/proc/self/task").iterdir())


def test_ddp_is_not_the_last_to_let_gloo_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch frees DDP with the interpreter held, and gloo's threads need that in order to end: both wait for ever."""
    assert torch._dynamo
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    before, model = gloo_threads(), Tiny()
    TRAINERS["steps"].train(PluginTask("steps", False, WARM + 1, 1), model)  # DDP is gone, and the group was destroyed
    assert gloo_threads() > before
    del model
    assert gloo_threads() == before
