"""The world of a job whose replicas have several ranks: all collectives over replicas x ranks of each.

               rank of a replica  0     1
    replica 0                     0 --- 1    --    a static group inside the replica: its ranks live and die together
                                  |     |    |     the group across replicas, which survives
    replica 1                     2 --- 3

An op is one inside the replica and one across: an all-reduce is a reduce-scatter inside, an all-reduce of the own part
across and an all-gather inside. So a loss has the same effect here as across: a sum goes on without the lost replica,
and what needs its data fails, on all survivors.

The steps of an op need a thread, so the ops of a grid run in its own thread, in the order of the calls. Both groups are
the grid's own: the calls of its thread have no order relative to those of the script.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ftcomm.errors import ArgumentError, CollectiveTimeout, LostError
from ftcomm.process.turn import Series, Turn
from ftcomm.torch.replicas import Replicas
from ftcomm.torch.tensors import rescale


class GridTurn:
    """An op of a grid that was called: the result of `async_op=True`. All methods from any thread."""

    def __init__(self, op: Callable[[], None], when: tuple[int, int]) -> None:
        self.when = when  # the stamp of the call
        self._op: Callable[[], None] | None = op
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.series: Series | None = None  # the asynchronous calls of its thread

    def run(self) -> None:
        """Run the op, once, in the thread of the grid."""
        assert self._op is not None
        try:
            self._op()
        except BaseException as error:
            self._error = error
        self._op = None  # keep no buffers of callers
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        if not self._over.wait(timeout):
            raise CollectiveTimeout(
                f"an op over all ranks of all replicas has not ended within {timeout:g} s; it goes on"
            )
        if self._error is not None:
            raise self._error
        if self.series is not None:
            self.series.check()


class Grid:
    """The calls of a group, for torch tensors, over all ranks of all replicas, those of a replica one after the other.

    `across` is a group of this rank and the same rank of all replicas, and `inside` one of the ranks of this replica;
    only the grid calls anything on them. `when` stamps the calls of a thread, see `Internals`, and ops are compared by
    that. Results are the same with and without `async_op`; errors come from `wait`.
    """

    op_timeout = math.inf  # s until an op that stands still fails; the ops beneath do so

    def __init__(self, across: Replicas, inside: Any, when: Callable[[], tuple[int, int]]) -> None:
        self._across, self._inside, self._when = across, inside, when
        self._shards: int = len(inside.roster)
        self._turns: queue.SimpleQueue[GridTurn | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # started with the first op
        self._starting = threading.Lock()  # guards that
        self._order: Turn[GridTurn] = Turn(GridTurn.done)  # the order of callers; beneath, only `_thread` calls

    @property
    def roster(self) -> tuple[int, ...]:
        return tuple(range(len(self._across.roster) * self._shards))

    @property
    def rank(self) -> int:
        return self._across.rank * self._shards + int(self._inside.rank)

    def repeats_step_after(self, error: Exception) -> bool:
        return self._across.repeats_step_after(error)

    def close(self) -> None:
        """End the thread. Both groups were closed before, so no op lasts. Idempotent; does not block."""
        if self._thread is not None:
            self._turns.put(None)

    def _in_turn(self, async_op: bool, op: Callable[[], None]) -> GridTurn | None:
        """Run `op` after all earlier calls. Raises `ArgumentError` if another thread calls meanwhile."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="ftcomm-grid", daemon=True)
                    self._thread.start()
        turn, order = GridTurn(op, self._when()), self._order
        if async_op:
            turn.series = order.start(turn)
            self._turns.put(turn)
            return turn
        order.run(self._wait_for, turn)
        return None

    def _wait_for(self, turn: GridTurn) -> None:
        self._turns.put(turn)
        turn.wait()

    def _run(self) -> None:
        while (turn := self._turns.get()) is not None:
            self._across.group.internals.called = turn.when
            turn.run()
            del turn

    # -- calls -------------------------------------------------------------------------------------------------------

    def broadcast_state(self, x: torch.Tensor, root: int) -> None:
        """Broadcast state, as `Replicas` does: first inside each replica, then each rank to the same rank of the
        others."""
        replica, shard = divmod(root, self._shards)

        def op() -> None:
            self._inside.broadcast(x, shard)
            self._across.broadcast_state(x, replica)

        self._in_turn(False, op)

    def allreduce(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        async_op: bool = False,
        average_of: bool = False,
        compression: str | None = None,
    ) -> Any:
        """Reduce. With `average_of`, `x` was already divided by the number of ranks, and the sum has to become the
        average over the contributors. `compression` applies between replicas; the ranks of one are near each other."""
        return self._in_turn(async_op, lambda: self._allreduce(x, op, average_of, compression))

    def _allreduce(self, x: torch.Tensor, op: str, average_of: bool = False, compression: str | None = None) -> None:
        flat = x.detach().contiguous().view(-1)
        inner = "sum" if op == "avg" else op
        if flat.numel() % self._shards or not flat.numel():
            self._inside.allreduce(flat, inner)
            self._over(flat, op, average_of, compression)
        else:
            part = torch.empty(flat.numel() // self._shards, dtype=x.dtype, device=x.device)
            self._inside.reduce_scatter(part, flat, inner)
            self._over(part, op, average_of, compression)
            self._inside.allgather(flat, part)
        if op == "avg":
            flat.copy_(flat / self._shards if x.is_floating_point() else flat // self._shards)
        if flat.data_ptr() != x.data_ptr():
            x.detach().copy_(flat.view(x.shape))

    def _over(self, part: torch.Tensor, op: str, average_of: bool, compression: str | None) -> None:
        work = self._across.allreduce(part, op, async_op=True, compression=compression)
        work.wait()
        if average_of:
            rescale(part, work.contributors, len(self._across.roster))

    def reduce(self, x: torch.Tensor, root: int, op: str = "sum", *, async_op: bool = False) -> Any:
        def reduce() -> None:
            y = x.detach().clone()
            self._allreduce(y, op)
            if self.rank == root:
                x.detach().copy_(y)

        return self._in_turn(async_op, reduce)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        def reduce() -> None:
            replicas = len(self._across.roster)
            by_shard = x.detach().reshape(replicas, self._shards, -1).transpose(0, 1).contiguous()
            part = torch.empty(replicas * out.numel(), dtype=x.dtype, device=x.device)
            self._inside.reduce_scatter(part, by_shard.view(-1), "sum" if op == "avg" else op)
            y = torch.empty(out.numel(), dtype=x.dtype, device=x.device)
            self._across.reduce_scatter(y, part, op)
            if op == "avg":
                y.copy_(y / self._shards if x.is_floating_point() else y // self._shards)
            out.detach().copy_(y.view(out.shape))

        return self._in_turn(async_op, reduce)

    def broadcast(self, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        return self._in_turn(async_op, lambda: self._broadcast(x, root))

    def _broadcast(self, x: torch.Tensor, root: int) -> None:
        replica, shard = divmod(root, self._shards)
        if self.rank // self._shards == replica:
            self._inside.broadcast(x, shard)
        self._agree("broadcast", lambda: self._across.broadcast(x, replica))

    def allgather(self, out: torch.Tensor, x: torch.Tensor, *, async_op: bool = False) -> Any:
        return self._in_turn(async_op, lambda: self._allgather(out, x))

    def _allgather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        block = torch.empty(self._shards * x.numel(), dtype=x.dtype, device=x.device)
        self._inside.allgather(block, x)
        self._agree("allgather", lambda: self._across.allgather(out, block))

    def gather(self, out: torch.Tensor | None, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        everything = torch.empty(len(self.roster) * x.numel(), dtype=x.dtype, device=x.device) if out is None else out
        return self.allgather(everything, x, async_op=async_op)

    def scatter(self, out: torch.Tensor, x: torch.Tensor | None, root: int, *, async_op: bool = False) -> Any:
        def scatter() -> None:
            size = len(self.roster) * out.numel()
            everything = x if x is not None else torch.empty(size, dtype=out.dtype, device=out.device)
            self._broadcast(everything, root)
            out.detach().copy_(everything.reshape(len(self.roster), -1)[self.rank].view(out.shape))

        return self._in_turn(async_op, scatter)

    def alltoall(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        in_counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        return self._in_turn(async_op, lambda: self._alltoall(out, x, out_counts, in_counts))

    def _alltoall(
        self, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None, in_counts: Sequence[int] | None
    ) -> None:
        """Send what is for rank `p` of any replica to rank `p` of this one, and from there across: an element moves at
        most twice. `counts[i][j]` elements go from rank `i` to rank `j`."""
        size, me, shards = len(self.roster), self.rank, self._shards
        replicas, here = range(size // shards), me % shards
        own = range(me - here, me - here + shards)  # the ranks of this replica
        counts = self._counts(out, x, out_counts, in_counts)
        pieces = x.detach().reshape(-1).split(counts[me])
        first = [pieces[r * shards + p] for p in range(shards) for r in replicas]
        given = [sum(counts[me][r * shards + p] for r in replicas) for p in range(shards)]
        taken = [[counts[i][r * shards + here] for r in replicas] for i in own]
        there = torch.empty(sum(map(sum, taken)), dtype=x.dtype, device=x.device)
        self._inside.alltoall(there, torch.cat(first), list(map(sum, taken)), given)
        parts = there.split([count for row in taken for count in row])  # from each rank, for each replica
        second = torch.cat([parts[p * len(replicas) + r] for r in replicas for p in range(shards)])
        given = [sum(row[r] for row in taken) for r in replicas]
        came = [sum(counts[r * shards + p][me] for p in range(shards)) for r in replicas]
        y = torch.empty(out.numel(), dtype=x.dtype, device=x.device)
        self._agree("alltoall", lambda: self._across.alltoall(y, second, came, given))
        out.detach().copy_(y.view(out.shape))

    def _counts(
        self, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None, in_counts: Sequence[int] | None
    ) -> list[list[int]]:
        """Returns the number of elements from each rank to each: equal, or as all have said."""
        size, me = len(self.roster), self.rank
        if not in_counts and not out_counts and x.numel() == out.numel() and not x.numel() % size:
            return [[x.numel() // size] * size] * size
        mine = torch.tensor(in_counts if in_counts else [x.numel() // size] * size)
        told = torch.empty(size * size, dtype=mine.dtype)
        self._allgather(told, mine)
        counts = told.view(size, size)
        expected = list(out_counts) if out_counts else [out.numel() // size] * size
        fits = torch.tensor([int(counts[:, me].tolist() == expected)])
        everybody = fits.clone()
        self._allreduce(everybody, "min")
        if not fits.item():
            raise ArgumentError(f"alltoall: rank {me} expects {expected} elements, and gets {counts[:, me].tolist()}")
        if not everybody.item():
            raise ArgumentError("alltoall: another rank expects other numbers of elements than it gets; it says which")
        return counts.tolist()  # type: ignore[no-any-return]

    def barrier(self, *, async_op: bool = False) -> Any:
        def barrier() -> None:
            self._inside.barrier()
            self._across.barrier()
            self._inside.barrier()  # every rank has met the same rank of the others

        return self._in_turn(async_op, barrier)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        group, rank = self._way(dst)
        return group.send(x, rank, tag, async_op=async_op)

    def recv(self, x: torch.Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False) -> Any:
        if src is None:
            raise ArgumentError("recv from any rank of replicas x ranks is not possible; name the rank it comes from")
        group, rank = self._way(src)
        return group.recv(x, rank, tag, async_op=async_op)

    def _way(self, rank: int) -> tuple[Any, int]:
        """Returns the group that has both this rank and `rank`, and the place of `rank` there."""
        replica, shard = divmod(rank, self._shards)
        mine, here = divmod(self.rank, self._shards)
        if shard == here:
            return self._across, replica
        if replica == mine:
            return self._inside, shard
        raise ArgumentError(
            f"rank {self.rank} and rank {rank} share neither the replica nor the place in it; make a group of both "
            "(dist.new_group) and send there"
        )

    def _agree(self, call: str, across: Callable[[], Any]) -> None:
        """Run the part of an op that can fail across. If it fails on one rank of the replica, it fails on all."""
        lost: LostError | None = None
        try:
            across()
        except LostError as error:
            lost = error
        failed = torch.tensor([int(lost is not None)], dtype=torch.uint8)
        self._inside.allreduce(failed, "max")
        if failed.item():
            raise lost or LostError(f"{call}: a replica was lost whose data another rank of this replica still needed")
