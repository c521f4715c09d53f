"""Trainings whose ranks fail in the middle of steps, and what they write down of it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ftcomm
from ftcomm.torch.buckets import GradientBuckets
from ftcomm.training import Rng, StepDecision, StepLoop
from ftcomm.training.state import digest

from ..process.job import Notes
from .bodies import outlast, steps_until_told


class Passing(Exception):
    """An error that may pass."""


class Diary:
    """Writes down what the loop tells an entry of the state, and what a joiner is told late."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.attempts: dict[int, int] = {}
        self.settled_steps = 0  # those told of here, on top of those loaded: the same everywhere in the end

    def begins(self, step: int) -> None:
        self.attempts[step] = self.attempts.get(step, 0) + 1

    def settled(self, outcome: Any) -> None:
        self.settled_steps += outcome.decision is not StepDecision.REPEAT
        self._notes.write(
            kind="outcome", step=outcome.step, decision=outcome.decision.name, counted=sorted(outcome.counted)
        )

    def state_dict(self) -> dict[str, int]:
        return {"settled": self.settled_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.settled_steps = state["settled"]


def fault(arguments: dict[str, Any], group: ftcomm.Group, step: int, attempt: int) -> str:
    """Where this rank fails in this attempt, by the seed; "" mostly. Never twice in a row, so that a step ends."""
    if attempt > 1 or not group.contributes:
        return ""
    chance = random.Random(f"{arguments['seed']} {step} {group.replica} {group.shard}")
    return chance.choice(arguments["faults"]) if chance.random() < arguments["share"] else ""


def train(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    outlast(arguments.get("outlast", 0), Path(arguments["marks"]) / "go")
    torch.manual_seed(group.replica if not group.contributes else 0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1500), nn.GELU(), nn.Linear(1500, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    buckets = GradientBuckets(model, group, bucket_bytes=50_000)
    diary = Diary(notes)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "diary": diary, "rng": Rng(7, group)}
    loop = StepLoop(
        state,
        group,
        repeat_on=(Passing,),
        on_repeat=buckets.abandon,
        nan="skip",
        lr="sqrt",
        min_replicas=arguments.get("min_replicas", 0),
        pause_timeout=arguments.get("pause_timeout", 60.0),
    )
    for step in loop.steps(arguments["steps"]):
        where = fault(arguments, group, step, diary.attempts[step])
        if where:
            notes.write(kind="fault", where=where, step=step)
        with loop.guard():
            if where == "start":
                raise Passing(where)
            generator = torch.Generator().manual_seed(1000 * step + group.replica)
            out = model(torch.randn(2, 16, generator=generator))
            if where == "backward":
                out.register_hook(lambda grad: None)
                model[0].weight.register_hook(_raises_once())
            loss = out.square().mean()
            (loss * float("nan") if where == "nan" else loss).backward()
            buckets.wait()
            if where == "end":
                raise Passing(where)
            optimizer.step()
            scheduler.step()
            buckets.zero_grad()
        decision = loop.decision()
        # of the state after a step that counts, on those whose state it is
        wanted = decision is StepDecision.COMMIT and group.contributes
        notes.write(kind="step", step=step, digest=digest(weights(state)) if wanted else "", scale=loop.lr_scale)
        time.sleep(arguments.get("pace", 0.0))
    notes.write(kind="final", digest=digest(state), contributes=group.contributes, steps=loop.step)
    notes.write(kind="metrics", effective=loop.metrics().effective, **vars(loop.metrics()))


def weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("model", "optimizer", "scheduler")}


def _raises_once() -> Any:
    left = [True]

    def hook(grad: torch.Tensor) -> None:
        if left:
            left.clear()
            raise Passing("backward")

    return hook


def begin_and_commit(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """The loop by hand, without an optimizer in the state: an update that the script makes itself."""
    model = nn.Linear(300, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(group.replica if not group.contributes else 0.5)
    loop = StepLoop({"model": model}, group, nan=lambda step: StepDecision.REPEAT)
    tried: set[int] = set()
    for step in steps_until_told(group, arguments, {}, loop):
        x = model.weight.detach().sin().add(step)
        group.allreduce(x, "avg")
        bad = step % 5 == group.replica and step not in tried
        tried.add(step)
        if loop.commit(float("nan") if bad else 0.0):
            with torch.no_grad():
                model.weight.sub_(0.01 * x)
        notes.write(kind="step", step=step, digest=digest({"model": model}), decision=loop.decision().name)
        time.sleep(arguments.get("pace", 0.0))
    notes.write(kind="final", digest=digest({"model": model}), contributes=group.contributes)


def never_finite(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """One replica has a NaN at step 3, under the policy that is asked for."""
    for step in (loop := StepLoop(None, group, nan=arguments["nan"])).steps(6):
        x = torch.ones(3)
        group.allreduce(x)
        loop.commit(float("nan") if step == 3 and group.replica == 1 else 1.0)
        notes.write(kind="step", step=step, decision=loop.decision().name)


def different(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Replica 1 has been started otherwise."""
    model = nn.Linear(4, 4)
    odd = group.replica == 1
    optimizers = {
        "optimizer": (torch.optim.SGD if odd else torch.optim.AdamW)(model.parameters(), lr=0.1),
        "rate": torch.optim.AdamW(model.parameters(), lr=0.2 if odd else 0.1),
        "model": torch.optim.AdamW(model.parameters(), lr=0.1),
        "same": torch.optim.AdamW(model.parameters(), lr=0.1),
    }
    if odd and arguments["what"] == "model":
        model = nn.Linear(4, 5)
    state = {"model": model, "optimizer": optimizers[arguments["what"]]}
    for _ in StepLoop(state, group).steps(3):
        group.allreduce(torch.ones(3))
    notes.write(kind="final")
