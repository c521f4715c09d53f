"""Lightning on replicas that may die and come back.

    from ftcomm.integrations.lightning import ReplicaStrategy

    trainer = Trainer(strategy=ReplicaStrategy(), devices=1, ...)     # in place of strategy="ddp", devices=4

    ftcomm run --replicas 4 train.py

Replicas of several ranks shard the model, by FSDP2 and tensor parallelism, with one line more in `configure_model`:

    trainer = Trainer(strategy=ReplicaModelParallelStrategy(...), devices=8, ...)      # of ModelParallelStrategy(...)
    fully_shard(layer, mesh=self.device_mesh["replica", "data_parallel"])              # of ["data_parallel"]

    ftcomm run --replicas 4 --ranks-per-replica 8 train.py

Each optimizer step is a step of ftcomm's step loop. What Lightning takes for the world is one replica (see
`ftcomm.integrations.replica`), so its own barriers, broadcasts and gathers cannot fail because another one is lost.
These things go between replicas:

    gradients                        DistributedDataParallel over the group of all replicas, or FSDP2 over the mesh
    the scale of the loss            with precision "16-mixed", to a replica that comes back; the same on all
    `self.log(..., sync_dist=True)`  the mean, or the sum, over those that contribute
    decisions of callbacks           those that Lightning reduces, such as that of EarlyStopping

Each replica trains on its share of the samples of an epoch, as a rank does with DDP; while it is away, its share is
left out. A replica that comes back goes on at the position of the others. Each validates on the whole set. The lowest
that contributes writes checkpoints and logs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, Timer, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.utilities import rank_zero
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ftcomm.errors import ArgumentError
from ftcomm.integrations.replica import StepExchange, join
from ftcomm.torch.mesh import init_device_mesh
from ftcomm.torch.own_world import across
from ftcomm.training import StepLoop
from ftcomm.training.rng import Rng


class ReplicaEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """The world that Lightning sees: the ranks of one replica, which something else has started."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0
    rank, size = 0, 1  # until the job is joined

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the world stays one replica."""

    def global_rank(self) -> int:
        return self.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, see `set_world_size`."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return 0


class _Replicas(ParallelStrategy):  # type: ignore[misc]
    """The common part of both strategies: a replica as the world, and steps between replicas."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cluster_environment: ReplicaEnvironment = ReplicaEnvironment()
        self._exchange: StepExchange | None = None
        self._loop: StepLoop | None = None
        self._stepping = False  # a step has begun whose update is not made

    # -- the world of Lightning ----------------------------------------------------------------------------------------

    def _join(self, *, several: bool = False) -> StepExchange:
        group = join(self._timeout, several=several)
        self.cluster_environment.rank, self.cluster_environment.size = group.shard, group.shards
        self._exchange = StepExchange(group)
        self._set_place()
        if self._exchange.joined_late:
            _read_no_checkpoint(self.lightning_module.trainer)
        return self._exchange

    def _set_place(self) -> None:
        group = self.exchange.group
        place = self.exchange.place * group.shards + group.shard
        rank_zero.rank_zero_only.rank = fabric_rank_zero.rank_zero_only.rank = place

    @property
    def exchange(self) -> StepExchange:
        assert self._exchange is not None, "Lightning sets up the environment first"
        return self._exchange

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the rank that writes checkpoints and logs: the first of the lowest replica."""
        return self._exchange is not None and self._exchange.place == 0 and self._exchange.group.shard == 0

    @property
    def root_device(self) -> torch.device:
        """The device of this rank: its index on this host tells which."""
        devices = self.parallel_devices
        assert devices
        if len(devices) == 1 and devices[0].type == "cuda":  # of devices=1, which is right for each replica by itself
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    def _part(self) -> tuple[int, int]:
        """Tells the sampler which part of the data of its replica this rank has, and of how many."""
        return 0, 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The share of this rank of the samples to train on, or of those that its replica validates on: all."""
        group, (part, parts) = self.exchange.group, self._part()
        if not self.lightning_module.trainer.training:
            return {"num_replicas": parts, "rank": part}
        return {"num_replicas": group.replicas * parts, "rank": group.replica * parts + part}

    # -- reductions ----------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas that contribute, where Lightning names no group."""
        if not isinstance(tensor, torch.Tensor) or group is not None:
            return super().reduce(tensor, group, reduce_op)
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in ("mean", "avg", "sum"):
            raise ArgumentError(f"reduce_op={reduce_op!r}; replicas reduce to the mean or the sum.")
        values = tensor.detach().double().reshape(-1).tolist()
        reduced = self.exchange.sums(values) if name == "sum" else self.exchange.means(values)
        dtype = tensor.dtype if name == "sum" or tensor.is_floating_point() else torch.float32
        here = torch.tensor(reduced, dtype=dtype, device=tensor.device).reshape(tensor.shape)
        return (
            here if self.exchange.group.shards == 1 else super().reduce(here, None, "sum" if name == "sum" else "mean")
        )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide to stop if any that contributes does. What all have to agree on, as the best checkpoint, each replica
        decides by itself: metrics are equal, and a replica that comes back may not ask."""
        said = torch.tensor(decision if all else self.exchange.largest([float(decision)])[0], device=self.root_device)
        if self.exchange.group.shards > 1:
            said = said.float()
            dist.all_reduce(said, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(said)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Come to the first step of the loop: that of a checkpoint, or of the job."""
        trainer = self.lightning_module.trainer
        _check(trainer, self)
        if trainer.enable_validation:  # its first use asks all for the length of the data
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        state: dict[str, Any] = {"model": self.lightning_module, "optimizer": self.optimizers[0]}
        for i, config in enumerate(trainer.lr_scheduler_configs):
            state[f"scheduler {i}"] = config.scheduler
        if (scaler := _scaler(self)) is not None:
            state["scaler"] = scaler
        state["rng"] = Rng(int(os.environ.get("PL_GLOBAL_SEED", "0")), self.exchange.group, part=self._part()[0])
        before = trainer.global_step
        self._loop = StepLoop(state, self.exchange.group, vote=False, start=before, initial_state="lowest")
        step = self._begin()
        if step is not None and step != before:
            _move(trainer, step)

    def _begin(self) -> int | None:
        assert self._loop is not None
        step = self.exchange.begin(self._loop, None)
        self._set_place()
        self._stepping = step is not None
        return step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin the step to which the batch belongs. Lightning ends the epoch at StopIteration: this replica leaves."""
        if not self._stepping and self._begin() is None:
            fit = self.lightning_module.trainer.fit_loop
            fit.min_epochs = fit.epoch_loop.min_steps = None
            self.lightning_module.trainer.should_stop = True
            raise StopIteration

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._stepping = False
        return output

    def on_train_end(self) -> None:
        """End the step loop."""
        if self._loop is not None:
            if self.exchange.stepping:
                assert self.exchange.begin(self._loop, self._loop.step + 1) is None
            self._loop.close()
            self._loop = None


class ReplicaStrategy(_Replicas, DDPStrategy):  # type: ignore[misc]
    """`DDPStrategy` between replicas of one rank, with the same options.

    Automatic optimization with one optimizer, and map-style data sets. Raises `ArgumentError` for others.
    """

    def setup_distributed(self) -> None:
        self._join()

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            model, device_ids=self.determine_ddp_device_ids(), process_group=across(), **self._ddp_kwargs
        )


class ReplicaModelParallelStrategy(_Replicas, ModelParallelStrategy):  # type: ignore[misc]
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) in each replica, with the same options; its two sizes are
    those of a replica.

    The module's `device_mesh` has the dimensions "replica", "data_parallel", "tensor_parallel". `configure_model` gives
    every parameter to `fully_shard(..., mesh=self.device_mesh["replica", "data_parallel"])`, or `ArgumentError` is
    raised. All ranks of the lowest replica write a checkpoint, as the option save_distributed_checkpoint says. Further
    as `ReplicaStrategy`.
    """

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        group = self._join(several=True).group
        data, tensor = self._data_parallel_size, self._tensor_parallel_size
        sizes: dict[str, int] = {"replica": group.replicas}
        sizes["data_parallel"] = self.num_nodes if data == "auto" else data
        sizes["tensor_parallel"] = group.shards // sizes["data_parallel"] if tensor == "auto" else tensor
        self._device_mesh = init_device_mesh(self.root_device.type, sizes, inner="nccl")
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.training:
            _check_mesh(self.lightning_module)

    def _part(self) -> tuple[int, int]:
        mesh = self.device_mesh["data_parallel"]
        return mesh.get_local_rank(), mesh.size()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients that are accumulated be reduced within the replica alone."""
        sharded = [each for each in self.model.modules() if isinstance(each, FSDPModule)]
        for each in sharded:
            each.set_requires_all_reduce(False, recurse=False)
        yield
        for each in sharded:
            each.set_requires_all_reduce(True, recurse=False)

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Let the ranks of the lowest replica write it; the others wait for them in their next step."""
        if self.exchange.place == 0:
            super().save_checkpoint(*args, **options)


def _check(trainer: Trainer, strategy: _Replicas) -> None:
    """Refuse what would go past the step loop."""
    module = trainer.lightning_module
    if len(strategy.optimizers) != 1 or not module.automatic_optimization:
        raise ArgumentError(
            f"{type(module).__name__} has {len(strategy.optimizers)} optimizers, and automatic_optimization="
            f"{module.automatic_optimization}; replicas need one optimizer, which Lightning steps."
        )
    if _scaler(strategy) is not None and not isinstance(strategy, ReplicaStrategy):
        raise ArgumentError(
            f'{type(strategy).__name__} with the loss scaler of precision "16-mixed": the ranks of a replica would not '
            "agree on which steps it skips; use bf16."
        )
    if trainer.reload_dataloaders_every_n_epochs or any(isinstance(each, Timer) for each in trainer.callbacks):
        raise ArgumentError("reload_dataloaders_every_n_epochs, max_time and Timer: replicas would not do it together.")
    if any(isinstance(each, StochasticWeightAveraging | WeightAveraging) for each in trainer.callbacks):
        raise ArgumentError(
            "WeightAveraging, EMAWeightAveraging and StochasticWeightAveraging: a replica that comes back would have "
            "another average than the others. Average weights in a step loop of your own, where an AveragedModel may "
            "be an entry of `state` (docs/training.md)."
        )
    for loader in trainer.fit_loop._combined_loader.flattened:
        if getattr(loader, "batch_sampler", None) is None:
            raise ArgumentError(
                f"a {type(loader).__name__} without a batch sampler: a replica that comes back could not find its "
                "place in the data. Give a DataLoader of a map-style data set."
            )


def _scaler(strategy: _Replicas) -> torch.amp.GradScaler | None:
    """Returns the scaler of the loss, which Lightning makes for precision "16-mixed"."""
    return getattr(strategy.precision_plugin, "scaler", None)


def _check_mesh(module: torch.nn.Module) -> None:
    """Refuse parameters that replicas would train each for itself."""
    for name, each in module.named_parameters():
        names = (each.device_mesh.mesh_dim_names or ()) if isinstance(each, DTensor) else ()
        if each.requires_grad and "replica" not in names:
            raise ArgumentError(
                f"parameter {name} of {type(module).__name__} lies on the mesh {names}, so its gradient stays within "
                "the replica; in configure_model, call fully_shard(..., "
                'mesh=self.device_mesh["replica", "data_parallel"]).'
            )


def _read_no_checkpoint(trainer: Trainer) -> None:
    """Let a replica that joins a running job start from nothing: the others have all of a checkpoint, and newer."""
    trainer._checkpoint_connector.resume_start = lambda *_, **__: None


def _move(trainer: Trainer, step: int) -> None:
    """Put the loops of Lightning, which are about to begin, to `step` of the job."""
    fit, batches_a_step = trainer.fit_loop, trainer.accumulate_grad_batches
    loop = fit.epoch_loop
    epoch, done = divmod(step, math.ceil(trainer.num_training_batches / batches_a_step))
    batches = done * batches_a_step
    for tracker in (fit.epoch_progress.current, fit.epoch_progress.total):
        _set(tracker, epoch)
    _set(loop.automatic_optimization.optim_progress.optimizer.step.total, step)
    trainer.fit_loop.epoch_loop._batches_that_stepped = step - (batches > 0)  # which it counts up as it begins again
    for loader in trainer.fit_loop._combined_loader.flattened:
        sampler = loader.batch_sampler
        sampler.sampler = _Rest(sampler.sampler, batches * sampler.batch_size)
        sampler.sampler.set_epoch(epoch)
    iter(trainer.fit_loop._data_fetcher)  # which has fetched the first batches of the first epoch
    if batches:
        _set(loop.batch_progress.current, batches)
        loop.restarting = True  # or it sets its progress to 0


def _set(tracker: Any, count: int) -> None:
    for name in vars(tracker):
        setattr(tracker, name, count)


class _Rest:
    """A sampler without its first `skip` samples, the first time."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler, self._skip = sampler, skip

    def __iter__(self) -> Iterator[int]:
        skip, self._skip = self._skip, 0
        return itertools.islice(iter(self._sampler), skip, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
