"""`ftcomm bench accuracy` and `ftcomm bench hsdp`: real trainings and real kills, for what is written, not for how fast
or how well they learned."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ftcomm.bench.research import accuracy, forked
from ftcomm.bench.research.convergence import Run
from ftcomm.errors import FtcommError
from ftcomm.settings import Settings

from .test_bench import LIMIT, run

pytestmark = pytest.mark.timeout(LIMIT)

RUN = {
    *("kind", "seed", "steps", "kills", "deaths", "absent", "lost", "discarded", "disputed", "equal", "validation"),
    *("killed_at", "seconds"),
}


def test_a_sharded_training_with_a_kill_beside_one_without(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("hsdp", "--smoke", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    calm, killed = result["runs"]
    for one in (calm, killed):
        assert one.keys() == RUN
        assert (one["lost"], one["discarded"], one["disputed"], one["equal"]) == (0, 0, 0, True)
        assert [step for step, _ in one["validation"]][-1] == one["steps"]
    assert (calm["kills"], calm["deaths"], calm["absent"]) == (0, 0, 0.0)
    assert (killed["kills"], killed["deaths"]) == (1, 1)
    assert killed["absent"] > 0
    assert calm["validation"][0] == killed["validation"][0], "they do not begin with the same weights"


def test_replicas_that_are_away_for_a_part_of_the_steps(tmp_path: Path) -> None:
    request = accuracy.Request(2, 16, 1, 1, 100, 0.2, 1, ("linear",), (1,), validate_every=25, windows=8)
    request.check()
    seen: list[float] = []
    one: Run = asyncio.run(asyncio.wait_for(accuracy.train(request, 1, "linear", seen.append), 240))
    assert one.kept, one
    assert one.kills == 2
    assert one.absent >= 0.1, "they came back earlier than was drawn"
    assert [step for step, _ in one.validation][-1] == 100
    assert one.final < one.validation[0][1]
    assert seen


def broken(task: str, settings: Settings) -> None:
    raise RuntimeError(f"{task} on purpose, replica {settings.replica}")


def test_a_rank_that_fails_ends_the_job_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "NOTICE", 0.1)

    async def job() -> None:
        async with forked.ForkedJob(broken, "broken", tmp_path, 1, 1) as job:
            while await job.runs(60):
                pass

    with pytest.raises(FtcommError, match=r"exit code 1(.|\n)*broken on purpose, replica 0"):
        asyncio.run(asyncio.wait_for(job(), 240))
