"""The stand-ins of optimizers and learning-rate schedulers while their updates are kept (`ftcomm.training.replay`).

Each takes the place of `.step` (as an attribute of the instance, or a class, removed later). That of an optimizer keeps
what the call would have used: copies of the gradients, the arguments, and what the script has written into
`param_groups` since. It does not see tensors in `param_groups` that are changed in place.
"""

from __future__ import annotations

import functools
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
from ftcomm.training.spill import SpilledTensor

_SCALING = ("grad_scale", "found_inf")  # what a GradScaler gives to a fused optimizer, which unscales by itself
Keep = Callable[[Callable[[], object]], None]  # what to do at replay


class SchedulerShadow(StepOverride):
    def __init__(self, owner: LRScheduler, keep: Keep) -> None:
        super().__init__(owner)
        self._keep = keep

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._keep(functools.partial(self.real, *args, **kwargs))


class OptimizerShadow(StepOverride):
    def __init__(
        self, owner: Optimizer, keep: Keep, put: Callable[[Tensor], SpilledTensor], scale: Callable[[], float]
    ) -> None:
        """`put` keeps a gradient; `scale` returns the scale of the learning rate in updates kept now."""
        if isinstance(owner, torch.optim.LBFGS):
            raise StateError(
                "LBFGS evaluates the loss several times a step, which a replica that catches up cannot repeat. Use an "
                "optimizer that needs the gradients only."
            )
        super().__init__(owner)
        self._keep, self._put, self._scale = keep, put, scale
        self.watch()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [None if p.grad is None else self._keep_grad(p.grad) for p in self._params()]
        scaling = {name: value.clone() for name in _SCALING if (value := vars(self.owner).get(name)) is not None}
        self._keep(functools.partial(self._replay, grads, kwargs, self._scale(), scaling))
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
        return self._put(local(grad)), maker(grad)

    def _wrote(self, group: int, key: str, value: Any) -> None:
        self._keep(lambda: self.owner.param_groups[group].__setitem__(key, value))

    def _replay(
        self,
        grads: list[tuple[SpilledTensor, Callable[[Tensor], Tensor]] | None],
        kwargs: dict[str, Any],
        scale: float,
        scaling: dict[str, Tensor],
    ) -> None:
        params = list(self._params())
        present = [p.grad for p in params]  # maybe views into buckets, so put them back and do not write to them
        for p, grad in zip(params, grads, strict=True):
            p.grad = None if grad is None else grad[1](grad[0].take().to(p.device))
        vars(self.owner).update(scaling)
        with scaled(self.owner, scale):
            self.real(**kwargs)
        for name in scaling:
            delattr(self.owner, name)
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
