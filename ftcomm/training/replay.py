"""Keeps the updates that a joiner cannot apply yet, while its state is on the way, and then replays them.

A joiner runs the same script as all. The reduced gradients that it sees have the same bits as everywhere; only its
weights differ. So while the state is on the way, `.step` of each optimizer and learning-rate scheduler, and the update
of each `AveragedModel`, is shadowed by a stand-in, which keeps what the call would have used
(`ftcomm.training.shadows`). Once the state is loaded, the same calls on the same gradients give the same bits as on all
others.

What the script itself changes in other entries cannot be replayed, so they are not late:

    plain values                          taken over at the boundary at which the joiner comes in; the script goes on
                                          from there
    tensors and arrays that no optimizer  the joiner waits for its state before its first step
    has: averages by hand, a teacher
    what has `settled`                    loaded late; its calls are kept
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ftcomm.arrays.dtensor import local
from ftcomm.errors import StateError
from ftcomm.training.kinds import is_average, is_module, is_optimizer, is_scaler, is_scheduler
from ftcomm.training.spill import Limits, Spill
from ftcomm.training.state import FlatState, Stateful, entry, load, load_entry, specs, tensors_in
from ftcomm.training.tensor_sums import tensor_sums

if TYPE_CHECKING:
    from torch import Tensor

    from ftcomm.training.shadows import AverageShadow, OptimizerShadow, SchedulerShadow


class Replay:
    """Shadows the optimizers, schedulers and averages in `state` from construction until `restore`. Not thread-safe."""

    scale = 1.0  # scale of the learning rate in updates kept from now on

    def __init__(self, state: Mapping[str, Stateful], limits: Limits | None = None) -> None:
        self._state = state
        self._spill = Spill(Limits.from_env() if limits is None else limits)
        self._steps: deque[list[Callable[[], object]]] = deque()
        self._keeps = True
        self._schedulers: dict[str, SchedulerShadow] = {}
        self._optimizers: dict[str, OptimizerShadow] = {}
        self._averages: list[AverageShadow] = []
        self._before: list[tuple[Tensor, tuple[int, int]]] = []  # parameters, with their sums, as the first step begins
        self._begun = False
        self._taken: frozenset[str] = frozenset()  # entries that are taken over already
        self.lacks: list[str] = []  # entries without which the script cannot run a step
        if any(is_optimizer(each) for each in state.values()):
            from ftcomm.training.shadows import AverageShadow, OptimizerShadow, SchedulerShadow

            for name, each in state.items():
                if is_optimizer(each):
                    self._optimizers[name] = OptimizerShadow(
                        each, self.keep, self._spill.put, lambda: self.scale, lambda: self._keeps
                    )
                elif is_scheduler(each):
                    self._schedulers[name] = SchedulerShadow(each, self.keep, self._unkept)
                elif is_average(each):
                    self._averages.append(AverageShadow(each, self.keep))

    @property
    def possible(self) -> bool:
        """Whether the state may come late. Without an optimizer in it there is nothing to replay an update with."""
        return bool(self._optimizers) and not self.lacks

    @property
    def behind(self) -> int:
        """The steps that were kept and not yet applied."""
        return len(self._steps)

    def take(self, skeleton: bytes) -> None:
        """Take over what is known before the state is here, from its skeleton."""
        with self._unkept():
            for name, shadow in {**self._optimizers, **self._schedulers}.items():
                shadow.take(entry(skeleton, name))
        if not self._optimizers:
            return  # the state is waited for in any case
        trained = {id(p): local(p).data_ptr() for each in self._state.values() for p in _params(each)}
        for name, each in self._state.items():
            if _replayed(each):
                continue
            theirs = entry(skeleton, name)
            if is_module(each):
                if specs(theirs) and not any(id(p) in trained for p in each.parameters()):
                    self.lacks.append(name)
            elif not specs(theirs):
                load_entry(name, each, theirs)
                self._taken |= {name}
            elif not _all_in(each.state_dict(), frozenset(trained.values())):
                self.lacks.append(name)

    def begin(self) -> None:
        """Begin a step, to which all that the script does from here on belongs."""
        self._check_parameters()
        if not self._begun:
            self._begun = True
            params = [local(p).detach() for each in self._state.values() for p in _params(each)]
            self._before = list(zip(params, tensor_sums(params), strict=True))
        self._steps.append([])

    def load(self, flat: FlatState) -> None:
        """Load the state entering the first step that was begun."""
        self._check_parameters()
        with self._past():
            load(flat, self._state, leave=self._taken)
            for shadow in self._optimizers.values():
                shadow.watch()  # loading replaces what it watches

    def apply(self, least: int, seconds: float) -> None:
        """Apply kept steps in order: `least` of them, and more while `seconds` have not passed."""
        deadline = time.monotonic() + seconds
        with self._past():
            while self._steps and (least > 0 or time.monotonic() < deadline):
                for action in self._steps.popleft():
                    action()
                least -= 1

    def restore(self) -> None:
        """Remove the stand-ins and forget what was kept. Idempotent."""
        for shadow in (*self._shadows, *self._averages):
            shadow.remove()
        self._optimizers, self._schedulers, self._averages = {}, {}, []
        self._steps.clear()
        self._spill.close()

    def keep(self, action: Callable[[], object]) -> None:
        """Run `action` when this step is replayed, after what was kept before it."""
        if self._keeps:
            self._steps[-1].append(action)

    def _check_parameters(self) -> None:
        """Raise `StateError` if the script has changed parameters in the first step, in which no optimizer steps here:
        nobody could tell what that was, to repeat it."""
        before, self._before = self._before, []
        now = tensor_sums([param for param, _ in before])
        for (param, was), sums in zip(before, now, strict=True):
            if sums != was:
                raise StateError(
                    f"The script changes parameters ({self._name(param)}) by itself, and not by an optimizer, which a "
                    "replica that comes back cannot repeat. Do it in a hook of the optimizer, which is called at "
                    "replay: optimizer.register_step_post_hook(lambda optimizer, *_: ...). What only the first step "
                    "does, as to initialize by data, belongs before the step loop."
                )

    def _name(self, param: Tensor) -> str:
        modules = [(name, each) for name, each in self._state.items() if is_module(each)]
        found = (f"{entry}.{name}" for entry, each in modules for name, p in each.named_parameters())
        places = (local(p).data_ptr() for _, each in modules for p in each.parameters())
        return next((name for name, at in zip(found, places, strict=True) if at == param.data_ptr()), "of no module")

    @property
    def _shadows(self) -> list[OptimizerShadow | SchedulerShadow]:
        return [*self._optimizers.values(), *self._schedulers.values()]

    @contextlib.contextmanager
    def _unkept(self) -> Iterator[None]:
        """A context in which an optimizer, or a scheduler, writes to the param_groups, and not the script."""
        self._keeps = False
        try:
            yield
        finally:
            self._keeps = True

    @contextlib.contextmanager
    def _past(self) -> Iterator[None]:
        """A context in which all settings are those of the update that is replayed next."""
        with self._unkept():
            for shadow in self._shadows:
                shadow.rewind()
            yield
            if self._steps:
                for shadow in self._shadows:
                    shadow.forward()


def _replayed(each: Stateful) -> bool:
    """Whether what happens to an entry while the state is on the way is kept and replayed; or, with the scale of the
    loss, is right in any case."""
    kinds = (is_optimizer, is_scheduler, is_average, is_scaler)
    return any(kind(each) for kind in kinds) or hasattr(each, "settled")


def _params(each: Stateful) -> list[Tensor]:
    """Returns the parameters of an optimizer; of other entries none."""
    return [p for group in each.param_groups for p in group["params"]] if is_optimizer(each) else []


def _all_in(value: Any, addresses: frozenset[int]) -> bool:
    """Whether `value` holds tensors, and each of them is at one of these addresses."""
    places = [local(tensor).data_ptr() for tensor in tensors_in(value)]
    return bool(places) and addresses.issuperset(places)
