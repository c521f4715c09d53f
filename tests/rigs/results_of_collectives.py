"""What the collectives that are no all-reduce come to, for tests that run them by kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("reduce", "reduce_scatter")


Counts = Sequence[Sequence[int]]  # of an alltoall of unequal parts: elements from each rank to each


def lengths(kind: str, size: int, count: int, rank: int, root: int, counts: Counts = ()) -> tuple[int, int]:
    """Returns the elements that a rank gives and those of its result, `count` of each rank; one array in a broadcast
    and a reduce."""
    if counts:
        return sum(counts[rank]), sum(row[rank] for row in counts)
    whole, at_root = count * size, rank == root
    given = {"alltoall": whole, "reduce_scatter": whole, "scatter": whole * at_root, "barrier": 0}.get(kind, count)
    taken = {"allgather": whole, "alltoall": whole, "gather": whole * at_root, "barrier": 0}.get(kind, count)
    return given, taken


def wanted(
    kind: str, inputs: Sequence[torch.Tensor], count: int, rank: int, root: int, who: Sequence[int],
    reduced: Callable[[list[torch.Tensor]], torch.Tensor], counts: Counts = (),
) -> torch.Tensor:  # fmt: skip
    """Returns the result of a rank. The ranks `who` contribute to what is reduced, by `reduced`."""
    if counts:
        return torch.cat([x.split(list(row))[rank] for x, row in zip(inputs, counts, strict=True)])
    mine = slice(rank * count, (rank + 1) * count)
    if kind == "broadcast":
        return inputs[root]
    if kind == "reduce":
        return reduced([inputs[i].clone() for i in who]) if rank == root else inputs[rank]
    if kind == "allgather" or (kind == "gather" and rank == root):
        return torch.cat(list(inputs))
    if kind == "scatter":
        return inputs[root][mine]
    if kind == "alltoall":
        return torch.cat([x[mine] for x in inputs])
    if kind == "reduce_scatter":
        return reduced([inputs[i][mine].clone() for i in who])
    return inputs[rank][:0]
