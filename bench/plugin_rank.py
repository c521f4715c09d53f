"""One rank of `ftcomm bench plug-ins`: a tiny training by a library, plain or with ftcomm's integration.

Both have the same model, data and optimizer. The model itself looks at the processor's time, in its forward, of which a
step has one; so libraries need no hooks. A training of JAX, which has no such model, tells it of each step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ftcomm.bench.job import WAIT_TIMEOUT, Records
from ftcomm.errors import FtcommError

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
        self.look()
        if self.steps == WARM:
            self.world = dist.group.WORLD
        return {"loss": self.layer(x).square().mean()}

    def look(self) -> None:
        """Look at the time, once a step."""
        self.steps += 1
        self.last = time.process_time()
        if self.steps == WARM:
            self.began = self.last

    def took(self) -> float:
        return 1e6 * (self.last - self.began) / (self.steps - WARM)


def train(task: PluginTask) -> None:
    """Train, and write down what a step took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tiny()
    TRAINERS[task.trainer].train(task, model)
    Records(task.folder, int(os.environ["RANK"])).write(Took(model.took()))


def _steps(task: PluginTask, model: Tiny) -> None:
    dist.init_process_group("ftcomm" if task.plugin else "gloo")
    _step(task, model, DistributedDataParallel(model))
    dist.destroy_process_group()


def _step(task: PluginTask, model: Tiny, parallel: nn.Module) -> None:
    """Do the steps, of ftcomm's step loop or of none."""
    optimizer = torch.optim.AdamW(model.parameters())
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
    from ftcomm.integrations.lightning import ReplicaStrategy

    plain = {"strategy": "ddp", "devices": task.ranks}
    _fit(task, model, ({"strategy": ReplicaStrategy(), "devices": 1} if task.plugin else plain), lambda module: None)


def _lightning_fsdp2(task: PluginTask, model: Tiny) -> None:
    """Shards over all ranks, which are one replica, with the plug-in and without it."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from ftcomm.integrations.lightning import ReplicaModelParallelStrategy

    def shard(module: Any) -> None:
        if not isinstance(module.model, FSDPModule):
            mesh = module.device_mesh
            fully_shard(module.model, mesh=mesh["replica", "data_parallel"] if task.plugin else mesh["data_parallel"])

    sizes = {"data_parallel_size": task.ranks, "tensor_parallel_size": 1}
    strategy = (ReplicaModelParallelStrategy if task.plugin else ModelParallelStrategy)(**sizes)
    _fit(task, model, {"strategy": strategy, "devices": task.ranks}, shard)


def _fit(task: PluginTask, model: Tiny, options: dict[str, Any], configure: Callable[[Any], None]) -> None:
    """Train by Lightning."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_model(self) -> None:
            configure(self)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        **options,
        accelerator="cpu",
        max_steps=task.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Samples(), BATCH, shuffle=True))


def _jax(task: PluginTask, model: Tiny) -> None:
    """A compiled step, by JAX's own processes and collectives of CPUs, or by `ftcomm.jax`."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any) -> Any:
        return jnp.square(x @ weights).mean()

    if not task.plugin:
        rank = int(os.environ["RANK"])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(_meeting(task, rank), task.ranks, rank)
    weights, batch = jnp.ones((WIDTH, WIDTH)), jnp.ones((BATCH, WIDTH))
    if task.plugin:
        import ftcomm.jax

        ftcomm.init()

        @jax.jit
        def train(weights: Any, batch: Any) -> Any:
            return weights - 0.01 * ftcomm.jax.allreduce(jax.grad(loss)(weights, batch), "avg")

        kept = {"weights": weights}
        for _ in ftcomm.steps(task.steps, {"kept": kept}):
            kept["weights"] = train(kept["weights"], batch)
            kept["weights"].block_until_ready()
            model.look()
        ftcomm.shutdown()
        return
    mesh, everywhere = jax.make_mesh((task.ranks,), ("ranks",)), jax.sharding.PartitionSpec()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    def step(weights: Any, batch: Any) -> Any:
        return weights - 0.01 * jax.lax.pmean(jax.grad(loss)(weights, batch), "ranks")

    sharding = jax.sharding.NamedSharding(mesh, everywhere)
    weights, batch = jax.device_put(weights, sharding), jax.device_put(batch, sharding)
    for _ in range(task.steps):
        weights = step(weights, batch)
        weights.block_until_ready()
        model.look()
    jax.distributed.shutdown()


def _meeting(task: PluginTask, rank: int) -> str:
    """Returns where JAX's processes meet, which the first has chosen."""
    path, end = Path(task.folder) / "meeting", time.monotonic() + WAIT_TIMEOUT
    if rank == 0:
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            path.with_suffix(".new").write_text(f"127.0.0.1:{free.getsockname()[1]}")
        path.with_suffix(".new").rename(path)
    while not path.exists():
        if time.monotonic() > end:
            raise FtcommError(f"rank 0 has not said within {WAIT_TIMEOUT:.0f} s where to meet")
        time.sleep(0.05)
    return path.read_text()


def drive_ray(task: PluginTask) -> None:
    """Train by Ray, whose workers write down what a step took."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from ftcomm.integrations.ray import ReplicaConfig

    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    ray.init(num_cpus=task.ranks, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    TorchTrainer(
        _in_worker,
        train_loop_config={"task": msgspec.json.encode(task)},
        torch_config=ReplicaConfig() if task.plugin else TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=task.ranks),
        run_config=RunConfig(storage_path=task.folder),
    ).fit()
    ray.shutdown()


def _in_worker(config: dict[str, Any]) -> None:
    import ray.train

    os.environ["RANK"] = str(ray.train.get_context().get_world_rank())
    train(msgspec.json.decode(config["task"], type=PluginTask))


def _ray(task: PluginTask, model: Tiny) -> None:
    from ray.train.torch import prepare_model

    _step(task, model, prepare_model(model))


@dataclasses.dataclass(frozen=True)
class BenchTrainer:
    """A way to train by a `library`, as each rank. `driver` starts the ranks; None: the launcher, with or without the
    integration. In `one_replica` are all ranks that the integration has, otherwise each is one."""

    library: str
    train: Callable[[PluginTask, Tiny], None]
    driver: Callable[[PluginTask], None] | None = None
    one_replica: bool = False


TRAINERS = {
    "steps": BenchTrainer("torch", _steps),
    "transformers": BenchTrainer("transformers", _transformers),
    "accelerate": BenchTrainer("accelerate", _accelerate),
    "lightning": BenchTrainer("lightning", _lightning),
    "lightning-fsdp2": BenchTrainer("lightning", _lightning_fsdp2, one_replica=True),
    "jax": BenchTrainer("jax", _jax),
    "ray": BenchTrainer("ray", _ray, drive_ray),
}
