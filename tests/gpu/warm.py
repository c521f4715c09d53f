"""Compiles the variants of the all-reduce kernel that the GPU tests and benches launch, on all cores at once.

    python -m tests.gpu.warm

A variant takes seconds on one core, and the first op that needs it waits for it. What is compiled lies in Triton's
cache, where the processes that come later find it. Nothing is launched; needs a GPU all the same, since the cache
depends on which it is.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ftcomm.kernels.dtypes import OPS

DEADLINE = 120.0  # s; of one variant


class Variant(NamedTuple):
    dtype: str
    op: str
    members: int
    aligned: bool


def variants() -> list[Variant]:
    """The variants of tests/gpu and of `ftcomm bench gpu-check`. Numbers of members that are not unrolled share one."""
    sums = itertools.product(("float32", "bfloat16", "float16", "int32"), ("sum",), (2, 3, 4, 8), (True,))
    return [
        *(Variant(*each) for each in sums),
        Variant("bfloat16", "sum", 4, False),
        Variant("float32", "max", 8, True),
    ]


def compile_one(variant: Variant) -> None:
    """Compile it as its first launch would, without launching."""
    import torch

    from ftcomm.collective.plan import GroupView
    from ftcomm.engines.gpu_kernel.launch import constants
    from ftcomm.engines.gpu_kernel.layout import CUDA
    from ftcomm.engines.gpu_kernel.operation import KernelOperation
    from ftcomm.kernels.device.allreduce import allreduce, compiled_for

    assert variant.op in OPS
    array = torch.empty(64, dtype=getattr(torch, variant.dtype), device="cuda")
    members = tuple(range(variant.members))
    view = GroupView(1, 0, members, frozenset(members))
    operation = KernelOperation(array, variant.dtype, variant.op, CUDA.chunk)
    compiled = compiled_for(constants(operation, 16 if variant.aligned else 2, CUDA, view))
    allreduce.warmup(*([1 << 40] * 10), grid=(1,), **compiled)


def main(arguments: list[str]) -> None:
    if arguments:
        compile_one(Variant(*json.loads(arguments[0])))
        return

    def one(variant: Variant) -> tuple[Variant, float, str]:
        began = time.monotonic()
        command = [sys.executable, "-m", __spec__.name, json.dumps(variant)]
        lazily = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"}  # so many contexts with all kernels take gigabytes each
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, env=lazily)
            said = [line for line in done.stderr.splitlines() if "Error" in line][-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            said = [f"not compiled within {DEADLINE:g} s"]
        return variant, round(time.monotonic() - began, 1), " ".join(said)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = []
        for variant, seconds, error in pool.map(one, variants()):
            rows.append({**variant._asdict(), "seconds": seconds, **({"error": error} if error else {})})
            print(*variant, f"{seconds} s", error, flush=True)
    print(json.dumps(rows))
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
