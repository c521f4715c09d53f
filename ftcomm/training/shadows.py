"""The stand-ins of optimizers, learning-rate schedulers and averages of weights while their updates are kept
(`ftcomm.training.replay`).

Each takes the place of `.step` (as an attribute of the instance, or a class, removed later). That of an optimizer keeps
what the call would have used: copies of the gradients, the arguments, and what the script has written into
`param_groups` since. What else a script may do to an optimizer cannot be kept, and is an error. That of an average
takes the place of `.update_parameters`: at replay it averages the weights as they are then.

What a script may look at meanwhile is as on the others, or it would do something else here:

    param_groups, schedulers    what is plain is taken over before the state is here, and schedulers step at once, so
                                `group["lr"] *= 0.1` comes to the same. Replay goes back to what held at each update
    state                       counts as filled, if it is: torch.distributed.checkpoint lets an optimizer step whose
                                state is empty, which would be one update more here
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ftcomm.arrays.dtensor import local, maker
from ftcomm.errors import StateError
from ftcomm.training.lr_scaling import scaled
from ftcomm.training.optimizer_gate import StepOverride
from ftcomm.training.spill import SpilledTensor
from ftcomm.training.state import specs

_REFUSED = ("load_state_dict", "add_param_group")
_SCALING = ("grad_scale", "found_inf")  # what a GradScaler gives to a fused optimizer, which unscales by itself
AtReplay = Callable[[Callable[[], object]], None]  # what to do at replay


class _Shadow(StepOverride):
    """A stand-in, with the settings of its owner as they are now, or as they were at the update that is replayed
    next."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self._now: Any = None
        self._then: Any = None

    def rewind(self) -> None:
        """Let the settings be those of the update that is replayed next."""
        self._now = self._settings()
        if self._then is not None:
            self._set(self._then)

    def forward(self) -> None:
        """Let the settings be those of now again."""
        self._then = self._settings()
        self._set(self._now)

    def take(self, theirs: Any) -> None:
        """Take over what is known of the state of the others, in which specs stand for tensors."""
        raise NotImplementedError

    def _settings(self) -> Any:
        raise NotImplementedError

    def _set(self, settings: Any) -> None:
        raise NotImplementedError


class SchedulerShadow(_Shadow):
    def __init__(
        self, owner: LRScheduler, keep: AtReplay, unkept: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        """`unkept` is a context in which nothing is kept."""
        super().__init__(owner)
        self._keep, self._unkept = keep, unkept
        self._steps_now = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._keep(functools.partial(self.real, *args, **kwargs))
        if self._steps_now:
            with self._unkept():
                self.real(*args, **kwargs)

    def take(self, theirs: Any) -> None:
        if not specs(theirs):
            self.owner.load_state_dict(theirs)
            self._steps_now = True

    def _settings(self) -> Any:
        return copy.deepcopy(self.owner.state_dict()) if self._steps_now else None

    def _set(self, settings: Any) -> None:
        if self._steps_now:
            self.owner.load_state_dict(settings)


class AverageShadow(StepOverride):
    method = "update_parameters"

    def __init__(self, owner: AveragedModel, keep: AtReplay) -> None:
        super().__init__(owner)
        self._keep = keep

    def step(self, model: Module) -> None:
        self._keep(functools.partial(self.real, model))


class OptimizerShadow(_Shadow):
    def __init__(
        self,
        owner: Optimizer,
        keep: AtReplay,
        put: Callable[[Tensor], SpilledTensor],
        scale: Callable[[], float],
        keeps: Callable[[], bool],
    ) -> None:
        """`put` keeps a gradient; `scale` returns the scale of the learning rate in updates kept now; `keeps` whether
        the script runs, and not the replay."""
        if isinstance(owner, torch.optim.LBFGS):
            raise StateError(
                "LBFGS evaluates the loss several times a step, which a replica that catches up cannot repeat. Use an "
                "optimizer that needs the gradients only."
            )
        super().__init__(owner)
        self._keep, self._put, self._scale, self._keeps = keep, put, scale, keeps
        self._filled = False  # the state, on the others
        self._tensors: list[Tensor] = []  # in the param_groups, as they were
        for name in _REFUSED:
            setattr(owner, name, functools.partial(self._refused, name, getattr(owner, name)))
        self.watch()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        grads = [None if p.grad is None else self._keep_grad(p.grad) for p in self._params()]
        vars(self.owner)["_opt_called"] = True  # what a scheduler looks for, which warns without it
        scaling = {name: value.clone() for name in _SCALING if (value := vars(self.owner).get(name)) is not None}
        self._keep(functools.partial(self._replay, grads, kwargs, self._scale(), scaling))
        return loss

    def take(self, theirs: Any) -> None:
        self._set([{k: v for k, v in group.items() if not specs(v)} for group in theirs["param_groups"]])
        self._filled = bool(theirs["state"])
        self.watch()

    def _settings(self) -> list[dict[str, Any]]:
        return [{k: copy.copy(v) for k, v in group.items() if not _has_tensor(v)} for group in self.owner.param_groups]

    def _set(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self.owner.param_groups, settings, strict=True):
            dict.update(group, {key: value for key, value in values.items() if key != "params"})  # keeps nothing

    def watch(self) -> None:
        """Record from now on what the script writes into the param_groups (`group["lr"] = ...`)."""
        groups = self.owner.param_groups
        groups[:] = [_WatchedGroup(group, functools.partial(self._wrote, i)) for i, group in enumerate(groups)]
        if self._filled:
            self.owner.state = _FilledState(dict, self.owner.state)
        self._note()

    def forward(self) -> None:
        super().forward()
        self._note()

    def remove(self) -> None:
        super().remove()
        for name in _REFUSED:
            delattr(self.owner, name)
        self.owner.param_groups[:] = [dict(group) for group in self.owner.param_groups]
        if isinstance(self.owner.state, _FilledState):
            self.owner.state = defaultdict(dict, self.owner.state)

    def _params(self) -> Iterator[Tensor]:
        for group in self.owner.param_groups:
            yield from group["params"]

    def _keep_grad(self, grad: Tensor) -> tuple[SpilledTensor, Callable[[Tensor], Tensor]]:
        return self._put(local(grad)), maker(grad)

    def _wrote(self, group: int, change: Callable[[dict[str, Any]], object]) -> None:
        self._keep(lambda: change(self.owner.param_groups[group]))

    def _refused(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._keeps():
            raise _unkept(f"calls {name} of its {type(self.owner).__name__}")
        return real(*args, **kwargs)

    def _note(self) -> None:
        self._tensors = [value.detach().clone() for value in self._settings_in_tensors()]

    def _check(self) -> None:
        """Raise `StateError` if the script has changed what is not kept."""
        kind = type(self.owner).__name__
        if not all(isinstance(group, _WatchedGroup) for group in self.owner.param_groups):
            raise _unkept(f"replaces the param_groups of its {kind}")
        if self._filled and not isinstance(self.owner.state, _FilledState):
            raise _unkept(f"replaces the state of its {kind}")
        now = self._settings_in_tensors()
        if len(now) == len(self._tensors) and not all(map(torch.equal, now, self._tensors)):
            raise _unkept(
                f"changes a tensor in the param_groups of its {kind} in place",
                'Put another in its place (group["lr"] = torch.tensor(0.1)), or have a scheduler in `state` do it.',
            )
        self._note()

    def _settings_in_tensors(self) -> list[Tensor]:
        groups = self.owner.param_groups
        return [v for group in groups for k, v in group.items() if k != "params" and isinstance(v, Tensor)]

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


class _FilledState(defaultdict[Any, Any]):
    """The state of an optimizer that counts as filled, though it may be empty."""

    def __bool__(self) -> bool:
        return True

    def clear(self) -> None:
        raise _unkept("clears the state of an optimizer")


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


class _WatchedGroup(dict[str, Any]):
    """A param_group that reports what is written to it."""

    def __init__(self, group: Mapping[str, Any], wrote: Callable[[Callable[[dict[str, Any]], object]], None]) -> None:
        super().__init__(group)
        self._wrote = wrote

    def __setitem__(self, key: str, value: Any) -> None:
        self._wrote(lambda group: group.__setitem__(key, value))
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._wrote(lambda group: group.pop(key, None))
        super().__delitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> _WatchedGroup:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        self._wrote(lambda group: group.pop(key, None))
        return super().pop(key, *default)


def _unkept(what: str, mend: str = "The others train on, and it can come in again after this step.") -> StateError:
    return StateError(
        f"The script {what}, which a replica that comes back cannot repeat before it has the others' state. {mend}"
    )
