"""One rank of `ftcomm bench plug-ins`: a tiny training by a library, plain or with ftcomm's integration.

Both have the same model, data and optimizer. The model itself looks at the processor's time, in its forward, of which a
step has one; so libraries need no hooks.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ftcomm.bench.job import Records

WARM = 30  # steps before those that are timed
SAMPLES, BATCH, WIDTH = 4096, 4, 16


class PluginTask(msgspec.Struct, frozen=True):
    trainer: str
    plugin: bool
    steps: int
    ranks: int
    folder: str = ""


class Took(msgspec.Struct, frozen=True):
    """The time that a step took of the processor, in all threads of this rank, on average."""

    step_us: float


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), index / SAMPLES)}


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.steps, self.began, self.last = 0, 0.0, 0.0
        self.world: dist.ProcessGroup | None = None  # so that DDP is not the last to let it go: gloo's then never ends

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        self.last = time.process_time()
        if self.steps == WARM:
            self.began, self.world = self.last, dist.group.WORLD
        return {"loss": self.layer(x).square().mean()}

    def took(self) -> float:
        return 1e6 * (self.last - self.began) / (self.steps - WARM)


def train(task: PluginTask) -> None:
    """Train, and write down what a step took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tiny()
    TRAINERS[task.trainer](task, model)
    Records(task.folder, int(os.environ["RANK"])).write(Took(model.took()))


def _steps(task: PluginTask, model: Tiny) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    dist.init_process_group("ftcomm" if task.plugin else "gloo")
    parallel = DistributedDataParallel(model)
    batch = torch.ones(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        parallel(batch)["loss"].backward()
        optimizer.step()

    if task.plugin:
        from ftcomm.training import StepLoop

        for _ in StepLoop({"model": model, "optimizer": optimizer}).steps(task.steps):
            step()
    else:
        for _ in range(task.steps):
            step()
    dist.destroy_process_group()


def _transformers(task: PluginTask, model: Tiny) -> None:
    import transformers

    from ftcomm.integrations import transformers as ours

    library: Any = ours if task.plugin else transformers
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder,
            max_steps=task.steps,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            logging_steps=50,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        )
        library.Trainer(model=model, args=arguments, train_dataset=Samples()).train()


def _accelerate(task: PluginTask, model: Tiny) -> None:
    import accelerate

    from ftcomm.integrations import accelerate as ours

    accelerator = (ours if task.plugin else accelerate).Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Samples(), BATCH, shuffle=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    epochs = 1 + task.steps // (SAMPLES // BATCH // task.ranks)
    for _ in accelerator.epochs(epochs) if task.plugin else range(epochs):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if model.steps >= task.steps:
                break
        if model.steps >= task.steps:
            break
    accelerator.end_training()


def _lightning(task: PluginTask, model: Tiny) -> None:
    import lightning

    from ftcomm.integrations.lightning import ReplicaStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    plain = {"strategy": "ddp", "devices": task.ranks}
    trainer = lightning.Trainer(
        **({"strategy": ReplicaStrategy(), "devices": 1} if task.plugin else plain),
        accelerator="cpu",
        max_steps=task.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Samples(), BATCH, shuffle=True))


TRAINERS: dict[str, Callable[[PluginTask, Tiny], None]] = {
    "steps": _steps,
    "transformers": _transformers,
    "accelerate": _accelerate,
    "lightning": _lightning,
}
