"""Process groups of ftcomm in the places where torchft's tests make gloo's: for torchft's own wrappers, and by the
contract of torch, natively. What a wrapper needs is what any process group needs there: a method that makes one."""

from __future__ import annotations

import types
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ReconfigureOptions
from torchft import reconfigure_test
from torchft.process_group import ProcessGroupBaby, ProcessGroupWrapper

from ftcomm.torch.reconfigure import ReconfigurableGroup

RESIZE = reconfigure_test._resize_worker


def made(store: Any, rank: int, size: int, seconds: float) -> ReconfigurableGroup:
    """One of `size` ranks that meet at the store. A store waits for what is not there yet."""
    group = ReconfigurableGroup(rank, size, seconds, name="torchft")
    store.set(f"ftcomm/{rank}", group.get_reconfigure_handle())
    opts = ReconfigureOptions()
    opts.uuid = 1
    opts.handles = [store.get(f"ftcomm/{peer}").decode() for peer in range(size)]
    opts.timeout = timedelta(seconds=60)
    group.reconfigure(opts).wait()
    return group


class ProcessGroupFtcomm(ProcessGroupWrapper):
    """In place of `ProcessGroupGloo`. gloo's ends when nobody refers to it; ours is shut down."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ReconfigurableGroup:
        return made(store, rank, world_size, self._timeout.total_seconds())

    def getBackendName(self) -> str:
        return "torchft-ftcomm"

    def abort(self, errored: bool = True) -> None:
        group = self._pg
        super().abort(errored)
        if group is not None:
            group.shutdown()

    def shutdown(self) -> None:
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()


class ProcessGroupBabyFtcomm(ProcessGroupBaby):
    """In place of `ProcessGroupBabyGloo`: in a process of its own."""

    @classmethod
    def _create_pg(cls, store: Any, rank: int, world_size: int) -> ReconfigurableGroup:
        return made(store, rank, world_size, 1800.0)

    def getBackendName(self) -> str:
        return "torchft-baby-ftcomm"


class Native(ReconfigurableGroup):
    """In place of a `dist.ProcessGroup` to which a backend of gloo is given: it needs none."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size, 1800.0, name="native")

    def _set_default_backend(self, backend: Any) -> None:
        pass

    def _register_backend(self, device: Any, kind: Any, backend: Any) -> None:
        pass


class Distributed(types.ModuleType):
    """torch.distributed, in which native groups are ours."""

    def __getattr__(self, name: str) -> Any:
        if name == "ProcessGroupGloo":
            return lambda *args, **more: None
        return Native if name == "ProcessGroup" else getattr(dist, name)


def resize(rank: int, port: int, backend: str) -> None:
    RESIZE(rank, port, "ftcomm")


def allow_long_starts() -> None:
    """The tests allow 10 s for the start of processes that import torch; a busy machine takes longer. With gloo too."""
    begin = ProcessGroupBaby.__init__

    def with_time(self: Any, timeout: float | timedelta = 60.0) -> None:
        begin(self, timeout)
        if self._timeout >= 10.0:
            self._timeout = 100.0

    ProcessGroupBaby.__init__ = with_time


def put(module: types.ModuleType) -> None:
    """Let the tests in a module of torchft make groups of ftcomm."""
    for name, ours in (("ProcessGroupGloo", ProcessGroupFtcomm), ("ProcessGroupBabyGloo", ProcessGroupBabyFtcomm)):
        if hasattr(module, name):
            setattr(module, name, ours)
    if module.__name__ == "torchft.manager_integ_test":
        module.dist = Distributed("torch.distributed")  # type: ignore[attr-defined]
    if module is reconfigure_test:
        module._resize_worker = resize  # type: ignore[attr-defined]
