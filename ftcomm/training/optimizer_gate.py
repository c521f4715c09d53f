"""Optimizers and schedulers behind a gate: they step when a step is committed, and what must come before comes before.

A script calls `optimizer.step()` as ever. As long as the gates are in place, the first such call of a step takes the
vote; if that decides against the step, neither optimizers nor schedulers move (schedulers do where a step is skipped,
since they count steps). The learning rate of the policy holds inside the call only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ftcomm.training.vote import Verdict


class StepDecider(Protocol):
    """What decides at a gate."""

    def verdict(self) -> Verdict:
        """The verdict on this step; takes the vote if that was not taken yet."""

    def update(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Let it step."""


class StepOverride:
    """Puts `step` of `owner` aside and another in its place, until `remove`; the last one put is to be removed first.

    In an optimizer it is an attribute of the instance, where schedulers have one of their own. The attributes of a
    scheduler are its state, so that changes its class instead, for one that differs in nothing else.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.real = owner.step  # of the class, or one that a scheduler has put on the instance before us
        self._own = vars(owner).get("step")
        # wraps: a scheduler looks for a mark of its own on optimizer.step
        step = functools.wraps(self.real)(lambda *args, **kwargs: self.step(*args, **kwargs))
        if isinstance(owner, LRScheduler):
            self._class = type(owner)
            body = {"step": staticmethod(step), "__module__": self._class.__module__}
            owner.__class__ = type(self._class.__name__, (self._class,), body)
        else:
            owner.step = step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def remove(self) -> None:
        if isinstance(self.owner, LRScheduler):
            self.owner.__class__ = self._class
        elif self._own is None:
            del self.owner.step
        else:
            self.owner.step = self._own


class OptimizerGates:
    """Stand before those of `objects` that are optimizers or schedulers, between `install` and `remove`."""

    def __init__(self, objects: Iterable[object], decider: StepDecider) -> None:
        self._objects = list(objects)
        self._decider = decider
        self._gates: list[StepOverride] = []

    def install(self) -> None:
        assert not self._gates, "gates are removed at every boundary"
        for owner in self._objects:
            if isinstance(owner, Optimizer):
                self._gates.append(_OptimizerGate(owner, self._decider))
            elif isinstance(owner, LRScheduler):
                self._gates.append(_SchedulerGate(owner, self._decider))

    def remove(self) -> None:
        """Idempotent."""
        while self._gates:
            self._gates.pop().remove()


class _OptimizerGate(StepOverride):
    def __init__(self, owner: Optimizer, decider: StepDecider) -> None:
        super().__init__(owner)
        self._decider = decider

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if isinstance(self.owner, torch.optim.LBFGS):  # evaluates its closure itself; refused where votes are taken
            self._decider.update(self.owner, lambda: self.real(closure, **kwargs))
            return None
        loss = None
        if closure is not None:  # it makes the gradients, so it belongs to what is voted on
            with torch.enable_grad():
                loss = closure()
        if self._decider.verdict() is Verdict.COMMIT:
            self._decider.update(self.owner, functools.partial(self.real, **kwargs))
        return loss


class _SchedulerGate(StepOverride):
    def __init__(self, owner: LRScheduler, decider: StepDecider) -> None:
        super().__init__(owner)
        self._decider = decider

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._decider.verdict() in (Verdict.COMMIT, Verdict.SKIP):
            self.real(*args, **kwargs)
