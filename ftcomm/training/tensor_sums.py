"""Sums of the bytes of tensors as 64-bit words, computed where they lie, by which a change or a difference shows.

That reads memory once, also on a GPU. It does not tell one order of the same words from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WORD = 8  # bytes


def tensor_sums(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Returns the sums of the words of each tensor and of its remaining bytes. Transfers once from each device."""
    if not tensors:
        return []
    import torch

    made: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        whole = data.numel() // WORD * WORD
        words = data[:whole]
        if words.storage_offset() % WORD:
            words = words.clone()
        sums = made.setdefault(tensor.device, [])
        sums += [words.view(torch.int64).sum(), data[whole:].sum(dtype=torch.int64)]
    read = {device: iter(torch.stack(sums).tolist()) for device, sums in made.items()}
    return [(next(read[tensor.device]), next(read[tensor.device])) for tensor in tensors]
