"""Each example of a trainer is a script for the library alone but for three lines at most: with these put back, it
trains by the library alone."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest

from ftcomm.launch import Launcher, RunOptions, run
from tests.integrations.test_trainers import EXAMPLES
from tests.rigs.deadlines import DEADLINE

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
COUNTS = {"one line": 1, "two lines": 2, "three lines": 3}

# example -> what a script for the library has in place of each of its lines
CHANGED: dict[str, dict[str, str]] = {
    "train_transformers": {
        "from ftcomm.integrations.transformers import Trainer, TrainingArguments": (
            "from transformers import Trainer, TrainingArguments"
        ),
    },
    "train_accelerate": {
        "from ftcomm.integrations.accelerate import Accelerator": "from accelerate import Accelerator",
        "for epoch in accelerator.epochs(-(-args.steps // steps_an_epoch)):": (
            "for epoch in range(-(-args.steps // steps_an_epoch)):"
        ),
        "completed = accelerator.completed_steps": "completed += accelerator.sync_gradients",
    },
    "train_lightning": {
        "from ftcomm.integrations.lightning import ReplicaStrategy": "",
        "strategy=ReplicaStrategy(),": 'strategy="ddp",',
    },
    "train_ray": {
        "from ftcomm.integrations.ray import TorchTrainer, steps": "from ray.train.torch import TorchTrainer",
        'for step in steps(config["steps"], {"model": model, "optimizer": optimizer}):': (
            'for step in range(config["steps"]):'
        ),
    },
    "train_lightning_fsdp2": {
        "from ftcomm.integrations.lightning import ReplicaModelParallelStrategy": (
            "from lightning.pytorch.strategies import ModelParallelStrategy"
        ),
        "strategy=ReplicaModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),": (
            "strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),"
        ),
        'mesh = self.device_mesh["replica", "data_parallel"]  # in place of ["data_parallel"]': (
            'mesh = self.device_mesh["data_parallel"]'
        ),
    },
}


def plain(name: str) -> str:
    """Returns the example as it would be for the library alone."""
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    for ours, theirs in CHANGED[name].items():
        [place] = [place for place, line in enumerate(lines) if line.strip() == ours]
        lines[place] = lines[place].replace(ours, theirs)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CHANGED)
def test_no_more_than_three_lines_differ_and_the_page_and_the_example_say_how_many(name: str) -> None:
    tree = ast.parse(plain(name))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    ours = {module for module in imported if module.partition(".")[0] == "ftcomm"}
    assert ours <= {"ftcomm.demo.data", "ftcomm.demo.model"}, "a text, and a model of torch"
    said = " ".join((ast.get_docstring(tree) or "").split())
    counts = [re.search(r"differs from a script for .*? in (one line|two lines|three lines)", said)]
    page = " ".join(PAGE.read_text().split("## What the Trainer sees")[0].split())
    section = page[: page.index(f"examples/{name}.py)")]
    counts += list(re.finditer(r"becomes fault-tolerant by (one line|two lines|three lines)", section))[-1:]
    counted = [COUNTS[found[1]] for found in counts if found]
    if name == "train_accelerate":  # two, and a third in a script that counts its steps
        counted[1] += "and by a third if it counts its steps" in section
    assert counted == [len(CHANGED[name])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHANGED.keys() - {"train_ray"}))  # which needs a cluster
def test_with_these_put_back_it_trains_by_the_library_alone(
    preforked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("lightning" if "lightning" in name else "transformers")
    for variable, value in (("XDG_RUNTIME_DIR", str(tmp_path)), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(variable, value)
    (tmp_path / "script.py").write_text(plain(name))
    lines: list[str] = []
    steps = ("--steps", "3", "--width", "32", "--samples", "32", "--output", str(tmp_path / "out"))
    launcher = Launcher(
        RunOptions(
            script=str(tmp_path / "script.py"),
            args=steps,
            replicas=1,
            ranks_per_replica=2 if name.endswith("fsdp2") else 1,
        ),
        on_line=lambda replica, rank, line: lines.append(line),
        on_log=lines.append,
    )
    assert asyncio.run(asyncio.wait_for(launcher.run(), DEADLINE)) == run.FINISHED, lines
    assert any(re.search("trained 3 steps", line) for line in lines), lines


def test_no_two_examples_write_to_the_same_folder_unless_told() -> None:
    """One that finds a checkpoint of another goes on from it, or cannot."""
    found = [
        (default.group(1), path.name)
        for path in sorted(EXAMPLES.glob("train_*.py"))
        for default in re.finditer(r'"--(?:output|checkpoints)", default="([^"]+)"', path.read_text())
    ]
    assert len(found) >= 4
    assert len({folder for folder, _ in found}) == len(found), found
