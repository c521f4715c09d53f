"""Measures what the host does for one launch of an all-reduce by a kernel, with a driver that does nothing.

    python -m tests.launch_path

It is what the interpreter does between `DeviceCore.launch` and the C code of PyTorch and of the driver: that is
replaced by functions which return at once, of the driver by one of C. So the figure is no time of a GPU, but the part
of the launch that is ours. It is the fastest of many, and bytecodes by function, which are the same on a machine with
any load.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import numpy as np
import torch

from ftcomm.collective.member import GroupMember
from ftcomm.collective.plan import GroupView
from ftcomm.collective.watchdog import Watchdog
from ftcomm.engines.gpu import driver
from ftcomm.engines.gpu_kernel import cuda
from ftcomm.engines.gpu_kernel.core import DeviceCore
from ftcomm.engines.gpu_kernel.launch import variant
from ftcomm.engines.gpu_kernel.layout import CUDA
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.kernels.device import words
from ftcomm.kernels.device.variant import SCALARS
from tests.bytecodes import bytecodes

VIEW = GroupView(1, 0, (0, 1), frozenset((0, 1)))


def compiled(scalars: int = len(SCALARS), **asked: int) -> Any:
    """What Triton returns of a kernel that it has launched."""
    plain = {"num_warps": 8, "num_ctas": 1, "shared": 64, "global_scratch_size": 0, "profile_scratch_size": 0}
    metadata = SimpleNamespace(**{**plain, "launch_cooperative_grid": False, "launch_pdl": False, **asked})
    parameters = [f".param .u64 allreduce_param_{i}" for i in range(scalars)]
    scratch = [f".param .u64 .ptr .global .align 1 allreduce_param_{scalars + i}" for i in range(2)]
    ptx = f".visible .entry allreduce(\n{','.join(parameters + scratch)}\n)\n.reqntid 256\n{{}}"
    return SimpleNamespace(function=1 << 40, metadata=metadata, asm={"ptx": ptx})


class Driver:
    """A driver whose functions, of C, succeed and do nothing."""

    def __getitem__(self, name: str) -> Any:
        return _C["fegetround"]  # whatever it is called with, 0; each time another object


_C = ctypes.CDLL("libm.so.6")


class _Array:
    """A tensor on a GPU, up to the C code of PyTorch."""

    def __init__(self, nbytes: int) -> None:
        self._tensor = torch.zeros(nbytes // 4)
        self.nbytes = nbytes
        self.data_ptr = self._tensor.data_ptr
        self.record_stream = lambda stream: None

    def __len__(self) -> int:
        return self._tensor.numel()


class _Event:
    def record(self, stream: object) -> None:
        pass


@contextlib.contextmanager
def core_without_driver() -> Iterator[DeviceCore]:
    """The core of a member on a GPU whose driver does nothing, with one other rank on that GPU."""
    device = cuda.CudaDevice.__new__(cuda.CudaDevice)
    stream: Any = SimpleNamespace(cuda_stream=7)
    device._index, device._multiprocessors, device._uuid = 0, 132, b"gpu"
    device._lock, device._captures = threading.Lock(), None
    device._op = stream
    device._peers = {"other": SimpleNamespace(export=SimpleNamespace(uuid=b"gpu"))}  # type: ignore[dict-item]
    device._count_programs()
    device._words = SimpleNamespace(addresses=(1, 2, 3))  # type: ignore[assignment]
    device._table = SimpleNamespace(words=range(cuda._TABLE))  # type: ignore[assignment]
    device._context, device._loaded = driver.Context.__new__(driver.Context), {}
    device.ctl = memoryview(np.zeros(words.CTL_WORDS, np.uint64))
    member = GroupMember[KernelOperation](0, Watchdog(1.0, 1.0, 1.0))
    with (
        mock.patch.object(driver, "_libcuda", Driver),
        mock.patch.object(torch.cuda, "Event", _Event),
    ):
        device._context.pushed = driver.Pushed(ctypes.c_void_p(1 << 40))
        yield DeviceCore(member, device)


def an_op(nbytes: int) -> KernelOperation:
    return KernelOperation(_Array(nbytes), "float32", "sum", CUDA.chunk)


def load(core: DeviceCore, op: KernelOperation) -> None:
    """Have the kernel of `op` loaded."""
    asked = variant(op, core.device.address(op.array), CUDA, VIEW)
    key = asked, cuda.small(op.nbytes)
    cuda._COMPILED[(0, *key)] = compiled()
    core.device._load(*key)


@click.command()
@click.option("--size", default=64 << 10, show_default=True, help="Bytes of the all-reduce.")
@click.option("--rounds", default=20_000, show_default=True, help="Launches, of which the fastest counts.")
def main(size: int, rounds: int) -> None:
    with core_without_driver() as core:
        op = an_op(size)
        load(core, op)
        launch, clock = core.launch, time.perf_counter_ns
        taken = []
        for _ in itertools.repeat(None, rounds):
            begun = clock()
            launch(op, VIEW)
            taken.append(clock() - begun)
        seen = bytecodes(lambda: launch(op, VIEW))
    for name, count in seen.most_common():
        click.echo(f"{count:5} {name}")
    click.echo(f"{seen.total():5} bytecodes in all, by {len(seen)} functions")
    taken.sort()
    click.echo(f"{taken[0] / 1e3:.2f} us the fastest of {rounds}, {taken[rounds // 2] / 1e3:.2f} us the median")


if __name__ == "__main__":
    main()
