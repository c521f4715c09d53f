"""Knows the collectives as a measurement needs them: sizes, bandwidths, bytes that have to be moved, right results.

A size is that of nccl-tests: of the whole array, the one that holds the data of all ranks where there are two.

    allreduce, broadcast, reduce    the array on each rank
    allgather, gather               the result, n parts        reduce_scatter, scatter     the input, n parts
    alltoall                        the input of one rank, and its result
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ftcomm.bench.data import PERIOD, Pattern

ROOT = 0
OUT, IN = "out", "in"  # of place: the input stays, or is (part of) the result


@dataclasses.dataclass(frozen=True)
class Collective:
    """Factors are of the size, for n ranks."""

    name: str
    busbw: Callable[[int], float]  # over algbw, as in nccl-tests
    moved: Callable[[int], float]  # out of place, by all ranks: inputs read once and results written once
    reduces: bool = False
    rooted: bool = False
    parts: bool = False  # the array is one part for each rank
    places: tuple[str, ...] = (OUT, IN)

    def bytes_moved(self, ranks: int, place: str) -> float:
        """The bytes that a rank moves. In place it need not write what is where it belongs."""
        own = {"allgather": 1.0, "broadcast": 1.0}.get(self.name, 0.0) if place == IN else 0.0
        return self.moved(ranks) - own


COLLECTIVES = {
    one.name: one
    for one in (
        Collective("allreduce", lambda n: 2 * (n - 1) / n, lambda n: 2.0 * n, reduces=True),
        Collective("allgather", lambda n: (n - 1) / n, lambda n: 1.0 + n, parts=True),
        Collective("reduce_scatter", lambda n: (n - 1) / n, lambda n: 1.0 + n, reduces=True, parts=True),
        Collective("alltoall", lambda n: (n - 1) / n, lambda n: 2.0 * n, parts=True, places=(OUT,)),
        Collective("broadcast", lambda n: 1.0, lambda n: 1.0 + n, rooted=True, places=(IN,)),
        Collective("reduce", lambda n: 1.0, lambda n: 1.0 + n, reduces=True, rooted=True, places=(IN,)),
        Collective("gather", lambda n: (n - 1) / n, lambda n: 2.0, rooted=True, parts=True, places=(OUT,)),
        Collective("scatter", lambda n: (n - 1) / n, lambda n: 2.0, rooted=True, parts=True, places=(OUT,)),
    )
}


class Case:
    """One collective of one size on one rank: its arrays, what to put into them, and what is wrong with the result.

    `x` is the input and `out` the result; the same array if the collective works in place, and each None on ranks that
    have none. `count` is that of the whole array.
    """

    def __init__(
        self, collective: Collective, pattern: Pattern, rank: int, count: int, place: str, device: str = "cpu"
    ) -> None:
        self.collective, self.pattern, self.rank, self.place = collective, pattern, rank, place
        self.ranks = pattern.ranks
        self.part = count // self.ranks
        name, at_root = collective.name, rank == ROOT

        def new(elements: int) -> torch.Tensor:
            return torch.empty(elements, dtype=getattr(torch, pattern.dtype), device=device)

        mine = slice(rank * self.part, (rank + 1) * self.part)
        self.x: torch.Tensor | None
        self.out: torch.Tensor | None
        if name in ("allreduce", "broadcast", "reduce"):
            self.x = new(count)
            self.out = self.x if place == IN else new(count)
        elif name == "allgather":
            self.out = new(count)
            self.x = self.out[mine] if place == IN else new(self.part)
        elif name == "reduce_scatter":
            self.x = new(count)
            self.out = self.x[mine] if place == IN else new(self.part)
        elif name == "alltoall":
            self.x, self.out = new(count), new(count)
        elif name == "gather":
            self.x, self.out = new(self.part), new(count) if at_root else None
        else:
            self.x, self.out = new(count) if at_root else None, new(self.part)

    @property
    def repeats(self) -> bool:
        """Whether op after op gives the first one's result again. In place, a reduction feeds on its own."""
        return self.place == OUT or not self.collective.reduces

    def fill(self) -> None:
        """The input, and into the result what no right one holds."""
        if self.out is not None:
            self.out.view(torch.uint8).fill_(0x7E)
        if self.x is not None and (self.collective.name != "broadcast" or self.rank == ROOT):
            self.pattern.fill(self.x, self.rank)

    def wrong(self, ops: int) -> int:
        """Elements of the result that are not what `ops` in a row give; of in-place reductions but all-reduces, one."""
        name, out = self.collective.name, self.out
        if out is None or (name == "reduce" and self.rank != ROOT):
            return 0
        if name in ("allreduce", "reduce"):
            return self.pattern.wrong(out, ops if self.place == IN else 1)
        if name == "reduce_scatter":
            return self.pattern.wrong(out, 1, self.rank * self.part)
        if name == "broadcast":
            return self._differs(out, ROOT, 0)
        if name == "scatter":
            return self._differs(out, ROOT, self.rank * self.part)
        start = self.rank * self.part if name == "alltoall" else 0
        return sum(self._differs(part, rank, start) for rank, part in enumerate(out.split(self.part)))

    def _differs(self, found: torch.Tensor, rank: int, start: int) -> int:
        """Counts the elements that differ from those of the input of `rank`, from `start` on."""
        row = self.pattern.tensor(self.pattern.row(rank)).to(found.device).roll(-(start % PERIOD))
        whole = found.numel() // PERIOD * PERIOD
        bad = int((found[:whole].view(-1, PERIOD) != row).sum())
        return bad + int((found[whole:] != row[: found.numel() - whole]).sum())
