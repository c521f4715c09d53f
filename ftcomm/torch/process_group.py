"""`dist.ProcessGroup` over groups of ftcomm: its members, its calls as calls of a group, and when it ends.

It derives from ProcessGroup and not from Backend, because only the former can change its size: every call asks the
group beneath for rank and size, which change at step boundaries with its roster.

torch has several names for some calls, newer and older. Both are here, because callers look for either. Where torch
takes a list of tensors and ftcomm one array, the tensors are packed into one and copied out at the end: an op of many
small messages costs more than a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftcomm.errors import ArgumentError, FtcommError
from ftcomm.torch import monitored
from ftcomm.torch.ddp import adapt, called_by_autograd, called_by_ddp, kept_buckets, raised_by_backward
from ftcomm.torch.grid import Grid
from ftcomm.torch.options import counts, options_of, rooted
from ftcomm.torch.replicas import Replicas
from ftcomm.torch.submission import Submission, seen_by_profilers
from ftcomm.torch.tensors import equal_sizes, fit, joined, one, reals, reduction, rescale, spread
from ftcomm.torch.versions import device_types
from ftcomm.torch.work import FtWork, WorkPart

Tensors: TypeAlias = Sequence[torch.Tensor] | torch.Tensor


class FtProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group. Do not make one: `dist.init_process_group("ftcomm")` and `dist.new_group` do.

    `calls` is the group beneath, `end` is called once when this is shut down, and `split` makes a group of some of its
    ranks.
    """

    supports_reconfigure = False
    supports_splitting = True
    supports_coalescing = False
    options = None  # a group that is split off has none

    def __init__(
        self,
        calls: Any,
        timeout: float,
        *,
        name: str,
        end: Callable[[], None] = lambda: None,
        split: Callable[[FtProcessGroup, Sequence[int], float, str | None], FtProcessGroup | None] | None = None,
    ) -> None:
        self._submission, self._end, self._split = Submission(calls, timeout, name), end, split
        super().__init__(self.rank(), self.size())
        adapt(FtProcessGroup)
        self._desc = "undefined"
        self.splits = 0  # how often a group was split off

    # -- who is in it ------------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return int(self._submission.group.rank)

    def size(self) -> int:
        return len(self._submission.group.roster)

    def getRank(self) -> int:
        return self.rank()

    def getSize(self) -> int:
        return self.size()

    def name(self) -> str:
        return "ftcomm"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        return self._submission.name

    def getGroupName(self) -> str:
        return self._submission.name

    def _set_group_name(self, name: str) -> None:
        self._submission.name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    def _get_backend(self, device: torch.device) -> FtProcessGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return device_types()

    # -- groups of it ------------------------------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> FtProcessGroup | None:
        """Make the group of `ranks` of this one for `dist.split_group`, as `dist.new_group` does; None on other
        ranks."""
        self._alive()
        assert self._split is not None, "a group that cannot be split overrides this"
        made = self._split(
            self, ranks, self._submission.timeout if timeout is None else timeout.total_seconds(), group_name
        )
        if made is not None and group_desc is not None:
            made._set_group_desc(group_desc)
        return made

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing. `dist.new_group` calls it on ranks outside of the group, which no rank waits for."""

    def get_group_store(self) -> dist.Store:
        """Returns torch's store for the group, which ftcomm does not use."""
        return c10d._get_default_store()

    def merge_remote_group(self, *args: Any, **more: Any) -> Any:
        raise FtcommError(
            f"process group {self.group_name!r} cannot be merged with another (merge_remote_group): who takes part is "
            "what its job says. Start the processes as replicas of one job (ftcomm run --replicas); they come and go "
            "while the others train."
        )

    # -- how long ----------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self._submission.timeout = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        self._submission.sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._submission.sequence

    def shutdown(self) -> None:
        """End the group, for `dist.destroy_process_group`; idempotent."""
        self._submission.close("it was destroyed (dist.destroy_process_group)", self._end)

    def abort(self) -> None:
        """End the group, for `dist._abort_process_group`; idempotent."""
        self._submission.close("it was aborted", self._end)

    # -- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None) -> FtWork:
        opts = options_of(opts, c10d.AllreduceOptions, timeout)
        by_ddp = called_by_autograd()
        work = self._allreduce([one(tensors, "all_reduce")], opts, by_ddp)
        if by_ddp:
            raised_by_backward(work)
        return work

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> FtWork:
        return self._allreduce(list(tensors), options_of(opts, c10d.AllreduceCoalescedOptions))

    def _allreduce(self, tensors: list[torch.Tensor], opts: Any, by_ddp: bool = False) -> FtWork:
        op, factor = reduction(opts.reduceOp)
        parts: list[WorkPart] = []
        for x in tensors:
            if factor is not None:
                x.mul_(factor)
        if by_ddp and op == "sum" and tensors[0].is_floating_point():
            return self._average_of(tensors[0], opts)
        for x in tensors:
            parts += self._call(opts, len(tensors) == 1, "allreduce", reals(x, op), op)
        return self._work("all_reduce", parts, tensors, opts)

    def average(self, bucket: torch.Tensor, compression: str) -> FtWork:
        """Average over the contributors, in place. torch has no such call, see `ftcomm.torch.hooks`."""
        self._alive()
        with seen_by_profilers("allreduce"):
            part = self._submission.group.allreduce(bucket, "avg", async_op=True, compression=compression)
        return self._work("average", [part], [bucket], None)

    def _average_of(self, bucket: torch.Tensor, opts: Any) -> FtWork:
        """Average what DDP has divided by the size of the group: members that were lost since, or catch up, gave
        nothing."""
        self._alive()
        grid = isinstance(self._submission.group, Grid)
        with seen_by_profilers("allreduce"):
            part = self._submission.group.allreduce(bucket, async_op=True, **({"average_of": True} if grid else {}))
        if grid:
            return self._work("all_reduce", [part], [bucket], opts)
        size = self.size()
        finish = lambda: rescale(bucket, part.contributors, size)  # noqa: E731
        return self._work("all_reduce", [part], [bucket], opts, finish)

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: timedelta | None = None, root: int = 0
    ) -> FtWork:
        opts = rooted(opts, c10d.ReduceOptions, root, timeout)
        x = one(tensors, "reduce")
        name, factor = reduction(opts.reduceOp if op is None else op)
        y = x if factor is None or self.rank() == opts.rootRank else x.clone()
        if factor is not None:
            y.mul_(factor)
        return self._work("reduce", self._call(opts, True, "reduce", reals(y, name), opts.rootRank, name), [x], opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Any], opts: Any = None, timeout: timedelta | None = None
    ) -> FtWork:
        opts = options_of(opts, c10d.ReduceScatterOptions, timeout)
        out = one(outputs, "reduce_scatter")
        pieces: Sequence[torch.Tensor] = inputs if isinstance(outputs, torch.Tensor) else inputs[0]
        self._expect(len(pieces), "reduce_scatter", "inputs")
        if equal_sizes(pieces):
            fit(self.rank(), "reduce_scatter", "input", pieces, out.numel(), out.dtype)
            return self._reduce_scatter([out], [joined(pieces)], opts, "reduce_scatter")
        fit(self.rank(), "reduce_scatter", "input for this rank,", [pieces[self.rank()]], out.numel(), out.dtype)
        op, factor = reduction(opts.reduceOp)
        copies = [piece.clone() if factor is None else piece * factor for piece in pieces]
        parts: list[WorkPart] = []
        for root, x in enumerate(copies):
            parts += self._call(opts, False, "reduce", reals(x, op), root, op)
        return self._work("reduce_scatter", parts, [out], opts, lambda: _fill(out, copies[self.rank()]))

    def reduce_scatter_single(
        self, out: torch.Tensor, x: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> FtWork:
        opts = options_of(opts, c10d.ReduceScatterOptions, timeout)
        return self._reduce_scatter([out], [x], opts, "reduce_scatter_single")

    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> FtWork:
        opts = options_of(opts, c10d.ReduceScatterOptions)
        return self._reduce_scatter(list(outputs), list(inputs), opts, "reduce_scatter_single")

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any, name: str) -> FtWork:
        op, factor = reduction(opts.reduceOp)
        for out, x in zip(outputs, inputs, strict=True):
            fit(self.rank(), name, "input", [x], out.numel() * self.size(), out.dtype)
        parts: list[WorkPart] = []
        for out, x in zip(outputs, inputs, strict=True):
            y = x if factor is None else x * factor
            at_once = len(inputs) == 1
            parts += self._call(opts, at_once, "reduce_scatter", reals(out, op), reals(y, op), op)
        return self._work(name, parts, outputs, opts)

    # -- data that moves ---------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, root: int = 0) -> FtWork:
        opts = rooted(opts, c10d.BroadcastOptions, root, timeout)
        x = one(tensors, "broadcast")
        by_ddp = called_by_ddp()
        if by_ddp is None or not isinstance(self._submission.group, (Grid, Replicas)):
            return self._work("broadcast", self._call(opts, True, "broadcast", x, opts.rootRank), [x], opts)
        self._alive()
        if not kept_buckets(by_ddp, x):  # otherwise it is weights or buffers, alike on all ranks
            self._submission.group.broadcast_state(x, opts.rootRank)
        return self._work("broadcast", [], [x], opts)

    def allgather(
        self, outputs: Sequence[Any], inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> FtWork:
        opts = options_of(opts, c10d.AllgatherOptions, timeout)
        x = one(inputs, "all_gather")
        pieces: Sequence[torch.Tensor] = outputs if isinstance(inputs, torch.Tensor) else outputs[0]
        return self._allgather([list(pieces)], [x], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> FtWork:
        # torch has a list for each rank here, with a tensor for each input
        lists = [[of_rank[place] for of_rank in outputs] for place in range(len(inputs))]
        return self._allgather(lists, list(inputs), options_of(opts, c10d.AllgatherOptions))

    def _allgather(self, lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> FtWork:
        parts: list[WorkPart] = []
        copies: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for x, pieces in zip(inputs, lists, strict=True):
            self._expect(len(pieces), "all_gather", "outputs")
            alike = equal_sizes(pieces)
            fit(self.rank(), "all_gather", "output", pieces if alike else [pieces[self.rank()]], x.numel(), x.dtype)
        for x, pieces in zip(inputs, lists, strict=True):
            if equal_sizes(pieces):
                flat = torch.empty(len(pieces) * x.numel(), dtype=x.dtype, device=x.device)
                parts += self._call(opts, len(inputs) == 1, "allgather", flat, x)
                copies.append((flat, pieces))
                continue
            _fill(pieces[self.rank()], x)
            for root, piece in enumerate(pieces):
                parts += self._call(opts, False, "broadcast", piece, root)

        def finish() -> None:
            for flat, pieces in copies:
                spread(flat, pieces)

        return self._work("all_gather", parts, [y for pieces in lists for y in pieces], opts, finish)

    def all_gather_single(
        self, out: torch.Tensor, x: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> FtWork:
        return self.all_gather_single_coalesced([out], [x], options_of(opts, c10d.AllgatherOptions, timeout))

    _allgather_base = all_gather_into_tensor = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> FtWork:
        opts = options_of(opts, c10d.AllgatherOptions)
        for out, x in zip(outputs, inputs, strict=True):
            fit(self.rank(), "all_gather_single", "output", [out], x.numel() * self.size(), x.dtype)
        parts: list[WorkPart] = []
        for out, x in zip(outputs, inputs, strict=True):
            parts += self._call(opts, len(inputs) == 1, "allgather", out, x)
        return self._work("all_gather_single", parts, list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: Sequence[Any],
        inputs: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int = 0,
    ) -> FtWork:
        opts = rooted(opts, c10d.GatherOptions, root, timeout)
        x = one(inputs, "gather")
        if self.rank() != opts.rootRank:
            return self._work("gather", self._call(opts, True, "gather", None, x, opts.rootRank), [], opts)
        pieces: list[torch.Tensor] = list(outputs if isinstance(inputs, torch.Tensor) else outputs[0])
        self._expect(len(pieces), "gather", "outputs")
        fit(self.rank(), "gather", "output", pieces, x.numel(), x.dtype)
        flat = torch.empty(len(pieces) * x.numel(), dtype=x.dtype, device=x.device)
        parts = self._call(opts, True, "gather", flat, x, opts.rootRank)
        return self._work("gather", parts, pieces, opts, lambda: spread(flat, pieces))

    def gather_single(
        self, out: torch.Tensor, x: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> FtWork:
        opts = rooted(opts, c10d.GatherOptions, 0, timeout)
        root = self.rank() == opts.rootRank
        if root:
            fit(self.rank(), "gather_single", "output", [out], x.numel() * self.size(), x.dtype)
        parts = self._call(opts, True, "gather", out if root else None, x, opts.rootRank)
        return self._work("gather_single", parts, [out] if root else [], opts)

    gather_into_tensor = gather_single

    def scatter(
        self,
        outputs: Tensors,
        inputs: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int = 0,
    ) -> FtWork:
        opts = rooted(opts, c10d.ScatterOptions, root, timeout)
        out = one(outputs, "scatter")
        flat = None
        if self.rank() == opts.rootRank:
            pieces: Sequence[torch.Tensor] = inputs if isinstance(outputs, torch.Tensor) else inputs[0]
            self._expect(len(pieces), "scatter", "inputs")
            fit(self.rank(), "scatter", "input", pieces, out.numel(), out.dtype)
            flat = joined(pieces)
        return self._work("scatter", self._call(opts, True, "scatter", out, flat, opts.rootRank), [out], opts)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> FtWork:
        opts = options_of(opts, c10d.AllToAllOptions, timeout)
        fit(self.rank(), "all_to_all_single", "output", [out], out.numel(), x.dtype)
        sizes = [counts(y, splits, self.size()) for y, splits in ((out, out_splits), (x, in_splits))]
        even = not out_splits and not in_splits
        parts = self._call(opts, True, "alltoall", out, x, *([None, None] if even else sizes))
        return self._work("all_to_all_single", parts, [out], opts)

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> FtWork:
        opts = options_of(opts, c10d.AllToAllOptions, timeout)
        self._expect(len(outputs), "all_to_all", "outputs")
        self._expect(len(inputs), "all_to_all", "inputs")
        for y in (*outputs, *inputs):
            fit(self.rank(), "all_to_all", "tensor", [y], y.numel(), inputs[0].dtype)
        x = joined(inputs)
        out_counts, in_counts = [y.numel() for y in outputs], [y.numel() for y in inputs]
        out = torch.empty(sum(out_counts), dtype=x.dtype, device=x.device)
        parts = self._call(opts, True, "alltoall", out, x, out_counts, in_counts)
        return self._work("all_to_all", parts, list(outputs), opts, lambda: spread(out, outputs))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> FtWork:
        opts = options_of(opts, c10d.BarrierOptions, timeout)
        return self._work("barrier", self._call(opts, True, "barrier"), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks have called it; see `ftcomm.torch.monitored`."""
        self._alive()
        seconds = self._submission.timeout if timeout is None else timeout.total_seconds()
        with seen_by_profilers("monitored_barrier"):
            monitored.barrier(self._submission.group, seconds, wait_all_ranks)

    # -- from one to one ---------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> FtWork:
        x = one(tensors, "send")
        self._alive()
        with seen_by_profilers("send"):
            return self._work("send", [self._submission.group.send(x, dst, tag, async_op=True)], [x], None)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> FtWork:
        x = one(tensors, "recv")
        self._alive()
        with seen_by_profilers("recv"):
            return self._work("recv", [self._submission.group.recv(x, src, tag, async_op=True)], [x], None)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> FtWork:
        x = one(tensors, "recv")
        self._alive()
        with seen_by_profilers("recvAnySource"):
            return self._work("recv", [self._submission.group.recv(x, None, tag, async_op=True)], [x], None)

    def _start_coalescing(self, device: torch.device) -> None:
        self._submission.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> FtWork:
        return self._submission.end_coalescing()

    # -- how ---------------------------------------------------------------------------------------------------------

    def _call(self, opts: Any, at_once: bool, call: str, *args: Any) -> list[WorkPart]:
        self._alive()
        return self._submission.call(opts, at_once, call, *args)

    def _work(self, name: str, parts: Sequence[WorkPart], *rest: Any) -> FtWork:
        return self._submission.work(name, parts, *rest)

    def _alive(self) -> None:
        """Raise if no call is possible."""
        self._submission.check()

    def _expect(self, count: int, name: str, what: str) -> None:
        if count != self.size():
            raise ArgumentError(f"{name} got {count} {what} in a group of {self.size()}; expected one for each rank.")


def _fill(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x.view(out.shape))
