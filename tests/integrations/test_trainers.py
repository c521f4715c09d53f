"""Trainers of other libraries, from the registry: replicas are killed in a backward, come back, and all end alike."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from ftcomm.launch import Launcher, RunOptions, run

KILLED = Path(__file__).with_name("killed.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 300.0  # s of a run
AFTER = 12  # steps between two kills, and before the end
pytestmark = [pytest.mark.timeout(DEADLINE + 60), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FTCOMM_LOG", "warning")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Running:
    """An example under the launcher, whose replicas are killed one after the other, each in a backward."""

    def __init__(self, here: Path, name: str, *args: str) -> None:
        self.here = here
        self.events: list[dict[str, Any]] = []
        self.lines: list[tuple[int, str]] = []
        self.said: list[str] = []
        self.launcher = Launcher(
            RunOptions(
                script=str(KILLED), args=(str(here), str(EXAMPLES / f"{name}.py"), *args), replicas=2, backoff=0.01
            ),
            self.events.append,
            lambda replica, rank, line: self.lines.append((replica, line)),
            self.said.append,
        )

    def views(self) -> list[list[dict[str, Any]]]:
        return [event["members"] for event in self.events if event["kind"] == "view"]

    def steps(self) -> int:
        """The last step that a replica has told."""
        told = [event["step"] for event in self.events if event["kind"] in ("report", "metrics") and "step" in event]
        return max(told, default=-1)

    async def until(self, true: Any) -> None:
        while not true():
            await asyncio.sleep(0.02)

    async def some_steps(self) -> None:
        first = self.steps()
        await self.until(lambda: self.steps() >= first + AFTER)

    def run(self) -> int:
        """Until both have been killed and contribute again, the one that writes checkpoints last, and are drained."""

        async def plan() -> None:
            await self.some_steps()
            for victim in (1, 0):
                seen = len(self.views())
                (self.here / f"kill-{victim}").touch()
                await self.until(lambda seen=seen: any(len(view) == 1 for view in self.views()[seen:]))
                await self.until(lambda: sum(member["contributing"] for member in self.views()[-1]) == 2)
                await self.some_steps()
            self.launcher.interrupt()

        async def main() -> int:
            running = asyncio.ensure_future(self.launcher.run())
            planned = asyncio.ensure_future(plan())
            await asyncio.wait({planned, running}, return_when=asyncio.FIRST_COMPLETED)
            planned.cancel()
            return await running

        return asyncio.run(asyncio.wait_for(main(), DEADLINE))

    def ends(self) -> dict[int, tuple[int, str]]:
        """replica -> (steps, digest of the weights), as it said at the end."""
        found = {}
        for replica, line in self.lines:
            match = re.search(r"trained (\d+) steps, weights ([0-9a-f]+)", line)
            if match:
                found[replica] = int(match[1]), match[2]
        return found


def test_transformers(preforked: None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    args = ("--steps", "100000", "--width", "32", "--samples", "400", "--output", str(out))
    example = Running(tmp_path, "train_transformers", *args)
    assert example.run() == run.DRAINED, (example.said, example.lines)
    ends = example.ends()
    assert set(ends) == {0, 1}, example.lines
    assert ends[0] == ends[1], "replicas differ"
    last = ends[0][0]
    assert (out / f"checkpoint-{last}" / "trainer_state.json").exists(), "drained without a checkpoint"


def test_lightning(preforked: None, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    out = tmp_path / "out"
    args = ("--steps", "100000", "--width", "32", "--samples", "400", "--output", str(out))
    example = Running(tmp_path, "train_lightning", *args)
    assert example.run() == run.DRAINED, (example.said, example.lines)
    ends = example.ends()
    assert set(ends) == {0, 1}, example.lines
    assert ends[0] == ends[1], "replicas differ"
    assert list(out.rglob("*.ckpt")), "no checkpoint at the end of an epoch"
