"""A joiner that missed updates ends with the bits of those that did not, whatever the optimizer and the delay."""

from __future__ import annotations

import collections
import copy
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler as schedules
from torch.optim import swa_utils

from ftcomm.errors import StateError
from ftcomm.training.entries import as_entry
from ftcomm.training.loss_scalers import LossScalers
from ftcomm.training.replay import Replay
from ftcomm.training.spill import Limits
from ftcomm.training.state import allocate, digest, flatten

JOINED = 3  # the step at which the joiner comes in


def copied(state):
    """The state as it travels."""
    flat = flatten(state).on_host()
    arrived = allocate(flat.skeleton)
    for to, of in zip(arrived.views(), flat.views(), strict=True):
        to[:] = of
    return arrived


class Training:
    """A script: `step` is what every replica calls, with the gradients that the all-reduce gave to everybody."""

    def __init__(self, optimizer, scheduler=None, by_hand=False, decays=False, saves=False, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        self.optimizer = optimizer(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.by_hand, self.decays, self.saves = by_hand, decays, saves
        if scheduler is not None:
            self.state["scheduler"] = scheduler(self.optimizer)

    def step(self, step):
        generator = torch.Generator().manual_seed(step)
        if self.by_hand:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.1 if step < JOINED - 1 else 0.01 * (1 + math.cos(step // 2))
        if self.decays:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
        for number, p in enumerate(self.model.parameters()):
            unused = number == 1 and step % 3 == 1
            grad = torch.randn(p.shape, generator=generator)
            if unused or p.grad is None:
                p.grad = None if unused else grad
            else:
                p.grad.copy_(grad)  # in place, as in buckets
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=step % 4 == 0)
        if "scheduler" in self.state:
            metric = torch.rand((), generator=generator).item()
            plateau = isinstance(self.state["scheduler"], schedules.ReduceLROnPlateau)
            self.state["scheduler"].step(*[metric] if plateau else [])
        if self.saves:  # after a validation: there are no gradients
            self.optimizer.zero_grad()
            get_optimizer_state_dict(self.model, self.optimizer)


def catch_up(make, arrives, end, least=2):
    """Everybody trains `end` steps; the joiner's state arrives before step `arrives`. Returns both trainings."""
    healthy, joiner = make(seed=0), make(seed=1)
    for step in range(JOINED):
        healthy.step(step)
    snapshot = copied(healthy.state)
    replay = Replay(joiner.state)
    replay.take(snapshot.skeleton)
    if not replay.possible:  # it waits
        arrives = JOINED
    loaded = done = False
    for step in range(JOINED, end):
        if step >= arrives and not done:
            if not loaded:
                replay.load(snapshot)
                loaded = True
            replay.apply(least, 0.0)
            if replay.behind == 0:
                replay.restore()
                done = True
        if not done:
            replay.begin()
        healthy.step(step)
        joiner.step(step)
    assert done
    return healthy, joiner


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}
SCHEDULERS = {
    "none": None,
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 20),
    "multistep": lambda o: schedules.MultiStepLR(o, [2, 4, 5]),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one_cycle": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=30),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=4), schedules.ExponentialLR(o, 0.9)], milestones=[4]
    ),
}


@pytest.mark.parametrize("arrives", [JOINED, JOINED + 1, JOINED + 6], ids=["at_once", "next_step", "late"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_ends_with_the_same_bits(optimizer, arrives):
    healthy, joiner = catch_up(lambda seed: Training(OPTIMIZERS[optimizer], seed=seed), arrives, end=20)
    assert digest(healthy.state) == digest(joiner.state)


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
@pytest.mark.parametrize("arrives", [JOINED, JOINED + 6], ids=["at_once", "late"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_ends_with_the_same_bits(scheduler, arrives):
    make = lambda seed: Training(OPTIMIZERS["adamw"], SCHEDULERS[scheduler], seed=seed)  # noqa: E731
    healthy, joiner = catch_up(make, arrives, end=20)
    assert digest(healthy.state) == digest(joiner.state)


@pytest.mark.parametrize("arrives", range(JOINED, JOINED + 8))
def test_a_learning_rate_that_the_script_sets_itself(arrives):
    make = lambda seed: Training(OPTIMIZERS["adamw"], by_hand=True, seed=seed)  # noqa: E731
    healthy, joiner = catch_up(make, arrives, end=20)
    assert digest(healthy.state) == digest(joiner.state)


@pytest.mark.parametrize("arrives", [JOINED, JOINED + 6], ids=["at_once", "late"])
@pytest.mark.parametrize("scheduler", ["none", "multistep"])
def test_a_learning_rate_that_the_script_multiplies(scheduler, arrives):
    make = lambda seed: Training(OPTIMIZERS["adamw"], SCHEDULERS[scheduler], decays=True, seed=seed)  # noqa: E731
    healthy, joiner = catch_up(make, arrives, end=20)
    assert digest(healthy.state) == digest(joiner.state)


@pytest.mark.parametrize("arrives", [JOINED, JOINED + 6], ids=["at_once", "late"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "sgd"])
def test_a_checkpoint_of_torch_that_is_made_before_the_state_is_here(optimizer, arrives):
    """`torch.distributed.checkpoint` lets an optimizer without state step, by a learning rate of 0."""
    optimizers = {**OPTIMIZERS, "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)}
    make = lambda seed: Training(optimizers[optimizer], SCHEDULERS["lambda"], saves=True, seed=seed)  # noqa: E731
    healthy, joiner = catch_up(make, arrives, end=20)
    assert digest(healthy.state) == digest(joiner.state)
    assert type(joiner.optimizer.state) is type(healthy.optimizer.state)


class Averaging(Training):
    """A script that averages the weights after some steps, as it goes on and from the middle on."""

    def __init__(self, average, seed=0):
        super().__init__(OPTIMIZERS["adamw"], SCHEDULERS["cosine"], seed=seed)
        self.state["average"] = self.average = average(self.model)
        self.state["swalr"] = swa_utils.SWALR(self.optimizer, swa_lr=0.05, anneal_epochs=4)

    def step(self, step):
        super().step(step)
        if step != 5:
            self.average.update_parameters(self.model)
        if step > 4:
            self.state["swalr"].step()


AVERAGES = {
    "ema": lambda model: swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "swa": swa_utils.AveragedModel,
    "by_hand": lambda model: swa_utils.AveragedModel(model, avg_fn=lambda mean, new, n: mean + (new - mean) / (n + 2)),
}


@pytest.mark.parametrize("arrives", [JOINED, JOINED + 1, JOINED + 6], ids=["at_once", "next_step", "late"])
@pytest.mark.parametrize("average", AVERAGES)
def test_averages_of_weights_are_those_of_each_update(average, arrives):
    healthy, joiner = catch_up(functools.partial(Averaging, AVERAGES[average]), arrives, end=20)
    assert digest(healthy.state) == digest(joiner.state)
    assert "update_parameters" not in vars(joiner.average)


class Keeping(Training):
    """A script that keeps something else in the state, and changes it in each step."""

    def __init__(self, kept, seed=0):
        super().__init__(OPTIMIZERS["adamw"], seed=seed)
        with torch.no_grad():
            self.kept = kept(self.model)
        self.state["kept"] = as_entry("kept", self.kept)

    def step(self, step):
        super().step(step)
        if isinstance(self.kept, dict) and "steps" in self.kept:
            self.kept["steps"] += 1
            self.kept.setdefault("losses", []).append(step * 0.5)
            return
        means = self.kept if isinstance(self.kept, dict) else self.kept.state_dict()
        for name, value in self.model.state_dict().items():
            if isinstance(means[name], np.ndarray):
                means[name] += 0.1 * (value.numpy() - means[name])
            else:
                means[name].lerp_(value, 0.1)


KEPT = {
    "numbers": lambda model: {"steps": 0},
    "tensors": lambda model: {name: value.clone() for name, value in model.state_dict().items()},
    "arrays": lambda model: {name: value.numpy().copy() for name, value in model.state_dict().items()},
    "teacher": lambda model: copy.deepcopy(model).requires_grad_(False),
}


@pytest.mark.parametrize("arrives", [JOINED + 1, JOINED + 6], ids=["next_step", "late"])
@pytest.mark.parametrize("kept", KEPT)
def test_what_a_script_changes_by_itself(kept, arrives):
    """Plain values are taken over at once. For tensors, which come later, the joiner waits before its first step."""
    healthy, joiner = catch_up(functools.partial(Keeping, KEPT[kept]), arrives, end=20)
    assert digest(healthy.state) == digest(joiner.state)


def test_only_what_the_script_may_change_is_waited_for():
    class Settles(dict):
        state_dict = load_state_dict = settled = lambda self, *_: {"w": torch.ones(1)}

    training = Training(OPTIMIZERS["adamw"], SCHEDULERS["cosine"])
    weights = list(training.model.parameters())
    training.state |= {"alias": as_entry("alias", weights), "settles": Settles(), "plain": as_entry("plain", {"n": 1})}
    training.state |= {"loss": nn.MSELoss(), "average": swa_utils.AveragedModel(training.model)}
    replay = Replay(training.state)
    replay.take(copied(training.state).skeleton)
    assert replay.possible, replay.lacks
    replay.restore()


class Meddling(Training):
    """A script that does something else with its optimizer before step 5."""

    def __init__(self, meddle, lr, seed=0):
        super().__init__(lambda p: torch.optim.AdamW(p, lr=lr), seed=seed)
        self.meddle = meddle

    def step(self, step):
        if step == 5:
            self.meddle(self.optimizer)
        super().step(step)


def _merge(optimizer):
    group = optimizer.param_groups[0]
    group |= {"weight_decay": 0.5}
    group.setdefault("own", 3)
    group.setdefault("eps", 1.0)
    group.pop("own")
    group["own"] = 4
    del group["own"]


@pytest.mark.parametrize("arrives", [JOINED + 1, JOINED + 6], ids=["next_step", "late"])
def test_every_way_to_write_a_setting_is_kept(arrives):
    healthy, joiner = catch_up(functools.partial(Meddling, _merge, 0.1), arrives, end=20)
    assert digest(healthy.state) == digest(joiner.state)


def _replace_groups(optimizer):
    optimizer.param_groups = [dict(group, lr=0.01) for group in optimizer.param_groups]


MEDDLING = {
    "calls load_state_dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "calls add_param_group": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "replaces the param_groups": _replace_groups,
    "clears the state": lambda optimizer: optimizer.state.clear(),
    "replaces the state": lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
    "changes a tensor": lambda optimizer: optimizer.param_groups[0]["lr"].fill_(0.2),
}


@pytest.mark.parametrize("what", MEDDLING)
def test_what_cannot_be_kept_is_an_error(what):
    make = functools.partial(Meddling, MEDDLING[what], torch.tensor(0.1))
    with pytest.raises(StateError, match=f"The script {what}"):
        catch_up(make, arrives=JOINED + 6, end=20)


class Clipping(Training):
    """A script that clips the weights: in each step by itself, in a hook of the optimizer, or for a validation only."""

    def __init__(self, how, seed=0):
        super().__init__(OPTIMIZERS["adamw"], seed=seed)
        self.how = how
        if how == "hook":
            self.optimizer.register_step_post_hook(lambda *_: self.clip())

    def clip(self):
        for p in self.model.parameters():
            p.data.clamp_(-0.1, 0.1)

    def step(self, step):
        super().step(step)
        before = [p.detach().clone() for p in self.model.parameters()]
        if self.how != "hook":
            self.clip()
        if self.how == "validates":
            for p, value in zip(self.model.parameters(), before, strict=True):
                p.data.copy_(value)


@pytest.mark.parametrize("arrives", [JOINED + 1, JOINED + 6], ids=["next_step", "late"])
def test_weights_that_the_script_changes(arrives):
    for how in ("hook", "validates"):
        healthy, joiner = catch_up(functools.partial(Clipping, how), arrives, end=20)
        assert digest(healthy.state) == digest(joiner.state)
    with pytest.raises(StateError, match=r"changes parameters \(model\.0\.weight\) by itself"):
        catch_up(functools.partial(Clipping, "itself"), arrives, end=20)


@pytest.mark.parametrize("end", [JOINED + 1, JOINED + 5])
def test_the_job_ends_before_the_state_arrives(end):
    healthy, joiner = Training(OPTIMIZERS["adamw"]), Training(OPTIMIZERS["adamw"], seed=1)
    for step in range(JOINED):
        healthy.step(step)
    snapshot, replay = copied(healthy.state), Replay(joiner.state)
    for step in range(JOINED, end):
        replay.begin()
        healthy.step(step)
        joiner.step(step)
    replay.load(snapshot)
    replay.apply(replay.behind, 0.0)
    replay.restore()
    assert digest(healthy.state) == digest(joiner.state)


def test_nothing_of_the_stand_ins_remains():
    training = Training(OPTIMIZERS["adamw"], SCHEDULERS["cosine"])
    plain = Training(OPTIMIZERS["adamw"])
    patched_by_scheduler = training.optimizer.step
    for subject in (training, plain):
        replay = Replay(subject.state)
        assert "step" in vars(subject.optimizer)
        replay.restore()
        replay.restore()
        assert all(type(group) is dict for group in subject.optimizer.param_groups)
    assert training.optimizer.step is patched_by_scheduler
    assert not {"load_state_dict", "add_param_group"} & vars(training.optimizer).keys()
    assert type(training.state["scheduler"]) is schedules.CosineAnnealingLR
    assert "step" not in vars(plain.optimizer)
    assert "step" not in vars(training.state["scheduler"])


def test_a_joiner_changes_nothing_while_it_waits():
    joiner = Training(OPTIMIZERS["adamw"], SCHEDULERS["cosine"])
    before = digest({"model": joiner.model, "optimizer": joiner.optimizer})
    replay = Replay(joiner.state)
    for step in range(3):
        replay.begin()
        joiner.step(step)
    assert replay.behind == 3
    assert digest({"model": joiner.model, "optimizer": joiner.optimizer}) == before
    replay.restore()


def test_kept_gradients_have_a_limit():
    joiner = Training(OPTIMIZERS["adamw"])
    each = sum(p.numel() * 4 for p in joiner.model.parameters())
    replay = Replay(joiner.state, Limits(memory=each, disk=each))
    for step in (0, 2):  # steps without an unused parameter
        replay.begin()
        joiner.step(step)
    replay.begin()
    with pytest.raises(StateError, match=r"gradients kept until.*FTCOMM_CATCHUP_BYTES"):
        joiner.step(3)
    replay.restore()


def test_the_limit_counts_what_is_still_kept():
    healthy, joiner = Training(OPTIMIZERS["adamw"]), Training(OPTIMIZERS["adamw"], seed=1)
    each = sum(p.numel() * 4 for p in joiner.model.parameters())
    replay = Replay(joiner.state, Limits(memory=each, disk=each))
    replay.begin()
    joiner.step(0)
    replay.load(copied(healthy.state))
    for step in (2, 3, 5, 6):
        replay.apply(1, 0.0)
        replay.begin()
        joiner.step(step)
    replay.restore()


def test_gradients_stay_where_they_are():
    """Replaying puts the gradients of old steps into the parameters and takes them out again: buckets hold views."""
    training = Training(OPTIMIZERS["sgd_momentum"])
    replay = Replay(training.state)
    replay.begin()
    training.step(0)
    views = []
    for p in training.model.parameters():
        p.grad = torch.zeros_like(p)
        views.append(p.grad)
    replay.apply(1, 0.0)
    replay.restore()
    assert all(p.grad is view for p, view in zip(training.model.parameters(), views, strict=True))
    assert all(view.count_nonzero() == 0 for view in views)


def test_a_closure_is_evaluated_once():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replay = Replay({"model": model, "optimizer": optimizer})
    replay.begin()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    before = model.weight.clone()
    assert optimizer.step(closure).item() == model(torch.ones(1, 2)).item()
    replay.apply(1, 0.0)
    replay.restore()
    assert torch.equal(model.weight, before - 0.1)


def test_an_optimizer_that_cannot_be_replayed_is_refused():
    model = nn.Linear(2, 1)
    with pytest.raises(StateError, match="LBFGS"):
        Replay({"optimizer": torch.optim.LBFGS(model.parameters())})


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_of_the_loss_that_the_joiner_does_not_know_is_taken_over(fused):
    """Also with a fused optimizer, which unscales by itself. A step that overflows is passed over by all."""

    def make(scale, seed):
        training = Training(functools.partial(torch.optim.AdamW, lr=0.05, fused=fused), seed=seed)
        training.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        return training

    def scaled_step(training, grad):
        scaler = training.state["scaler"]
        scaler.scale(torch.zeros(()))
        for p in training.model.parameters():
            p.grad = torch.full_like(p, grad)
        scaler.step(training.optimizer)
        scaler.update()

    healthy, joiner = make(4.0, 0), make(64.0, 1)
    scaled_step(healthy, 4.0)
    scalers, replay, snapshot = LossScalers(joiner.state), Replay(joiner.state), copied(healthy.state)
    scalers.take(snapshot.skeleton)
    for grad in (2.0, math.inf, 3.0, 5.0, 7.0):
        replay.begin()
        reduced = grad * healthy.state["scaler"].get_scale()
        scaled_step(healthy, reduced)
        scaled_step(joiner, reduced)
    with scalers.kept():
        replay.load(snapshot)
    replay.apply(replay.behind, 0.0)
    replay.restore()
    assert healthy.state["scaler"].get_scale() != 4.0
    assert digest(healthy.state) == digest(joiner.state)
