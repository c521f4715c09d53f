"""Gates before optimizers, schedulers and averages of weights: they move only when a step is committed, and after what
has to come first.

A script calls `optimizer.step()` as usual. While the gates are in place, the first such call of a step takes the vote.
If that decides against the step, none of them moves (schedulers do where a step is skipped, since they count steps).
The learning rate of the policy holds only inside the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from ftcomm.training.kinds import is_average, is_lbfgs, is_optimizer, is_scheduler
from ftcomm.training.vote import StepDecision

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel


class StepDecider(Protocol):
    """The interface of what decides at a gate."""

    def decision(self) -> StepDecision:
        """Returns the decision on this step; takes the vote if that was not taken yet."""

    def update(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Let an optimizer step."""


class StepOverride:
    """Replaces `step` of `owner`, or another method, until `remove`; the last replacement must be removed first.

    An optimizer gets an attribute of the instance, where schedulers put their own. The attributes of a scheduler are
    its state, so a scheduler gets another class, which differs in nothing else.
    """

    method = "step"

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.real = getattr(owner, self.method)  # that of the class, or one that a scheduler has put on the instance
        self._own = vars(owner).get(self.method)
        # wraps, since a scheduler looks for its mark on optimizer.step
        step = functools.wraps(self.real)(lambda *args, **kwargs: self.step(*args, **kwargs))
        if is_scheduler(owner):
            self._class = type(owner)
            body = {self.method: staticmethod(step), "__module__": self._class.__module__}
            owner.__class__ = type(self._class.__name__, (self._class,), body)
        else:
            setattr(owner, self.method, step)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def remove(self) -> None:
        if is_scheduler(self.owner):
            self.owner.__class__ = self._class
        elif self._own is None:
            delattr(self.owner, self.method)
        else:
            setattr(self.owner, self.method, self._own)


class OptimizerGates:
    """Gates for the optimizers, schedulers and averages among `objects`, between `install` and `remove`."""

    def __init__(self, objects: Iterable[object], decider: StepDecider) -> None:
        self._objects = list(objects)
        self._decider = decider
        self._gates: list[StepOverride] = []

    def install(self) -> None:
        assert not self._gates, "gates are removed at every boundary"
        for owner in self._objects:
            if is_optimizer(owner):
                self._gates.append(_OptimizerGate(owner, self._decider))
            elif is_scheduler(owner):
                self._gates.append(_SchedulerGate(owner, self._decider))
            elif is_average(owner):
                self._gates.append(_AverageGate(owner, self._decider))

    def remove(self) -> None:
        """Remove the gates; idempotent."""
        while self._gates:
            self._gates.pop().remove()


class _OptimizerGate(StepOverride):
    def __init__(self, owner: Optimizer, decider: StepDecider) -> None:
        super().__init__(owner)
        self._decider = decider

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if is_lbfgs(self.owner):  # it evaluates its closure itself; refused where votes are taken
            self._decider.update(self.owner, lambda: self.real(closure, **kwargs))
            return None
        loss = None
        if closure is not None:  # it makes the gradients, so it comes before the vote
            import torch

            with torch.enable_grad():
                loss = closure()
        if self._decider.decision() is StepDecision.COMMIT:
            self._decider.update(self.owner, functools.partial(self.real, **kwargs))
        return loss


class _SchedulerGate(StepOverride):
    def __init__(self, owner: LRScheduler, decider: StepDecider) -> None:
        super().__init__(owner)
        self._decider = decider

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._decider.decision() in (StepDecision.COMMIT, StepDecision.SKIP):
            self.real(*args, **kwargs)


class _AverageGate(StepOverride):
    method = "update_parameters"

    def __init__(self, owner: AveragedModel, decider: StepDecider) -> None:
        super().__init__(owner)
        self._decider = decider

    def step(self, model: Module) -> None:
        if self._decider.decision() is StepDecision.COMMIT:
            self.real(model)
