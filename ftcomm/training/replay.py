"""Keeps the updates that a joiner cannot apply yet, while its state is on the way, and then replays them.

A joiner runs the same script as all. The reduced gradients that it sees have the same bits as everywhere; only its
weights differ. So while the state is on the way, `.step` of each optimizer and learning-rate scheduler, and the update
of each `AveragedModel`, is shadowed by a stand-in, which keeps what the call would have used
(`ftcomm.training.shadows`). Once the state is loaded, the same calls on the same gradients give the same bits as on all
others.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ftcomm.training.kinds import is_average, is_optimizer, is_scheduler
from ftcomm.training.spill import Limits, Spill
from ftcomm.training.state import FlatState, Stateful, entry, load

if TYPE_CHECKING:
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
        if any(is_optimizer(each) for each in state.values()):
            from ftcomm.training.shadows import AverageShadow, OptimizerShadow, SchedulerShadow

            for name, each in state.items():
                if is_optimizer(each):
                    self._optimizers[name] = OptimizerShadow(each, self.keep, self._spill.put, lambda: self.scale)
                elif is_scheduler(each):
                    self._schedulers[name] = SchedulerShadow(each, self.keep, self._unkept)
                elif is_average(each):
                    self._averages.append(AverageShadow(each, self.keep))

    @property
    def possible(self) -> bool:
        """Whether `state` has an optimizer; without one there is nothing to replay an update with."""
        return bool(self._optimizers)

    @property
    def behind(self) -> int:
        """The steps that were kept and not yet applied."""
        return len(self._steps)

    def take(self, skeleton: bytes) -> None:
        """Take over what is known before the state is here, from its skeleton."""
        with self._unkept():
            for name, shadow in {**self._optimizers, **self._schedulers}.items():
                shadow.take(entry(skeleton, name))

    def begin(self) -> None:
        """Begin a step, to which all that the script does from here on belongs."""
        self._steps.append([])

    def load(self, flat: FlatState) -> None:
        """Load the state entering the first step that was begun."""
        with self._past():
            load(flat, self._state)
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
