"""The updates that a joiner cannot apply yet: kept step by step while its state is on the way, then replayed.

A joiner runs the same script as everybody. The reduced gradients that it sees are everybody's to the last bit; only
its weights are not. So while the state is on the way, `.step` of each optimizer and learning-rate scheduler is
shadowed by a stand-in (an attribute of the instance, taken away afterwards) that keeps what the call would have used:
copies of the gradients, the arguments, and what the script wrote into `param_groups` since. Once the state is loaded,
the same calls on the same gradients give the bits that they gave everybody else.

Not seen: values of `param_groups` that are tensors and changed in place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ftcomm.errors import StateError
from ftcomm.hsdp.state import Flat, Stateful, load

KEEP_BYTES = 4 << 30  # of gradients, in host memory, before a joiner gives up; FTCOMM_CATCHUP_BYTES sets another limit

Keep = Callable[[Callable[[], object], int], None]  # (what to do at replay, bytes that it holds)


class Replay:
    """Shadows the optimizers and schedulers in `state` from construction until `restore`. Not thread-safe."""

    def __init__(self, state: Mapping[str, Stateful], limit: int | None = None) -> None:
        self._state = state
        self._limit = int(os.environ.get("FTCOMM_CATCHUP_BYTES", KEEP_BYTES)) if limit is None else limit
        self._held = 0
        self._steps: deque[list[tuple[Callable[[], object], int]]] = deque()
        self._applying = False
        objects = state.values()
        self._schedulers = [_SchedulerShadow(obj, self._keep) for obj in objects if isinstance(obj, LRScheduler)]
        self._optimizers = [_OptimizerShadow(obj, self._keep) for obj in objects if isinstance(obj, Optimizer)]

    @property
    def possible(self) -> bool:
        """Whether `state` has an optimizer; without one there is nothing to replay an update with."""
        return bool(self._optimizers)

    @property
    def behind(self) -> int:
        """Steps that were kept and not yet applied."""
        return len(self._steps)

    def begin(self) -> None:
        """A step begins: what the script does from here on belongs to it."""
        self._steps.append([])

    def load(self, flat: Flat) -> None:
        """Load the state entering the first step that was begun."""
        with self._real():
            load(flat, self._state)
            for shadow in self._optimizers:
                shadow.watch()  # loading has replaced the param_groups

    def apply(self, least: int, seconds: float) -> None:
        """Apply kept steps in order: `least` of them, and more while `seconds` have not passed."""
        deadline = time.monotonic() + seconds
        with self._real():
            while self._steps and (least > 0 or time.monotonic() < deadline):
                for action, nbytes in self._steps.popleft():
                    action()
                    self._held -= nbytes
                least -= 1

    def restore(self) -> None:
        """Take the stand-ins away and forget what was kept. Idempotent."""
        for shadow in (*self._optimizers, *self._schedulers):
            shadow.remove()
        self._optimizers, self._schedulers = [], []
        self._steps.clear()

    def _keep(self, action: Callable[[], object], nbytes: int) -> None:
        if self._applying:  # the optimizer itself, or a scheduler, writes to the param_groups
            return
        self._held += nbytes
        if self._held > self._limit:
            raise StateError(
                f"The gradients of {self.behind} steps, kept until the state of the other replicas has arrived, take "
                f"{self._held / 1e9:.2f} GB, above the limit of {self._limit / 1e9:.2f} GB. Allow more with "
                "FTCOMM_CATCHUP_BYTES, or give the transfer a faster network."
            )
        self._steps[-1].append((action, nbytes))

    @contextlib.contextmanager
    def _real(self) -> Iterator[None]:
        self._applying = True
        try:
            yield
        finally:
            self._applying = False


class _StandIn:
    """Puts `step` of `owner` aside and another in its place."""

    def __init__(self, owner: Any, keep: Keep) -> None:
        self.owner = owner
        self.keep = keep
        self.real = owner.step  # of the class, or one that a scheduler has put on the instance before us
        self._own = vars(owner).get("step")
        # wraps: a scheduler looks for a mark of its own on optimizer.step
        owner.step = functools.wraps(self.real)(lambda *args, **kwargs: self.step(*args, **kwargs))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def remove(self) -> None:
        if self._own is None:
            del self.owner.step
        else:
            self.owner.step = self._own


class _SchedulerShadow(_StandIn):
    def step(self, *args: Any, **kwargs: Any) -> None:
        self.keep(functools.partial(self.real, *args, **kwargs), 0)


class _OptimizerShadow(_StandIn):
    def __init__(self, owner: Optimizer, keep: Keep) -> None:
        if isinstance(owner, torch.optim.LBFGS):
            raise StateError(
                "LBFGS evaluates the loss several times a step, which a replica that catches up cannot repeat. Use an "
                "optimizer that needs the gradients only."
            )
        super().__init__(owner, keep)
        self.watch()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [None if p.grad is None else _to_host(p.grad) for p in self._params()]
        nbytes = sum(g.numel() * g.element_size() for g in grads if g is not None)
        self.keep(functools.partial(self._replay, grads, kwargs), nbytes)
        return loss

    def watch(self) -> None:
        """From here on, keep what the script writes into the param_groups (`group["lr"] = ...`)."""
        groups = self.owner.param_groups
        groups[:] = [_WatchedGroup(group, functools.partial(self._wrote, i)) for i, group in enumerate(groups)]

    def remove(self) -> None:
        super().remove()
        self.owner.param_groups[:] = [dict(group) for group in self.owner.param_groups]

    def _params(self) -> Iterator[Tensor]:
        for group in self.owner.param_groups:
            yield from group["params"]

    def _wrote(self, group: int, key: str, value: Any) -> None:
        self.keep(lambda: self.owner.param_groups[group].__setitem__(key, value), 0)

    def _replay(self, grads: list[Tensor | None], kwargs: dict[str, Any]) -> None:
        params = list(self._params())
        present = [p.grad for p in params]  # perhaps views into buckets, so they are put back, not written to
        for p, grad in zip(params, grads, strict=True):
            p.grad = None if grad is None else grad.to(p.device)
        self.real(**kwargs)
        for p, grad in zip(params, present, strict=True):
            p.grad = grad


class _WatchedGroup(dict[str, Any]):
    """A param_group that tells what is written to it."""

    def __init__(self, group: Mapping[str, Any], wrote: Callable[[str, Any], None]) -> None:
        super().__init__(group)
        self._wrote = wrote

    def __setitem__(self, key: str, value: Any) -> None:
        self._wrote(key, value)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def _to_host(grad: Tensor) -> Tensor:
    return grad.detach().to("cpu", copy=True)
