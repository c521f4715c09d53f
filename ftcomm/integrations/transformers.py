"""Hugging Face's Trainer on replicas that may die and come back.

    from ftcomm.integrations.transformers import Trainer, TrainingArguments   # in place of those of transformers

    ftcomm run --replicas 4 train.py

Each optimizer step is a step of ftcomm's step loop. What the Trainer takes for the world is one replica (see
`ftcomm.integrations.replica`), so its own gathers, barriers and broadcasts cannot fail because another one is lost.
These things go between replicas:

    gradients                  DistributedDataParallel over the group of all replicas
    the scale of the loss      with `fp16`, to a replica that comes back; the same on all
    the number of labels       the mean over those that contribute, if `average_tokens_across_devices`
    logged losses, metrics     the means over those that contribute
    when to log, evaluate,     whatever any that contributes has decided, so that callbacks which look at the clock
    save or stop               end no job
    the state of the trainer   to a replica that comes back, when it contributes again

Each replica trains on its share of the samples of an epoch, as a rank does with DDP; while it is away, its share is
left out. A replica that comes back goes on at the position of the others. Each evaluates the whole evaluation set. The
lowest that contributes writes checkpoints and logs.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ftcomm.errors import ArgumentError, StateError
from ftcomm.integrations.accelerate import be_alone, seen_as, set_place, through_gates
from ftcomm.integrations.replica import StepExchange, join
from ftcomm.torch.own_world import across
from ftcomm.training import StepLoop
from ftcomm.training.rng import Rng

# What a replica that comes back takes over: plain values of TrainerState, besides those of callbacks.
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")
_FIELDS = (*_BEST, "log_history", "num_input_tokens_seen", "total_flos")
_DECISIONS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")


class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """The arguments of a Trainer; the first look at its devices joins the job."""

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        join()
        if getattr(self, "ddp_backend", None) == "ftcomm":  # between replicas it is so in any case
            self.ddp_backend: str | None = None
        device: torch.device = super()._setup_devices
        return device


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer`, whose optimizer steps are steps of a job.

    The arguments must be `TrainingArguments` of this module; or call `ftcomm.integrations.replica.join` before they are
    made. A trainer that derives from that of transformers becomes one of replicas so: `class Ours(Trainer, Theirs)`.
    Raises `ArgumentError` for arguments that do not work with replicas.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop: StepLoop | None = None
        self._begun = False  # the next step has begun before its batch was fetched
        self._moved = False  # the loop has begun at another step than the Trainer
        self._summed = 0  # steps whose loss is in _tr_loss
        self._total_loss_scalar = 0.0
        super().__init__(*args, **kwargs)

    # -- the world of the Trainer --------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        self.exchange = StepExchange(join())
        be_alone()
        if self.args.data_seed is None:  # all replicas shuffle alike
            self.args.data_seed = self.args.seed
        self.args.accelerator_config.dispatch_batches = False  # that would send them through the world
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_optimizer  # before a scheduler wraps the step of what that returns
        self.accelerator.prepare_optimizer = lambda *args, **kwargs: through_gates(prepare(*args, **kwargs))
        _check(self)

    def get_train_dataloader(self) -> Any:
        """Return the loader of this replica's share."""
        with seen_as(self.exchange.group.replica, self.exchange.group.replicas):
            return super().get_train_dataloader()

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model, loader = super()._prepare_for_training(*args, **kwargs)
        if not isinstance(model, DistributedDataParallel):
            handler = self.accelerator.ddp_handler
            options = {} if handler is None else handler.to_kwargs()
            devices = [torch.cuda.current_device()] if self.args.device.type == "cuda" else None
            model = DistributedDataParallel(model, device_ids=devices, process_group=across(), **options)
            self.model_wrapped = model
        # accelerate takes a world of one for a training without DDP
        self.accelerator.no_sync = lambda model: model.no_sync()
        return model, loader

    # -- steps ---------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, see `transformers.Trainer.train`. A replica that joins a running job reads no checkpoint."""
        if self.exchange.group.internals.outside:
            resume_from_checkpoint = None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if self._loop is not None:
                self._loop.close()
                self._loop = None

    def _run_epoch(self, *, epoch: int, num_update_steps_per_epoch: int, epochs_trained: int, **rest: Any) -> None:
        """Run an epoch from where the job is; nothing if that has it behind it."""
        if self._loop is None:
            self._start()
        first, steps = divmod(self.state.global_step, num_update_steps_per_epoch)
        if self.exchange.stepping and epoch < first:
            return
        if self._moved and epoch == first:
            rest["steps_trained_in_current_epoch"] = steps * self.args.gradient_accumulation_steps
            rest["resume_from_checkpoint"] = ""  # none, but skip the batches
            epochs_trained = epoch
        self._moved = False
        super()._run_epoch(
            epoch=epoch,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            epochs_trained=epochs_trained,
            **rest,
        )

    def _start(self) -> None:
        """Come to the first step of the loop: that of a checkpoint, or of the job."""
        state = {
            "model": self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False),
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),
            "scheduler": getattr(self.lr_scheduler, "scheduler", self.lr_scheduler),
            "rng": Rng(self.args.seed, self.exchange.group),
        }
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        before = self.state.global_step
        self._loop = StepLoop(state, self.exchange.group, vote=False, start=before, initial_state="lowest")
        self._begun = self._begin()
        self._moved = self.state.global_step != before
        if self._moved:
            self.args.ignore_data_skip = False
            self._initial_global_step = self._globalstep_last_logged = self.state.global_step

    def _begin(self) -> bool:
        """Begin the next step; False if this replica has left the job, or comes to a loop that is over."""
        exchange = self.exchange
        assert self._loop is not None
        step = exchange.begin(self._loop, self.state.max_steps)
        place = exchange.place
        set_place(place)
        self.state.is_world_process_zero = self.state.is_local_process_zero = place == 0
        if step is None:
            self.control.should_training_stop = True
            return False
        self.state.global_step = step
        if exchange.newcomers or exchange.waits_for_state:  # a replica that joins in this step knows of no newcomers
            self._tell()
            if exchange.group.replica in exchange.newcomers:  # what it has summed up came from weights of its own
                self._tr_loss.zero_()
                self._summed = 0
        self._summed += 1
        return True

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch the batches of the next step, and begin it."""
        samples = list(itertools.islice(epoch_iterator, num_batches))
        if not samples:
            return samples, None
        if not self._begun and not self._begin():
            return [], None
        self._begun = False
        return samples, self._get_num_items_in_batch(samples, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of labels of a replica on average, by which each divides the sum of its losses."""
        items = super()._get_num_items_in_batch(batch_samples, device)
        if items is None or not self.args.average_tokens_across_devices:
            return items
        (mean,) = self.exchange.means([float(items)])
        return torch.tensor(mean, dtype=torch.float32, device=device)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Do what the Trainer does after a step, or an epoch, and what all have agreed on."""
        exchange = self.exchange
        if not exchange.stepping:
            if exchange.group.drained and exchange.place == 0 and self.args.save_strategy != SaveStrategy.NO:
                self.control.should_log = self.control.should_evaluate = False
                self.control.should_save = True
                super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
            return
        self._agree()
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            total, steps = exchange.sums([tr_loss.item(), self._summed])
            since = self.state.global_step - self._globalstep_last_logged  # by which the Trainer divides
            tr_loss.fill_(total / max(steps, 1.0) * since)
            self._summed = 0
        more = self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if more:  # callbacks may have decided by the metrics, or on the checkpoint
            self._agree()

    def _agree(self) -> None:
        """Let what any replica that contributes has decided hold for all."""
        said = self.exchange.largest([float(getattr(self.control, name)) for name in _DECISIONS])
        for name, value in zip(_DECISIONS, said, strict=True):
            setattr(self.control, name, bool(value))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, also to the event log of the job."""
        super().log(logs, *args, **kwargs)
        if self.exchange.place == 0 and self.exchange.stepping:
            numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            self.exchange.group.report(**{**numbers, "step": self.state.global_step})

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all of the data set here; in a training, all replicas get the mean of each metric."""
        output = super().evaluation_loop(*args, **kwargs)
        if output.metrics is None or not self.exchange.stepping:
            return output
        return output._replace(metrics=self.exchange.mean_metrics(output.metrics))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Let the lowest replica that contributes write it; the others wait."""
        if self.exchange.place == 0:
            super()._save_checkpoint(model, trial)
        (best,) = self.exchange.largest([float(self.state.best_model_checkpoint is not None)])
        if best and self.state.best_global_step:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            self.state.best_model_checkpoint = os.path.join(self._get_output_dir(trial=trial), name)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: random numbers are a function of the step and the replica."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End the step loop, and give their state to those that still catch up."""
        exchange = self.exchange
        if self._loop is not None and exchange.stepping:
            if exchange.waits_for_state:
                self._tell(of_old=False)
            assert exchange.begin(self._loop, self._loop.step + 1) is None
        return super()._finalize_training(*args, **kwargs)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _tell(self, of_old: bool = True) -> None:
        """Let all have what callbacks and the Trainer have written down of the training."""
        stateful = [each for each in self.callback_handler.callbacks if isinstance(each, ExportableState)]
        mine = {name: getattr(self.state, name) for name in _FIELDS}
        mine["callbacks"] = [each.state()["attributes"] for each in stateful]
        mine["losses"] = float(self._total_loss_scalar)
        mine["since"] = self._initial_global_step
        said = self.exchange.told(mine, of_old=of_old)
        if self.exchange.contributes and self.exchange.group.replica not in self.exchange.newcomers:
            return
        if len(said["callbacks"]) != len(stateful):
            raise StateError(
                f"the Trainer has {len(stateful)} callbacks with a state, those of the other replicas have "
                f"{len(said['callbacks'])}; pass the same callbacks on each"
            )
        for name in _FIELDS:
            setattr(self.state, name, said[name])
        for each, attributes in zip(stateful, said["callbacks"], strict=True):
            vars(each).update(attributes)
        self._initial_global_step = said["since"]
        self._total_loss_scalar = float(said["losses"])


def _check(trainer: Any) -> None:
    """Refuse what would go past the step loop."""
    args = trainer.args
    refused = {
        "auto_find_batch_size": args.auto_find_batch_size and "replicas would find different sizes",
        "fsdp": args.fsdp and "a replica of one rank has nothing to shard; see docs/training.md for HSDP",
        "deepspeed": args.deepspeed and "its optimizer is not torch's",
    }
    for name, why in refused.items():
        if why:
            raise ArgumentError(f"TrainingArguments({name}={getattr(args, name)!r}) with replicas: {why}.")
