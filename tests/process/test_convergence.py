"""`ftcomm bench accuracy` and `hsdp`: real trainings and real kills, for what is written, not for how fast or how well
they learned."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from ftcomm.bench.job import observed
from ftcomm.bench.research import accuracy
from ftcomm.bench.research.convergence import Run
from ftcomm.bench.research.convergence_rank import ConvergenceRecord
from ftcomm.errors import FtcommError

from .conftest import Bench

LIMIT = 300.0  # s for a test: torch is imported in several processes, on a busy machine for a minute

RUN = {
    *("kind", "seed", "steps", "kills", "deaths", "absent", "lost", "discarded", "disputed", "equal", "validation"),
    *("killed_at", "seconds"),
}


@pytest.mark.protocol  # of FSDP2 on the newest torch tell tests/torch/test_fsdp.py and test_own_world.py
def test_a_sharded_training_with_a_kill_beside_one_without(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("hsdp", "--smoke", "--json", str(path))
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


@pytest.mark.protocol
def test_replicas_that_are_away_for_a_part_of_the_steps(preforked: None) -> None:
    request = accuracy.AccuracyRequest(seeds=(1,)).smoke()
    request.check()
    seen: list[float] = []
    one: Run = asyncio.run(asyncio.wait_for(accuracy.train(request, 1, "linear", seen.append), 240))
    assert one.kept, one
    assert one.kills == 2
    assert one.absent >= 0.1, "they came back earlier than was drawn"
    assert [step for step, _ in one.validation][-1] == 100
    assert one.final < one.validation[0][1]
    assert seen


class BrokenTask(msgspec.Struct, frozen=True):
    folder: str = ""


def broken(task: BrokenTask) -> None:
    raise RuntimeError("broken on purpose")


@pytest.mark.protocol
def test_a_rank_that_fails_ends_the_job_with_its_error(preforked: None) -> None:
    async def job() -> None:
        async with observed(broken, BrokenTask(), ConvergenceRecord, 1, max_restarts=0) as job:
            await job.until("it never comes to pass", lambda: False, 200)

    with pytest.raises(FtcommError, match=r"exit code 1(.|\n)*broken on purpose"):
        asyncio.run(asyncio.wait_for(job(), 240))
