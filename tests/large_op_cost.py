"""Prints what large all-reduces take of a rank's processor: `ftcomm run --replicas 4 -m tests.large_op_cost torch`.

In place of `torch`, whose tensors begin 64 bytes into a page: `numpy`, whose arrays begin 16 bytes into one, or `gloo`.
Beside it `perf record -a -e cpu-clock` says which part of that is copies, sums, interpreter and kernel.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ftcomm
from ftcomm.settings import Settings

ELEMENTS = 1 << 24  # float32, so 64 MB
OPS = 40


def main(library: str) -> None:
    settings = Settings.from_env()
    array = np.ones(ELEMENTS, np.float32) if library == "numpy" else torch.ones(ELEMENTS)
    if library == "gloo":
        torch.set_num_threads(1)
        place = Path(tempfile.gettempdir()) / f"large_op_cost.{os.getppid()}"  # of the launcher, whose job this is
        dist.init_process_group("gloo", f"file://{place}", rank=settings.replica, world_size=settings.replicas)

        def op() -> None:
            dist.all_reduce(array, dist.ReduceOp.MAX)
    else:
        ftcomm.init()

        def op() -> None:
            ftcomm.allreduce(array, "max")

    for _ in range(5):
        op()
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(OPS):
        op()
    after, took = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - begin
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    each = [f"{1e3 * seconds / OPS:.1f} ms" for seconds in (took, user, system)]
    print("{}: {} an op; processor {} user, {} system".format(library, *each))
    if library == "gloo":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
