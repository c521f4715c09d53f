"""Keeps the updates that a joiner cannot apply yet, while its state is on the way, and then replays them.

A joiner runs the same script as all. The reduced gradients that it sees have the same bits as everywhere; only its
weights differ. So while the state is on the way, `.step` of each optimizer and learning-rate scheduler is shadowed by a
stand-in, which keeps what the call would have used (`ftcomm.training.shadows`). Once the state is loaded, the same
calls on the same gradients give the same bits as on all others.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ftcomm.training.kinds import is_optimizer, is_scheduler
from ftcomm.training.spill import Limits, Spill
from ftcomm.training.state import FlatState, Stateful, load

if TYPE_CHECKING:
    from ftcomm.training.shadows import OptimizerShadow, SchedulerShadow


class Replay:
    """Shadows the optimizers and schedulers in `state` from construction until `restore`. Not thread-safe."""

    scale = 1.0  # scale of the learning rate in updates kept from now on

    def __init__(self, state: Mapping[str, Stateful], limits: Limits | None = None) -> None:
        self._state = state
        self._spill = Spill(Limits.from_env() if limits is None else limits)
        self._steps: deque[list[Callable[[], object]]] = deque()
        self._applying = False
        self._schedulers: list[SchedulerShadow] = []
        self._optimizers: list[OptimizerShadow] = []
        objects = [entry for entry in state.values() if is_optimizer(entry) or is_scheduler(entry)]
        if objects:
            from ftcomm.training.shadows import OptimizerShadow, SchedulerShadow

            self._schedulers = [SchedulerShadow(obj, self.keep) for obj in objects if is_scheduler(obj)]
            self._optimizers = [
                OptimizerShadow(obj, self.keep, self._spill.put, lambda: self.scale)
                for obj in objects
                if is_optimizer(obj)
            ]

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

    @contextlib.contextmanager
    def _real(self) -> Iterator[None]:
        self._applying = True
        try:
            yield
        finally:
            self._applying = False
