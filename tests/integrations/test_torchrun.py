"""Each trainer under a torchrun for each replica: a worker is killed in a backward, and torchrun starts it again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.test_trainers import EXAMPLES, KILLED
from tests.integrations.torchrun import Torchruns
from tests.rigs.deadlines import DEADLINE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_fork_server")]


@pytest.fixture(autouse=True)
def _quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("XDG_RUNTIME_DIR", str(tmp_path)), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)


def outlives_a_kill(parent: Path, name: str, *args: str, ranks: int = 1) -> None:
    """Replica 1 is killed, is back, and when the job is drained both have the same weights after as many steps."""
    here = parent / name
    here.mkdir()
    script = [str(KILLED), str(here), str(EXAMPLES / f"{name}.py"), "--steps", "100000", "--width", "32", *args]
    with Torchruns(here, script, ranks=ranks) as job:

        def both(since: int = 0) -> None:
            job.wait_event(f"view with both, of {name}", lambda _: job.contribute({0, 1}, since), DEADLINE)

        both()
        (here / "kill-1").touch()
        seen = len(job.events)
        job.wait_event(
            f"view without replica 1, of {name}",
            lambda events: any(event["kind"] == "view" and len(event["members"]) == 1 for event in events[seen:]),
            DEADLINE,
        )
        both(since=seen)
        job.drain()
        codes = []
        for torchrun in job.processes.values():
            torchrun.join(DEADLINE)
            codes.append(torchrun.exitcode)
        said = job.said()
    assert codes == [0, 0], said
    ends = re.findall(r"trained (\d+) steps, weights ([0-9a-f]+)", said)
    assert (len(ends), len(set(ends))) == (2 * ranks, 1), said


@pytest.mark.shows("torchrun", "DDP", "RSJE")
@pytest.mark.shows("torchrun", "FSDP2", "RSJE")
def test_torchs_own(tmp_path: Path) -> None:
    outlives_a_kill(tmp_path, "train_ddp", "--checkpoints", str(tmp_path / "ddp"))
    outlives_a_kill(tmp_path, "train_fsdp2", "--checkpoints", str(tmp_path / "fsdp2"), ranks=2)


@pytest.mark.shows("torchrun", "Hugging Face Trainer", "RSJE")
@pytest.mark.shows("torchrun", "Accelerate", "RSJE")
@pytest.mark.shows("torchrun", "Lightning", "RSJE")
@pytest.mark.shows("torchrun", "Lightning, FSDP2", "RSJE")
def test_trainers(tmp_path: Path) -> None:
    """One after the other, since what takes longest is to import them, which a fork server does once."""
    for library in ("transformers", "lightning"):
        pytest.importorskip(library)
    trainers = (("transformers", 1, 400), ("accelerate", 1, 400), ("lightning", 1, 400))
    for name, ranks, samples in (*trainers, ("lightning_fsdp2", 2, 64)):  # 64: each step ends with a checkpoint
        output = str(tmp_path / f"output-of-{name}")
        outlives_a_kill(tmp_path, f"train_{name}", "--samples", str(samples), "--output", output, ranks=ranks)
