"""Knows what no optimizer updates in the modules of the state: buffers, frozen parameters, get_extra_state.

The script changes these in its forward pass: statistics of BatchNorm, codebooks, a slow copy of the weights. That
follows from the weights, which a joiner does not have yet, so it can be neither kept nor replayed. A joiner takes it,
as it is then, from one of those that contribute once it has caught up (`ftcomm.training.samples`). With it go the
buffers that no state_dict has, if training changes them (`ftcomm.training.unsaved`).
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ftcomm.arrays import is_torch
from ftcomm.arrays.dtensor import local
from ftcomm.training.kinds import is_average, is_module, is_optimizer
from ftcomm.training.state import FlatState, Stateful, flatten
from ftcomm.training.tensor_sums import tensor_sums
from ftcomm.training.unsaved import Unsaved, UnsavedBuffers, take

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("ftcomm")

EXTRA = "_extra_state"  # with which torch ends the name of what get_extra_state returns
UNSAVED = "buffers that are not persistent"  # no name of a module's, beside those of its state_dict
Sums = dict[str, dict[str, tuple[int, int]]]  # by entry and name


class UntrainedPart:
    """The part of a module that no optimizer updates, or what of it has certain `names`; an entry of a state."""

    def __init__(
        self,
        module: nn.Module,
        trained: Collection[int],
        names: Collection[str] | None = None,
        unsaved: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`trained` has the addresses of what is left out, and `unsaved` what goes along beside the state_dict."""
        self._module, self._trained, self._names, self._unsaved = module, trained, names, unsaved

    def state_dict(self) -> Mapping[str, Any]:
        whole = self._module.state_dict()
        part = collections.OrderedDict((name, value) for name, value in whole.items() if self._has(name, value))
        part._metadata = getattr(whole, "_metadata", None)  # type: ignore[attr-defined]
        if self._unsaved:
            part[UNSAVED] = self._unsaved
        return part

    def load_state_dict(self, state_dict: Any) -> None:
        unsaved = state_dict.pop(UNSAVED, {})
        found = self._module.load_state_dict(state_dict, strict=False)
        if odd := getattr(found, "unexpected_keys", None):
            raise KeyError(f"it has no {', '.join(odd)}")
        if odd := take(self._module, unsaved):
            kind = type(self._module).__qualname__
            log.warning("buffers of %s that are no part of its state_dict keep what they hold: %s", kind, odd)

    def _has(self, name: str, value: Any) -> bool:
        trains = is_torch(value) and local(value).data_ptr() in self._trained
        return not trains and (self._names is None or name in self._names)


def untrained(
    state: Mapping[str, Stateful],
    names: Mapping[str, Collection[str]] | None = None,
    unsaved: Unsaved | None = None,
) -> dict[str, UntrainedPart]:
    """Returns the part of each module in `state` that no optimizer in it updates; of an average of weights, what
    `update_parameters` does not average either. With `names`, by entry, no more than these, and what is `unsaved`."""
    optimizers = [each for each in state.values() if is_optimizer(each)]
    trained = {local(p).data_ptr() for each in optimizers for group in each.param_groups for p in group["params"]}
    found = {}
    for name, each in state.items():
        if is_module(each):
            averages = [each.n_averaged, *each.parameters()] if is_average(each) else ()
            leaves_out = trained | {local(tensor).data_ptr() for tensor in averages}
            only = None if names is None else names.get(name, ())
            found[name] = UntrainedPart(each, leaves_out, only, (unsaved or {}).get(name))
    return found


def sums(state: Mapping[str, Stateful]) -> Sums:
    """Returns the sums of the bytes of what no optimizer updates, by which a change or a difference shows. Reads it
    once, and blocks for that. Extra state is left out, as it need not come back byte for byte."""
    found = [
        (entry, name, local(value))
        for entry, part in untrained(state).items()
        for name, value in part.state_dict().items()
        if is_torch(value) and not name.endswith(EXTRA)
    ]
    by_entry: Sums = {}
    for (entry, name, _), each in zip(found, tensor_sums([tensor for *_, tensor in found]), strict=True):
        by_entry.setdefault(entry, {})[name] = each
    return by_entry


class ChangeWatch:
    """Knows which of it moves: what has changed between two calls of `look`, now or before."""

    def __init__(self, state: Mapping[str, Stateful]) -> None:
        self._state = state
        self._before: Sums | None = None
        self._names: dict[str, set[str]] = {}
        self._unsaved = UnsavedBuffers(state)

    def look(self) -> tuple[Sums, FlatState]:
        """Returns the sums of all as it is now, and a copy of what moves, with all extra state, in host memory. Buffers
        that are not persistent are in the copy, if they have changed since construction, and not in the sums."""
        now = sums(self._state)
        before = now if self._before is None else self._before
        self._before = now
        for entry, part in untrained(self._state).items():
            names = self._names.setdefault(entry, set())
            names |= {name for name in part.state_dict() if name.endswith(EXTRA)}
            names |= {name for name, each in now.get(entry, {}).items() if before.get(entry, {}).get(name) != each}
        return now, flatten(untrained(self._state, self._names, self._unsaved.changed())).on_host()
