"""The group across replicas for torch programs: the same calls, and two cases that such programs do not know.

A replica that joins a running job runs its script from the top: it wraps its model in DDP, which broadcasts and
compares weights, and it waits at barriers, while the others train. So its calls before its first step boundary are for
it alone, and are answered as if all others had made the same call with the same data; it takes its state from them
later anyway.

While it catches up it has a rank like any other, and may be rank 0, from which DDP broadcasts buffers at every step.
They are then taken from the lowest rank that contributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ftcomm.errors import FtcommError, LostError, MismatchError
from ftcomm.groups.group_internals import Internals


class FinishedWork:
    """The result of `async_op=True` for a call that has ended already."""

    contributors: tuple[Any, ...] = ()

    def wait(self, timeout: float | None = None) -> None:
        pass

    def done(self) -> bool:
        return True


class Replicas:
    """The calls of `ftcomm.Group`, for torch tensors."""

    def __init__(self, group: Any, job: Internals) -> None:
        """`job`: the internals of the group of all."""
        self.group, self._job = group, job

    @property
    def roster(self) -> tuple[int, ...]:
        return self.group.roster  # type: ignore[no-any-return]

    @property
    def rank(self) -> int:
        return self.group.rank  # type: ignore[no-any-return]

    @property
    def alone(self) -> bool:
        """Whether this replica has joined a running job and has not come to its first boundary."""
        return self._job.outside

    @property
    def op_timeout(self) -> float:
        """The seconds until an op that stands still fails by itself."""
        return self._job.op_timeout

    def broadcast_state(self, x: torch.Tensor, root: int) -> None:
        """Broadcast `x` of `root`, which should be the same on all. If `root` is lost, or catches up and has nothing to
        give, it is that of the lowest rank that contributes, and if that is lost too, of the next."""
        if self.alone:
            return
        contributors = [self.roster.index(replica) for replica in self.group.contributors]
        own = x.detach().clone()
        for rank in [root] * (root in contributors) + [rank for rank in contributors if rank != root]:
            try:
                self.group.broadcast(x, rank)
                return
            except LostError:  # the same on all; part of `x` may have come
                x.detach().copy_(own)
        raise LostError(f"replica {self.group.replica}: all who could give buffers of the model were lost")

    def repeats_step_after(self, error: Exception) -> bool:
        """Whether the step loop repeats a step in which members have made different calls, after one has failed. DDP,
        which cannot be stopped halfway, then has to end the step as usual."""
        tell = self._job.on_step_error
        if tell is None or not isinstance(error, MismatchError):
            return False
        tell(error)
        return True

    def allreduce(
        self, x: torch.Tensor, op: str = "sum", *, async_op: bool = False, compression: str | None = None
    ) -> Any:
        return (
            self.group.allreduce(x, op, async_op=async_op, compression=compression)
            if not self.alone
            else _done(async_op)
        )

    def broadcast(self, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        return self.group.broadcast(x, root, async_op=async_op) if not self.alone else _done(async_op)

    def reduce(self, x: torch.Tensor, root: int, op: str = "sum", *, async_op: bool = False) -> Any:
        return self.group.reduce(x, root, op, async_op=async_op) if not self.alone else _done(async_op)

    def barrier(self, *, async_op: bool = False) -> Any:
        return self.group.barrier(async_op=async_op) if not self.alone else _done(async_op)

    def allgather(self, out: torch.Tensor, x: torch.Tensor, *, async_op: bool = False) -> Any:
        if not self.alone:
            return self.group.allgather(out, x, async_op=async_op)
        for part in self._parts(out):
            part.copy_(x.reshape(-1))
        return _done(async_op)

    def gather(self, out: torch.Tensor | None, x: torch.Tensor, root: int, *, async_op: bool = False) -> Any:
        if not self.alone:
            return self.group.gather(out, x, root, async_op=async_op)
        return self.allgather(out, x, async_op=async_op) if out is not None else _done(async_op)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        if not self.alone:
            return self.group.reduce_scatter(out, x, op, async_op=async_op)
        out.copy_(self._own(x).view(out.shape))
        return _done(async_op)

    def scatter(self, out: torch.Tensor, x: torch.Tensor | None, root: int, *, async_op: bool = False) -> Any:
        if not self.alone:
            return self.group.scatter(out, x, root, async_op=async_op)
        if x is not None:
            out.copy_(self._own(x).view(out.shape))
        return _done(async_op)

    def alltoall(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        in_counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        if not self.alone:
            return self.group.alltoall(out, x, out_counts, in_counts, async_op=async_op)
        raise self._too_early("alltoall")

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        if self.alone:
            raise self._too_early("send")
        return self.group.send(x, dst, tag, async_op=async_op)

    def recv(self, x: torch.Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False) -> Any:
        if self.alone:
            raise self._too_early("recv")
        return self.group.recv(x, src, tag, async_op=async_op)

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = x.view(len(self.roster), -1).unbind()
        return parts

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        return self._parts(x)[self.rank]

    def _too_early(self, call: str) -> FtcommError:
        return FtcommError(
            f"replica {self.group.replica} has joined a running job, and called {call} before its first step: the "
            "others are in the middle of theirs and cannot answer. Call it within the step loop (ftcomm.steps)."
        )


def _done(async_op: bool) -> FinishedWork | None:
    return FinishedWork() if async_op else None
