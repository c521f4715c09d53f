"""The world of a job whose replicas have several ranks: all collectives over replicas x ranks of each.

      rank of a replica     0    1
    replica 0               0 -- 1     --  a fixed group inside the replica: its ranks live and die together
                            |    |     |   the group across replicas, which survives
    replica 1               2 -- 3

An op is one inside the replica and one across: an all-reduce is a reduce-scatter inside, an all-reduce of the own part
across and an all-gather inside. So a lost replica does here what it does across: a sum goes on without it, and what
needs its data fails, on all survivors. These are calls of a program as a whole (a loss to print, a barrier, an object
from rank 0); the heavy ones of a training run on the two dimensions of the mesh themselves. So they are simple, and run
in the caller's thread even with `async_op`, which keeps their order among the calls on the dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ftcomm.errors import ArgumentError, LostError
from ftcomm.torch.replicas import Done, Replicas
from ftcomm.torch.tensors import rescale


class Grid:
    """The calls of a group, for torch tensors, over all ranks of all replicas, those of a replica one after the other.

    `across` is the group of this rank with its likes in all replicas, `inside` that of the ranks of this replica.
    """

    def __init__(self, across: Replicas, inside: Any) -> None:
        self._across, self._inside = across, inside
        self._shards: int = len(inside.roster)

    @property
    def roster(self) -> tuple[int, ...]:
        return tuple(range(len(self._across.roster) * self._shards))

    @property
    def me(self) -> int:
        return self._across.roster.index(self._across.me) * self._shards + int(self._inside.me)

    def broadcast_state(self, x: torch.Tensor, root: int) -> None:
        """See `Replicas`. Each rank takes it from its likes, after the ranks of each replica have made theirs alike."""
        replica, shard = divmod(root, self._shards)
        self._inside.broadcast(x, shard)
        self._across.broadcast_state(x, replica)

    def allreduce(self, x: torch.Tensor, op: str = "sum", *, async_op: bool = False, average_of: bool = False) -> Any:
        """`average_of`: `x` is divided by the number of ranks already; the sum is to be the average of those who
        contributed."""
        flat = x.detach().contiguous().view(-1)
        inner = "sum" if op == "avg" else op
        if flat.numel() % self._shards or not flat.numel():
            self._inside.allreduce(flat, inner)
            self._over(flat, op, average_of)
        else:
            part = torch.empty(flat.numel() // self._shards, dtype=x.dtype, device=x.device)
            self._inside.reduce_scatter(part, flat, inner)
            self._over(part, op, average_of)
            self._inside.all_gather(flat, part)
        if op == "avg":
            flat.copy_(flat / self._shards if x.is_floating_point() else flat // self._shards)
        if flat.data_ptr() != x.data_ptr():
            x.detach().copy_(flat.view(x.shape))
        return _ended(async_op)

    def _over(self, part: torch.Tensor, op: str, average_of: bool) -> None:
        work = self._across.allreduce(part, op, async_op=True)
        work.wait()
        if average_of:
            rescale(part, work.contributors, len(self._across.roster))

    def reduce(self, x: torch.Tensor, root: int, op: str = "sum", *, async_op: bool = False) -> Any:
        y = x.detach().clone()
        self.allreduce(y, op)
        if self.me == root:
            x.detach().copy_(y)
        return _ended(async_op)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        replicas = len(self._across.roster)
        by_shard = x.detach().reshape(replicas, self._shards, -1).transpose(0, 1).contiguous()
        part = torch.empty(replicas * out.numel(), dtype=x.dtype, device=x.device)
        self._inside.reduce_scatter(part, by_shard.view(-1), "sum" if op == "avg" else op)
        y = torch.empty(out.numel(), dtype=x.dtype, device=x.device)
        self._across.reduce_scatter(y, part, op)
        if op == "avg":
            y.copy_(y / self._shards if x.is_floating_point() else y // self._shards)
        out.detach().copy_(y.view(out.shape))
        return _ended(async_op)

    def broadcast(self, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        replica, shard = divmod(root, self._shards)
        if self.me // self._shards == replica:
            self._inside.broadcast(x, shard)
        self._agree("broadcast", lambda: self._across.broadcast(x, replica))
        return _ended(async_op)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, *, async_op: bool = False) -> Any:
        block = torch.empty(self._shards * x.numel(), dtype=x.dtype, device=x.device)
        self._inside.all_gather(block, x)
        self._agree("all_gather", lambda: self._across.all_gather(out, block))
        return _ended(async_op)

    def gather(self, out: torch.Tensor | None, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        everything = torch.empty(len(self.roster) * x.numel(), dtype=x.dtype, device=x.device) if out is None else out
        return self.all_gather(everything, x, async_op=async_op)

    def scatter(self, out: torch.Tensor, x: torch.Tensor | None, root: int, *, async_op: bool = False) -> Any:
        everything = x if x is not None else torch.empty(len(self.roster) * out.numel(), dtype=out.dtype)
        self.broadcast(everything, root)
        out.detach().copy_(everything.reshape(len(self.roster), -1)[self.me].view(out.shape))
        return _ended(async_op)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        in_counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Everybody gets everything and takes its own, so it moves as many times more as there are ranks."""
        size, me = len(self.roster), self.me
        mine = torch.tensor(in_counts if in_counts else [x.numel() // size] * size)
        counts = torch.empty(size * size, dtype=mine.dtype)
        self.all_gather(counts, mine)
        counts = counts.view(size, size)
        expected = list(out_counts) if out_counts else [out.numel() // size] * size
        if counts[:, me].tolist() != expected:
            raise ArgumentError(f"all_to_all: rank {me} expects {expected} elements, and gets {counts[:, me].tolist()}")
        most = int(counts.sum(1).max())
        padded = torch.zeros(most, dtype=x.dtype, device=x.device)
        padded[: x.numel()] = x.detach().reshape(-1)
        everything = torch.empty(size * most, dtype=x.dtype, device=x.device)
        self.all_gather(everything, padded)
        starts = counts.cumsum(1) - counts
        rows = zip(everything.view(size, most), starts[:, me].tolist(), expected, strict=True)
        out.detach().copy_(torch.cat([row[start : start + count] for row, start, count in rows]).view(out.shape))
        return _ended(async_op)

    def barrier(self, *, async_op: bool = False) -> Any:
        self._inside.barrier()
        self._across.barrier()
        self._inside.barrier()  # every rank has met its likes
        return _ended(async_op)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        group, rank = self._way(dst)
        return group.send(x, rank, tag, async_op=async_op)

    def recv(self, x: torch.Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False) -> Any:
        if src is None:
            raise ArgumentError("recv from any rank of replicas x ranks is not possible; name the rank it comes from")
        group, rank = self._way(src)
        return group.recv(x, rank, tag, async_op=async_op)

    def _way(self, rank: int) -> tuple[Any, int]:
        """The group in which both we and `rank` are, and its rank there."""
        replica, shard = divmod(rank, self._shards)
        mine, here = divmod(self.me, self._shards)
        if shard == here:
            return self._across, replica
        if replica == mine:
            return self._inside, shard
        raise ArgumentError(
            f"rank {self.me} and rank {rank} share neither the replica nor the place in it; make a group of both "
            "(dist.new_group) and send there"
        )

    def _agree(self, call: str, across: Callable[[], Any]) -> None:
        """Each rank of the replica has made its part of an op that can fail across: it has if one of them has."""
        lost: LostError | None = None
        try:
            across()
        except LostError as error:
            lost = error
        failed = torch.tensor([int(lost is not None)], dtype=torch.uint8)
        self._inside.allreduce(failed, "max")
        if failed.item():
            raise lost or LostError(f"{call}: a replica was lost whose data another rank of this replica still needed")


def _ended(async_op: bool) -> Done | None:
    return Done() if async_op else None
