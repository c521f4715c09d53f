"""Trainers of other libraries, from the registry: replicas are killed in a backward, come back, and all end alike."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftcomm.errors import ArgumentError
from ftcomm.launch import Launcher, RunOptions, run
from tests.rigs.deadlines import DEADLINE

KILLED = Path(__file__).with_name("killed.py")
TRACKED = Path(__file__).with_name("tracked.py")
SCALED = Path(__file__).with_name("scaled.py")
SCALED_ACCELERATE = Path(__file__).with_name("scaled_accelerate.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
AFTER = 12  # steps between two kills, and before the end
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FTCOMM_LOG", "warning")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Running:
    """An example under the launcher, whose replicas are killed one after the other, each in a backward."""

    def __init__(self, here: Path, name: str, *args: str, ranks: int = 1, by: tuple[str, ...] = ()) -> None:
        self.here = here
        self.events: list[dict[str, Any]] = []
        self.lines: list[tuple[int, str]] = []
        self.said: list[str] = []
        self.launcher = Launcher(
            RunOptions(
                script=str(KILLED),
                args=(str(here), *by, str(EXAMPLES / f"{name}.py"), *args),
                replicas=2,
                ranks_per_replica=ranks,
                backoff=0.01,
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
                away = self.here / f"away-{victim}"
                for asked in (away, self.here / f"kill-{victim}"):
                    asked.touch()
                await self.until(lambda seen=seen: any(len(view) == 1 for view in self.views()[seen:]))
                await self.some_steps()
                away.unlink()
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

    def run_alone(self) -> int:
        """To its own end."""
        return asyncio.run(asyncio.wait_for(self.launcher.run(), DEADLINE))

    def ends(self) -> dict[int, tuple[int, str]]:
        """replica -> (steps, digest of the weights), as it said at the end."""
        found = {}
        for replica, line in self.lines:
            match = re.search(r"trained (\d+) steps, weights ([0-9a-f]+)", line)
            if match:
                found[replica] = int(match[1]), match[2]
        return found

    def one_scale(self) -> None:
        """Check that both have scaled the loss alike to the end."""
        scales = [line for _, line in self.lines if line.startswith("scale ")]
        assert len(scales) == 2, self.lines
        assert len(set(scales)) == 1, "replicas scale the loss differently"


@pytest.mark.shows("ftcomm run", "Hugging Face Trainer", "RSJE")
def test_transformers(preforked: None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    args = ("--steps", "100000", "--width", "32", "--samples", "400", "--output", str(out))
    example = Running(tmp_path, "train_transformers", *args, by=(str(SCALED_ACCELERATE),))
    assert example.run() == run.DRAINED, (example.said, example.lines)
    ends = example.ends()
    assert set(ends) == {0, 1}, example.lines
    assert ends[0] == ends[1], "replicas differ"
    example.one_scale()
    last = ends[0][0]
    assert (out / f"checkpoint-{last}" / "trainer_state.json").exists(), "drained without a checkpoint"


@pytest.mark.shows("ftcomm run", "Lightning", "RSJE")
def test_lightning(preforked: None, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    out = tmp_path / "out"
    args = ("--steps", "100000", "--width", "32", "--samples", "400", "--output", str(out))
    example = Running(tmp_path, "train_lightning", *args, by=(str(SCALED),))
    assert example.run() == run.DRAINED, (example.said, example.lines)
    ends = example.ends()
    assert set(ends) == {0, 1}, example.lines
    assert ends[0] == ends[1], "replicas differ"
    example.one_scale()
    assert list(out.rglob("*.ckpt")), "no checkpoint at the end of an epoch"


@pytest.mark.shows("ftcomm run", "Lightning, FSDP2", "RSJE")
def test_lightning_with_fsdp2(preforked: None, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    out = tmp_path / "out"
    args = ("--steps", "100000", "--width", "32", "--samples", "400", "--output", str(out))
    example = Running(tmp_path, "train_lightning_fsdp2", *args, ranks=2)
    assert example.run() == run.DRAINED, (example.said, example.lines)
    ends = example.ends()
    assert set(ends) == {0, 1}, example.lines
    assert ends[0] == ends[1], "replicas differ"
    assert list(out.rglob("*.distcp")), "no checkpoint at the end of an epoch"


@pytest.mark.shows("ftcomm run", "Accelerate", "RSJE")
def test_accelerate(preforked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("NOTES", str(tmp_path))
    out = tmp_path / "out"
    args = ("--width", "32", "--samples", "400", "--output", str(out))
    example = Running(
        tmp_path, "train_accelerate", "--steps", "100000", *args, by=(str(SCALED_ACCELERATE), str(TRACKED))
    )
    assert example.run() == run.DRAINED, (example.said, example.lines)
    ends = example.ends()
    assert set(ends) == {0, 1}, example.lines
    assert ends[0] == ends[1], "replicas differ"
    example.one_scale()
    last = ends[0][0]
    place = json.loads((out / "ftcomm.json").read_text())
    assert place["completed_steps"] == last, "drained without a checkpoint"
    one_tracks(tmp_path)

    resumed = Running(tmp_path, "train_accelerate", "--steps", str(last + 3), *args, by=(str(SCALED_ACCELERATE),))
    assert resumed.run_alone() == 0, (resumed.said, resumed.lines)
    ends = resumed.ends()
    assert set(ends) == {0, 1}, resumed.lines
    assert ends[0] == ends[1], "replicas differ"
    assert ends[0][0] == last + 3, "not resumed where the checkpoint was written"
    first = next(line for _, line in resumed.lines if line.startswith("epoch "))
    assert first.startswith(f"epoch {place['epoch']},"), resumed.lines


WITHOUT_OURS = {
    "lightning.pytorch": """
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
strategy = DDPStrategy(process_group_backend="ftcomm")
Trainer(accelerator="cpu", devices=2, max_steps=2, limit_val_batches=0, strategy=strategy, **off).fit(BoringModel())
print("trained by", dist.get_backend(), "of", dist.get_world_size())
""",
    "transformers": """
from ftcomm.integrations.transformers import TrainingArguments

arguments = TrainingArguments("out", use_cpu=True, ddp_backend="ftcomm", report_to=[])
print("trained by", "ftcomm" if arguments.device.type == "cpu" else "nobody", "of", 1 + arguments.world_size)
""",
}


@pytest.mark.parametrize("library", WITHOUT_OURS)
def test_the_name_of_the_backend_is_one_that_the_library_takes(
    preforked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """Lightning's own strategy waits at the store that the environment names. Accelerate knows no "ftcomm" on CPUs."""
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(WITHOUT_OURS[library])
    lines: list[str] = []
    options = RunOptions(script=str(tmp_path / "script.py"), replicas=2)
    launcher = Launcher(options, on_line=lambda replica, rank, line: lines.append(line), on_log=lines.append)
    assert asyncio.run(asyncio.wait_for(launcher.run(), DEADLINE)) == run.FINISHED, lines
    assert lines.count("trained by ftcomm of 2") == 2, lines


def test_lightning_refuses_what_would_stay_within_a_replica() -> None:
    pytest.importorskip("lightning")
    from torch.nn import Linear

    from ftcomm.integrations.lightning import _check_mesh

    with pytest.raises(ArgumentError, match=r'parameter weight .* mesh=self.device_mesh\["replica", "data_parallel"\]'):
        _check_mesh(Linear(2, 2))
    _check_mesh(Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("callback", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_lightning_refuses_averages_that_replicas_would_not_share(callback: str) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import callbacks

    from ftcomm.integrations.lightning import ReplicaStrategy, _check

    options = {"swa_lrs": 0.1} if callback == "StochasticWeightAveraging" else {}
    strategy = ReplicaStrategy()
    strategy._optimizers = [object()]
    trainer = SimpleNamespace(
        lightning_module=SimpleNamespace(automatic_optimization=True),
        reload_dataloaders_every_n_epochs=0,
        callbacks=[getattr(callbacks, callback)(**options)],
    )
    with pytest.raises(ArgumentError, match="a replica that comes back would have another average"):
        _check(trainer, strategy)


def test_each_replica_of_lightning_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With devices=1, as the script of one process has it."""
    pytest.importorskip("lightning")
    import torch

    from ftcomm.integrations.lightning import ReplicaStrategy

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert ReplicaStrategy(parallel_devices=[torch.device("cuda", 0)]).root_device == torch.device("cuda", 2)


def one_tracks(here: Path) -> None:
    """The tracker of the lowest replica alone has logged, and that of another one while the lowest was dead."""
    noted = {replica: (here / f"tracked-{replica}").read_text().splitlines() for replica in (0, 1)}
    steps = [line for lines in noted.values() for line in lines if line.startswith("log")]
    assert len(steps) == len(set(steps)), "two have logged a step"
    assert noted[0].count("start") == 2, "it is started again in each life"
    assert noted[1][:2] == ["start", "config 32"]
    assert noted[1][-1] == "finish", "it still runs, though the lowest replica is back"
    assert any(line.startswith("log") for line in noted[1])


@pytest.mark.parametrize(
    ("options", "mend"),
    [
        ({"mixed_precision": "fp8"}, "use bf16 or fp16"),
        ({"parallelism_config": object()}, "docs/training.md"),
        ({"deepspeed_plugin": object()}, "leave it out"),
        ({"dispatch_batches": True}, "as they are by default"),
        ({"even_batches": False}, "as they are by default"),
    ],
)
def test_accelerate_refuses(options: dict[str, Any], mend: str) -> None:
    pytest.importorskip("accelerate")
    from accelerate.utils import DataLoaderConfiguration

    from ftcomm.integrations.accelerate import Accelerator

    of_data = {name: value for name, value in options.items() if name.endswith("batches")}
    if of_data:
        options = {"dataloader_config": DataLoaderConfiguration(**of_data)}
    with pytest.raises(ArgumentError, match=mend):
        Accelerator(**options)
