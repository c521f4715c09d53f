"""Accelerate on replicas that may die and come back: a loop of your own, with `accelerate.Accelerator`.

    from ftcomm.integrations.accelerate import Accelerator    # in place of that of accelerate

    for epoch in accelerator.epochs(3):                       # in place of range(3)
        for batch in loader:
            with accelerator.accumulate(model):
                ...

    ftcomm run --replicas 4 train.py

Each optimizer step is a step of ftcomm's step loop: it begins as the training loader gives the first batch of it. What
Accelerate takes for the world is one replica (see `ftcomm.integrations.replica`), so what a script gathers, reduces or
waits for cannot fail because another one is lost, and may stand under a condition. These things go between replicas:

    gradients              DistributedDataParallel over the group of all replicas
    the scale of the loss  with mixed_precision="fp16", to a replica that comes back; the same on all
    the place in the data  to a replica that comes back, with which `epochs` and the training loader go on

A loader that shuffles is trained on: each replica gets its share of the batches of an epoch, as a rank does with DDP;
while it is away, its share is left out. Other loaders give all of their data to each. The lowest replica that
contributes is the main process.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, DistributedType
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, SequentialSampler

from ftcomm.errors import ArgumentError
from ftcomm.integrations.replica import StepExchange, join
from ftcomm.process import ending
from ftcomm.torch.own_world import across
from ftcomm.training import StepLoop
from ftcomm.training.rng import Rng

_PLACE = "ftcomm.json"  # in a checkpoint
_UNSHARED = "a replica of one rank has nothing to share out; see docs/training.md for HSDP"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator`, whose optimizer steps are steps of a job; one in a process. It takes the same
    arguments; making it joins the job, and blocks like `ftcomm.init`. Not thread-safe.

    Raises `ArgumentError` for arguments that do not work with replicas, and `InitError` like
    `ftcomm.integrations.replica.join`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        given = inspect.signature(accelerate.Accelerator).bind(*args, **options).arguments
        _check_arguments(given)
        config = given["dataloader_config"] = given.get("dataloader_config") or DataLoaderConfiguration()
        config.dispatch_batches = False  # which would send them through the world
        config.use_seedable_sampler = True  # all replicas shuffle alike
        config.data_seed = config.data_seed or 0
        self.exchange = StepExchange(join())
        be_alone(cpu=given.get("cpu", False))
        super().__init__(**given)
        _check_state(self)
        self._loop: StepLoop | None = None
        self._completed = 0  # steps
        self._stepped = False  # an optimizer has, in this step, or was left out by the scaler of the loss
        self._begun = False  # a step has begun before its batch was fetched
        self._partial = False  # the last batch was one of several of its step
        self._first = self._next = (0, 0)  # epoch and batch that this step begins with, and that is fetched next
        self._tracked: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the arguments of `init_trackers`
        self._take_place()
        _end_at_exit(self)

    # -- the world of Accelerate ---------------------------------------------------------------------------------------

    @property
    def completed_steps(self) -> int:
        """The optimizer steps that the job has done, in whichever replica: what a script that counts its own has to
        count with. Does not block."""
        return self._completed + self._stepped

    @property
    def drained(self) -> bool:
        """Whether this replica has left the job before the end; training loaders are at their end then, and so is
        `epochs`."""
        return bool(self.exchange.group.drained)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        """Prepare a model, see accelerate: for training, with DistributedDataParallel between the replicas."""
        evaluates = inspect.signature(super().prepare_model).bind(model, *args, **options).arguments
        prepared: torch.nn.Module = super().prepare_model(model, *args, **options)
        trains = any(each.requires_grad for each in prepared.parameters())
        if isinstance(prepared, DistributedDataParallel) or not trains or evaluates.get("evaluation_mode"):
            return prepared
        devices = [self.device.index] if self.device.type == "cuda" else None
        settings = {} if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        parallel = DistributedDataParallel(prepared, device_ids=devices, process_group=across(), **settings)
        parallel._is_accelerate_prepared = True  # or another `prepare` would begin anew
        return parallel

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        """Prepare an optimizer, see accelerate. It raises `ArgumentError` if it steps outside of `epochs`."""
        prepared = super().prepare_optimizer(optimizer, *args, **options)

        def note(*_: Any) -> None:
            self._stepped = self.exchange.stepping

        prepared.optimizer.register_step_pre_hook(lambda *_: self._may_step())
        prepared.optimizer.register_step_post_hook(note)
        return through_gates(prepared, skipped=note)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Prepare a loader, see accelerate: one that shuffles as that of this replica's share."""
        if isinstance(data_loader, TrainingLoader) or not _shuffles(data_loader):
            return super().prepare_data_loader(data_loader, *args, **options)
        group = self.exchange.group
        with seen_as(group.replica, group.replicas):
            return TrainingLoader(self, super().prepare_data_loader(data_loader, *args, **options))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches of a loader that is not trained on, see accelerate."""
        if isinstance(dataloader, TrainingLoader):
            raise ArgumentError(
                "skip_first_batches of a loader that is trained on: leave it out. After load_state, epochs() and the "
                "loader go on where the checkpoint was written."
            )
        return super().skip_first_batches(dataloader, num_batches)

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which gradients are not reduced, see accelerate. The step goes on with the next batch."""
        self._partial = True
        with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            yield

    # -- steps ---------------------------------------------------------------------------------------------------------

    def epochs(self, epochs: int) -> Iterator[int]:
        """Yield the epochs that are still to do, up to `epochs` - 1. A replica that comes back begins with the epoch of
        the others; after `load_state` the first is that of the checkpoint. Blocks at the first until the job takes this
        replica in, and at the end while another one fetches its state from here.

        After a `break` out of it, `end_training`, or the end of the script, ends the training.
        """
        if self._loop is not None:
            raise ArgumentError("accelerator.epochs() inside of another one, or after a `break` out of it; have one.")
        if self._next[0] >= epochs:
            return
        self._start()
        while self.exchange.stepping and self._next[0] < epochs:
            epoch = self._next[0]
            yield epoch
            if self.exchange.stepping and self._next[0] == epoch:
                self._next = (epoch + 1, 0)
        self._finish()

    def end_training(self) -> None:
        """End the training, see accelerate, and the step loop: the others end it, too."""
        self._finish()
        super().end_training()

    def _start(self) -> None:
        state: dict[str, Any] = {}
        for name, objects in (
            ("model", [self.unwrap_model(each, keep_torch_compile=False) for each in self._models]),
            ("optimizer", [each.optimizer for each in self._optimizers]),
            ("scheduler", [each.scheduler for each in self._schedulers]),
            ("registered", self._custom_objects),
        ):
            state.update({f"{name} {i}": each for i, each in enumerate(objects)})
        if self.scaler is not None:
            state["scaler"] = self.scaler
        if not self._optimizers:
            raise ArgumentError("epochs() without an optimizer: first call accelerator.prepare(model, optimizer, ...).")
        state["rng"] = Rng(self.dataloader_config.data_seed, self.exchange.group)
        self._loop = StepLoop(state, self.exchange.group, vote=False, start=self._completed, initial_state="lowest")
        self._begun = self._begin()

    def _begin(self) -> bool:
        """Begin the next step; False if this replica has left the job, or comes to a loop that is over."""
        exchange = self.exchange
        assert self._loop is not None
        step = exchange.begin(self._loop, None)
        self._take_place()
        self._completed, self._stepped = self._loop.step, False
        if step is None:
            return False
        if exchange.newcomers or exchange.waits_for_state:
            self._tell()
        return True

    def _tell(self) -> None:
        """Let those that come back have the place in the data."""
        said = self.exchange.told(self._position(), of_old=True)
        if not self.exchange.contributes or self.exchange.group.replica in self.exchange.newcomers:
            self._move(said)

    def _position(self) -> dict[str, int]:
        epoch, batch = self._next if self._stepped else self._first
        return {
            "completed_steps": self.completed_steps,
            "epoch": epoch,
            "batch": batch,
            "accumulated": 0 if self._partial else self.step,
            "saves": self.save_iteration,
        }

    def _move(self, said: dict[str, int]) -> None:
        self._first = self._next = (said["epoch"], said["batch"])
        self.step = said["accumulated"]
        self.project_configuration.iteration = said["saves"]

    def _finish(self) -> None:
        """End the step loop, and give their state to those that still catch up; idempotent."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if self.exchange.stepping:
            self.exchange.begin(loop, loop.step + 1)
            self._completed, self._stepped = loop.step, False
        loop.close()

    def _may_step(self) -> None:
        if self.exchange.stepping and not self._begun:
            return
        if self._loop is None:
            raise ArgumentError(
                "an optimizer steps outside of accelerator.epochs(): write `for epoch in accelerator.epochs(n):` in "
                "place of `for epoch in range(n):`, and have it step only in there."
            )
        if self._begun:
            raise ArgumentError(
                "an optimizer steps without a batch of a loader that is trained on, which is one that shuffles: give "
                "the DataLoader of a map-style data set shuffle=True, or a sampler, and pass it to accelerator.prepare."
            )

    # -- data ----------------------------------------------------------------------------------------------------------

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of this replica's share of an epoch, from its place on. The training loader calls this."""
        if self._loop is None or not any(each.training for each in self._models):
            yield from loader  # before the training, or to evaluate
            return
        epoch, first = self._next
        loader.set_epoch(epoch)
        for batch in accelerate.skip_first_batches(loader, first) if first else loader:
            if not self._comes_to_step():
                return
            self._next = (epoch, self._next[1] + 1)
            yield batch
        self._next = (epoch + 1, 0)

    def _comes_to_step(self) -> bool:
        """Begin the step to which the next batch belongs, unless it has begun; False if there is none."""
        begun, self._begun = self._begun, False
        goes_on = self.exchange.stepping and (begun or self._partial or not self.sync_gradients)
        self._partial = False
        if goes_on:
            return True
        if not self.exchange.stepping:
            return False
        self._first = self._next
        return self._begin()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Save the state, see accelerate, and the place in the data; in the lowest replica that contributes alone. The
        others wait for it in their next step."""
        if not self.is_main_process:
            self.project_configuration.iteration += 1
            return None
        position = self._position()
        folder = super().save_state(output_dir, *args, **options)
        Path(folder, _PLACE).write_text(json.dumps(position))
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Load a state, see accelerate, before `epochs`, which goes on there. A replica that joins a running job loads
        nothing: it gets the state of the others."""
        if self.exchange.group.internals.outside:
            return
        if self._loop is not None:
            raise ArgumentError("load_state inside of accelerator.epochs(): call it before.")
        super().load_state(input_dir, *args, **options)
        place = Path(self._folder(input_dir), _PLACE)
        if place.exists():
            said = json.loads(place.read_text())
            self._completed = said["completed_steps"]
            self._move(said)

    def _folder(self, input_dir: str | None) -> Path:
        """The folder that accelerate takes for `input_dir`."""
        if input_dir is not None:
            return Path(input_dir).expanduser()
        found = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
        return max(found, key=lambda each: int(each.name.rpartition("_")[2]))

    # -- logs ----------------------------------------------------------------------------------------------------------

    def init_trackers(self, *args: Any, **options: Any) -> None:
        """Initialize trackers, see accelerate: in the lowest replica that contributes. When another one becomes that,
        it initializes them with the same arguments, and a replica that is it no more finishes its own."""
        self._tracked = args, options
        if self.is_main_process:
            super().init_trackers(*args, **options)

    def _take_place(self) -> None:
        was = self.is_main_process
        set_place(self.exchange.place)
        if was == self.is_main_process or self._tracked is None:
            return
        if was:  # accelerate takes every world of one for a main process, so what it would log there has to go
            for tracker in self.trackers:
                tracker.finish()
            self.trackers.clear()
        else:
            args, options = self._tracked
            super().init_trackers(*args, **options)

    def log(self, values: dict[str, Any], step: int | None = None, *args: Any, **options: Any) -> None:
        """Log, see accelerate, also to the event log of the job."""
        super().log(values, step, *args, **options)
        if self.exchange.place == 0 and self.exchange.stepping:
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            numbers["step"] = self.completed_steps if step is None else step
            self.exchange.group.report(**numbers)


class TrainingLoader:
    """A prepared loader that is trained on: it gives the batches that the job has not trained on yet."""

    def __init__(self, accelerator: Accelerator, loader: Any) -> None:
        self._accelerator, self._loader = accelerator, loader

    def __iter__(self) -> Iterator[Any]:
        return self._accelerator.batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


def _shuffles(loader: Any) -> bool:
    """Whether a loader has an order of its own: it shuffles, or has a sampler of the script."""
    own = getattr(loader, "batch_sampler", None)
    if own is None:  # iterable, or without batches
        return False
    return type(own) is not BatchSampler or not isinstance(loader.sampler, SequentialSampler)


def _check_arguments(given: dict[str, Any]) -> None:
    """Refuse what would go past the step loop."""
    config = given.get("dataloader_config")
    refused = {
        "mixed_precision": str(given.get("mixed_precision")) == "fp8"
        and "its scaling factors are a state that replicas would have to share; use bf16 or fp16",
        **{
            name: given.get(name) is not None and _UNSHARED
            for name in ("fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "parallelism_config")
        },
        **{
            name: given.get(name) is not None and "its optimizer is not torch's; leave it out"
            for name in ("deepspeed_plugin", "deepspeed_plugins")
        },
        "dataloader_config": config is not None
        and (config.dispatch_batches or not config.even_batches or config.use_stateful_dataloader)
        and "leave dispatch_batches, even_batches and use_stateful_dataloader as they are by default: all replicas "
        "have to come to the end of an epoch in the same step",
    }
    for name, why in refused.items():
        if why:
            raise ArgumentError(f"Accelerator({name}={given[name]!r}) with replicas: {why}.")


def _check_state(accelerator: Accelerator) -> None:
    """Refuse what would go past the replicas, and what comes from the environment."""
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    if hook != DDPCommunicationHookType.NO:
        raise ArgumentError(
            f"DistributedDataParallelKwargs(comm_hook={hook}) would reduce in the world, which is this replica. Leave "
            "it out, and give the prepared model ftcomm.torch.compression_hook."
        )
    if accelerator.distributed_type != DistributedType.NO or accelerator.mixed_precision == "fp8":
        raise ArgumentError(
            f"the environment (ACCELERATE_...) asks for {accelerator.distributed_type}, mixed precision "
            f"{accelerator.mixed_precision}; replicas have one rank each, and the precision is no, bf16 or fp16. Start "
            "the script with `ftcomm run`, not `accelerate launch`."
        )


def _end_at_exit(accelerator: Accelerator) -> None:
    """End the training with the script, if that ends well."""

    def end() -> None:
        if not ending.failure():
            accelerator._finish()

    atexit.register(end)


# -- optimizers that a scaler of the loss steps, also for transformers -------------------------------------------------


class _ScaledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A prepared optimizer that calls the `optimizer.step` of the moment, which is a gate of the step loop within a
    step. Accelerate's own calls that which was there when it was prepared."""

    skipped: Callable[[], None]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self._optimizer_original_step_method = self.optimizer.step
        self._optimizer_patched_step_method = patch_optimizer_step(self, self.optimizer.step)
        super().step(closure)
        if self.gradient_state.sync_gradients and self.step_was_skipped:
            self.skipped()


def through_gates(prepared: Any, skipped: Callable[[], None] = lambda: None) -> Any:
    """Let a prepared optimizer step through the gates of a step loop, also if a scaler of the loss steps it; `skipped`
    is called when that leaves a step out. Returns it."""
    if prepared.scaler is not None:
        prepared.__class__ = _ScaledOptimizer
        prepared.skipped = skipped
    return prepared


# -- the world as accelerate keeps it, also for transformers -----------------------------------------------------------


def be_alone(cpu: bool = False) -> None:
    """Let accelerate take the world of torch for one that is not distributed; otherwise it would wrap models."""
    PartialState(cpu=cpu)
    PartialState._shared_state["distributed_type"] = DistributedType.NO


@contextlib.contextmanager
def seen_as(index: int, count: int) -> Iterator[None]:
    """A context in which accelerate takes this process for that one of so many, as it cuts the data."""
    states = _states()
    before = [{name: state[name] for name in ("process_index", "num_processes")} for state in states]
    for state in states:
        state.update(process_index=index, num_processes=count)
    try:
        yield
    finally:
        for state, old in zip(states, before, strict=True):
            state.update(old)


def set_place(place: int) -> None:
    """Let accelerate, and who asks it or the arguments, know which process is the main one: that with place 0."""
    for state in _states():
        state["process_index"] = state["local_process_index"] = place


def _states() -> list[dict[str, Any]]:
    return [state for state in (PartialState._shared_state, AcceleratorState._shared_state) if state]
