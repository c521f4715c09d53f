"""Keeps the updates that a joiner cannot apply yet, while its state is on the way, and then replays them.

A joiner runs the same script as all. The reduced gradients that it sees have the same bits as everywhere; only its
weights differ. So while the state is on the way, `.step` of each optimizer and learning-rate scheduler is shadowed by a
stand-in (an attribute of the instance, removed later). That keeps what the call would have used: copies of the
gradients, the arguments, and what the script has written into `param_groups` since. Once the state is loaded, the same
calls on the same gradients give the same bits as on all others.

It does not see tensors in `param_groups` that are changed in place.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ftcomm.arrays.dtensor import local, maker
from ftcomm.errors import StateError
from ftcomm.training.lr_scaling import scaled
from ftcomm.training.optimizer_gate import StepOverride
from ftcomm.training.spill import Limits, Spill, SpilledTensor
from ftcomm.training.state import FlatState, Stateful, load

Keep = Callable[[Callable[[], object]], None]  # what to do at replay


class Replay:
    """Shadows the optimizers and schedulers in `state` from construction until `restore`. Not thread-safe."""

    scale = 1.0  # scale of the learning rate in updates kept from now on

    def __init__(self, state: Mapping[str, Stateful], limits: Limits | None = None) -> None:
        self._state = state
        self._spill = Spill(Limits.from_env() if limits is None else limits)
        self._steps: deque[list[Callable[[], object]]] = deque()
        self._applying = False
        objects = state.values()
        self._schedulers = [_SchedulerShadow(obj, self.keep) for obj in objects if isinstance(obj, LRScheduler)]
        self._optimizers = [_OptimizerShadow(obj, self) for obj in objects if isinstance(obj, Optimizer)]

    @property
    def possible(self) -> bool:
        """Whether `state` has an optimizer; without one there is nothing to replay an update with."""
        return bool(self._optimizers)

    @property
    def behind(self) -> int:
        """The steps that were kept and not yet applied."""
        return len(self._steps)

    def begin(self) -> None:
        """Begin a step, to which all that the script does from here on belongs."""
        self._steps.append([])

    def load(self, flat: FlatState) -> None:
        """Load the state entering the first step that was begun."""
        with self._real():
            load(flat, self._state)
            for shadow in self._optimizers:
                shadow.watch()  # loading replaces the param_groups

    def apply(self, least: int, seconds: float) -> None:
        """Apply kept steps in order: `least` of them, and more while `seconds` have not passed."""
        deadline = time.monotonic() + seconds
        with self._real():
            while self._steps and (least > 0 or time.monotonic() < deadline):
                for action in self._steps.popleft():
                    action()
                least -= 1

    def restore(self) -> None:
        """Remove the stand-ins and forget what was kept. Idempotent."""
        for shadow in (*self._optimizers, *self._schedulers):
            shadow.remove()
        self._optimizers, self._schedulers = [], []
        self._steps.clear()
        self._spill.close()

    def keep(self, action: Callable[[], object]) -> None:
        """Run `action` when this step is replayed, after what was kept before it."""
        if not self._applying:  # during replay the optimizer, or a scheduler, writes to the param_groups
            self._steps[-1].append(action)

    def put(self, grad: Tensor) -> SpilledTensor:
        return self._spill.put(grad)

    @contextlib.contextmanager
    def _real(self) -> Iterator[None]:
        self._applying = True
        try:
            yield
        finally:
            self._applying = False


class _SchedulerShadow(StepOverride):
    def __init__(self, owner: LRScheduler, keep: Keep) -> None:
        super().__init__(owner)
        self._keep = keep

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._keep(functools.partial(self.real, *args, **kwargs))


class _OptimizerShadow(StepOverride):
    def __init__(self, owner: Optimizer, replay: Replay) -> None:
        if isinstance(owner, torch.optim.LBFGS):
            raise StateError(
                "LBFGS evaluates the loss several times a step, which a replica that catches up cannot repeat. Use an "
                "optimizer that needs the gradients only."
            )
        super().__init__(owner)
        self._to = replay
        self.watch()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [None if p.grad is None else self._keep_grad(p.grad) for p in self._params()]
        self._to.keep(functools.partial(self._replay, grads, kwargs, self._to.scale))
        return loss

    def watch(self) -> None:
        """Record from now on what the script writes into the param_groups (`group["lr"] = ...`)."""
        groups = self.owner.param_groups
        groups[:] = [_WatchedGroup(group, functools.partial(self._wrote, i)) for i, group in enumerate(groups)]

    def remove(self) -> None:
        super().remove()
        self.owner.param_groups[:] = [dict(group) for group in self.owner.param_groups]

    def _params(self) -> Iterator[Tensor]:
        for group in self.owner.param_groups:
            yield from group["params"]

    def _keep_grad(self, grad: Tensor) -> tuple[SpilledTensor, Callable[[Tensor], Tensor]]:
        return self._to.put(local(grad)), maker(grad)

    def _wrote(self, group: int, key: str, value: Any) -> None:
        self._to.keep(lambda: self.owner.param_groups[group].__setitem__(key, value))

    def _replay(
        self, grads: list[tuple[SpilledTensor, Callable[[Tensor], Tensor]] | None], kwargs: dict[str, Any], scale: float
    ) -> None:
        params = list(self._params())
        present = [p.grad for p in params]  # maybe views into buckets, so put them back and do not write to them
        for p, grad in zip(params, grads, strict=True):
            p.grad = None if grad is None else grad[1](grad[0].take().to(p.device))
        with scaled(self.owner, scale):
            self.real(**kwargs)
        for p, grad in zip(params, present, strict=True):
            p.grad = grad


class _WatchedGroup(dict[str, Any]):
    """A param_group that reports what is written to it."""

    def __init__(self, group: Mapping[str, Any], wrote: Callable[[str, Any], None]) -> None:
        super().__init__(group)
        self._wrote = wrote

    def __setitem__(self, key: str, value: Any) -> None:
        self._wrote(key, value)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value
