"""The examples, as people will run them, but that in one run of each the ranks are forks of a process with torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftcomm.launch import Launcher, RunOptions, process, run
from ftcomm.training.checkpoint import complete
from tests.rigs.deadlines import DEADLINE

EXAMPLES = Path(__file__).parents[2] / "examples"


class Running:
    """An example under the launcher, in the folder `here`, and what it said."""

    def __init__(self, here: Path, name: str, *args: str, **options: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        command = (*args, "--width", "32", "--checkpoints", str(here / name))
        self.launcher = Launcher(
            RunOptions(script=str(EXAMPLES / f"{name}.py"), args=command, backoff=0.01, **options),
            self.events.append,
            lambda replica, rank, line: self.lines.append(f"[{replica}.{rank}] {line}"),
            self.lines.append,
        )

    def run(self, plan: Callable[[], Any] | None = None) -> int:
        async def main() -> int:
            running = asyncio.ensure_future(self.launcher.run())
            if plan is not None:
                await asyncio.wait({asyncio.ensure_future(plan()), running}, return_when=asyncio.FIRST_COMPLETED)
            return await running

        return asyncio.run(asyncio.wait_for(main(), DEADLINE))

    async def until(self, true: Callable[[], object]) -> None:
        while not true():
            await asyncio.sleep(0.01)

    def steps(self) -> list[int]:
        return [event["step"] for event in self.events if event["kind"] == "report" and "loss" in event]

    def contributing(self) -> int:
        views = [event for event in self.events if event["kind"] == "view"]
        return sum(member["contributing"] for member in views[-1]["members"]) if views else 0


@pytest.fixture(autouse=True)
def _quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FTCOMM_LOG", "warning")


@contextlib.contextmanager
def interpreters() -> Iterator[None]:
    """Within, ranks are interpreters of their own, though the test has asked for `preforked`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", subprocess)
        yield


@pytest.mark.shows("ftcomm run", "DDP", "RSJE")
def test_ddp_outlives_a_kill_and_goes_on_from_its_checkpoint(preforked: None, tmp_path: Path) -> None:
    first = Running(tmp_path, "train_ddp", "--steps", "1000000", replicas=2)

    async def plan() -> None:
        await first.until(lambda: first.steps() and max(first.steps()) > 5)
        os.kill(first.launcher.pids()[1, 0], signal.SIGKILL)
        await first.until(lambda: first.contributing() == 1)
        await first.until(lambda: first.contributing() == 2)
        first.launcher.interrupt()

    assert first.run(plan) == run.DRAINED, first.lines
    ends = [str(line) for line in first.lines if "weights" in str(line)]
    assert len(ends) == 2, first.lines
    assert len({end.partition("trained")[2] for end in ends}) == 1, "replicas differ"
    (*_, last) = complete(tmp_path / "train_ddp")
    assert last == max(first.steps()) + 1, "the state with which they were drained is not there"

    second = Running(tmp_path, "train_ddp", "--steps", str(last + 3), replicas=1)
    with interpreters():
        assert second.run() == run.FINISHED, second.lines
    assert second.steps() == [last, last + 1, last + 2]
    assert complete(tmp_path / "train_ddp")[-1] == last + 3


@pytest.mark.protocol
@pytest.mark.shows("ftcomm run", "FSDP2", "R")
def test_fsdp2_in_one_replica_of_two_and_then_in_two(preforked: None, tmp_path: Path) -> None:
    for replicas, first, total in ((1, 0, 2), (2, 2, 4)):
        example = Running(tmp_path, "train_fsdp2", "--steps", str(total), replicas=replicas, ranks_per_replica=2)
        assert example.run() == run.FINISHED, example.lines
        assert sorted(example.steps()) == sorted([first, first + 1] * replicas * 2)
        assert complete(tmp_path / "train_fsdp2")[-1] == total
