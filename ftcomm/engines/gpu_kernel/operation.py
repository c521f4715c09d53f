"""An op that a kernel runs: an all-reduce. `ftcomm.engines.gpu_kernel.collective` has all others."""

from __future__ import annotations

from typing import Any

from ftcomm.collective.operation import Operation, call_of, outline_of
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import Task
from ftcomm.errors import ArgumentError
from ftcomm.kernels.call_codes import COMPRESSIONS
from ftcomm.kernels.dtypes import unsupported


class KernelOperation(Operation):
    """`array` is any flat array of a device, which has checked it and keeps the copy for an atomic op; chunks are of
    `chunk` bytes of it. `max_sms`: programs that may run it at once; None: as many as pay."""

    tasks: tuple[Task, ...]
    template = -1  # by which a device names its launch, see ftcomm.engines.gpu_kernel.graphs

    def __init__(
        self,
        array: Any,
        dtype: str,
        op: str,
        chunk: int,
        atomic: bool = False,
        compression: str = COMPRESSIONS[0],
        max_sms: int | None = None,
    ) -> None:
        call_of(dtype, op, compression)  # raises for what cannot be reduced
        if reason := unsupported(dtype, op):
            raise ArgumentError(f"hosts can do this, kernels that run whole ops (gpu-kernel) cannot: {reason}")
        self.max_sms = max_sms
        self.atomic = atomic
        outline = outline_of(dtype, op, compression, atomic, len(array), chunk, True)
        super().__init__(array, dtype, op, compression=compression, outline=outline)

    def prepare(self, view: GroupView) -> None:
        """Plan it for the view in which it is called."""

    def took(self, task: Task, view: GroupView) -> None:
        """Note that this member has taken `task`."""
        self.finals[task.chunk] = task.contributors or view.contributors
