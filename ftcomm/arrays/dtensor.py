"""Tensors that are spread over the ranks of a replica (DTensor): rank i sends its part, and rank i elsewhere takes it.

The local tensor travels, with the layout of the whole. The mesh does not travel: the receiver's own tensors tell which
of its meshes is meant. This module does not communicate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ftcomm.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor

DTensorLayout = tuple[tuple[int, ...], tuple[str, ...], str]  # shape of the whole, placements, the mesh's dimensions


def is_spread(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # a holder of such a tensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of this rank, detached; a plain tensor is its own part."""
    return tensor.detach().to_local() if is_spread(tensor) else tensor.detach()


def layout(tensor: Any) -> DTensorLayout | None:
    """Returns how a tensor is spread; None for a plain one. The number of replicas, which changes, is not in it."""
    if not is_spread(tensor):
        return None
    mesh = tensor.device_mesh
    dimensions = ",".join(mesh.mesh_dim_names or [str(mesh.ndim)])
    return tuple(tensor.shape), tuple(map(str, tensor.placements)), dimensions


def maker(like: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that makes a tensor, spread as `like` is, from another local part."""
    if not is_spread(like):
        return lambda part: part
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return lambda part: DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


class Meshes:
    """The meshes of the local tensors, to find the one to which an arriving tensor belongs."""

    def __init__(self, here: Iterable[Tensor]) -> None:
        self._known: dict[tuple[tuple[str, ...], str], Tensor] = {}
        for tensor in here:
            if (how := layout(tensor)) is not None:
                self._known.setdefault(how[1:], tensor)

    def whole(self, part: Tensor, how: DTensorLayout) -> Tensor:
        """Returns the whole tensor for a local part. Raises `StateError` if no tensor here is spread like that."""
        like = self._known.get(how[1:])
        if like is None:
            raise StateError(
                f"A tensor arrived that is spread as {', '.join(how[1])} over the mesh ({how[2]}), and none here is. "
                "Build the model with the same mesh and the same fully_shard calls on every replica."
            )
        import torch
        from torch.distributed.tensor import DTensor

        stride = torch.empty(how[0], device="meta").stride()
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(how[0]), stride=stride)
