"""Knows the buffers that a module leaves out of its state_dict (`persistent=False`), as far as training changes them.

Most are constants and caches, which each replica makes by itself: tables of positions, masks. Others hold what the
forward passes have come to, which a joiner lacks. The bytes tell one from the other: what differs from what it was when
the step loop began has been changed since. That, and no more, is given to a joiner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftcomm.arrays import may_overlap
from ftcomm.arrays.dtensor import local
from ftcomm.training.kinds import is_module
from ftcomm.training.tensor_sums import tensor_sums

if TYPE_CHECKING:
    from torch import Tensor, nn

Unsaved = dict[str, dict[str, "Tensor"]]  # by entry and name


class UnsavedBuffers:
    """The buffers of the modules in `state` that no state_dict has, since construction. Not thread-safe."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Reads them once, and blocks for that."""
        self._state = state
        self._first = self._sums()
        self._changed: set[tuple[str, str]] = set()

    def changed(self) -> Unsaved:
        """Returns those that are not as they were, or were not at an earlier call. Reads all, and blocks for that."""
        self._changed |= {key for key, sums in self._sums().items() if self._first.get(key) != sums}
        found: Unsaved = {}
        for (entry, name), buffer in self._all().items():
            if (entry, name) in self._changed:
                found.setdefault(entry, {})[name] = buffer
        return found

    def _all(self) -> dict[tuple[str, str], Tensor]:
        modules = [(entry, each) for entry, each in self._state.items() if is_module(each)]
        return {(entry, name): buffer for entry, each in modules for name, buffer in unsaved(each).items()}

    def _sums(self) -> dict[tuple[str, str], tuple[int, int]]:
        buffers = self._all()
        return dict(zip(buffers, tensor_sums(list(buffers.values())), strict=True))


def unsaved(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that its state_dict leaves out, by name; of one that is spread, the part of this rank."""
    found = {}
    for path, each in module.named_modules():
        left_out = getattr(each, "_non_persistent_buffers_set", ())
        for name, buffer in each.named_buffers(recurse=False):
            if name in left_out and _has_bytes(part := local(buffer)):
                found[f"{path}.{name}" if path else name] = part
    return found


def take(module: nn.Module, there: Mapping[str, Tensor]) -> list[str]:
    """Write what another replica has into the buffers of these names. Returns the names of those that do not fit, and
    are as before: caches whose size depends on the data."""
    here = unsaved(module)
    odd = []
    for name, buffer in there.items():
        own = here.get(name)
        if own is None or (own.shape, own.dtype) != (buffer.shape, buffer.dtype) or _overlaps(own):
            odd.append(name)
        else:
            own.copy_(buffer)
    return odd


def _has_bytes(buffer: Tensor) -> bool:
    import torch

    plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
    return plain and not buffer.is_quantized and not buffer.is_meta


def _overlaps(buffer: Tensor) -> bool:
    size = buffer.element_size()
    return may_overlap(tuple(buffer.shape), tuple(size * stride for stride in buffer.stride()), size)
