"""Keeps the scales of losses (`GradScaler`) equal on all replicas, though each computes its own.

    the scale     multiplies the loss, so what replicas reduce together must have one scale
    an update     is a function of the reduced gradients: the scale is equal after a step if it was before

So a replica that comes back takes the scale over before its first op, and not with the rest of the state some steps
later: from then on its own updates keep it right, also of the gradients that it cannot apply yet. And an attempt at a
step that is repeated leaves the scale as it was: a replica that failed in it did not come to its update.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ftcomm.errors import StateError
from ftcomm.training.kinds import is_scaler
from ftcomm.training.state import Stateful, entry

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp import GradScaler

_DEEPEST = 8  # frames between an optimizer's gate and the scaler that steps it: wrappers of schedulers, and of hooks


class LossScalers:
    """The scalers among the entries of the state. Not thread-safe."""

    def __init__(self, entries: Mapping[str, Stateful]) -> None:
        self._scalers = {name: entry for name, entry in entries.items() if is_scaler(entry) and entry.is_enabled()}
        self._before: list[tuple[Tensor | None, Tensor | None]] = []

    def take(self, skeleton: bytes) -> None:
        """Take over the scales of the state that this skeleton is of."""
        for name, scaler in self._scalers.items():
            scaler.load_state_dict(entry(skeleton, name))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A context in which a state is loaded that is older than the scales."""
        states = {name: scaler.state_dict() for name, scaler in self._scalers.items()}
        yield
        for name, scaler in self._scalers.items():
            scaler.load_state_dict(states[name])

    def begin(self) -> None:
        """Begin an attempt at a step. Does not wait for the device."""
        self._before = [_numbers(scaler) for scaler in self._scalers.values()]

    def repeat(self) -> None:
        """Set the scales back to what they were when the attempt began, which is to be repeated."""
        for scaler, before in zip(self._scalers.values(), self._before, strict=True):
            _set_back(scaler, *before)

    def check_caller(self, step: int) -> None:
        """Raise `StateError` if the optimizer that is about to step is stepped by a scaler that is no entry."""
        amp = sys.modules.get("torch.amp.grad_scaler")
        frame = sys._getframe(1) if amp is not None else None
        for _ in range(_DEEPEST):
            if frame is None:
                return
            caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
            if is_scaler(caller) and caller.is_enabled() and caller not in self._scalers.values():
                raise StateError(
                    f"step {step}: the optimizer is stepped by a {type(caller).__name__} that is no entry of `state`, "
                    "so a replica that comes back, and a step that is repeated, would go on with another scale of the "
                    'loss. Pass it, too: state = {"model": model, "optimizer": optimizer, "scaler": scaler}'
                )
            frame = frame.f_back


def _numbers(scaler: GradScaler) -> tuple[Tensor | None, Tensor | None]:
    """Returns copies of the scale and of the steps since it last grew; None before the scaler's first use."""
    return _copy(scaler._scale), _copy(scaler._growth_tracker)


def _set_back(scaler: GradScaler, scale: Tensor | None, tracker: Tensor | None) -> None:
    scaler._scale, scaler._growth_tracker = _copy(scale), _copy(tracker)
    scaler._per_optimizer_states.clear()  # an attempt may have ended between `unscale_` and `update`


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
