"""Compiles the variants of the kernels of whole ops that the GPU tests and benches launch, on all cores at once.

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
from typing import Any, NamedTuple

from ftcomm.kernels.device.variant import COLLECTIVE_SCALARS, SCALARS
from ftcomm.kernels.dtypes import BITWISE

DEADLINE = 120.0  # s; of all that one core compiles


class WarmVariant(NamedTuple):
    dtype: str
    op: str
    members: int
    aligned: bool
    small: bool


def variants() -> list[WarmVariant]:
    """The variants of tests/gpu and of `ftcomm bench gpu-check`. Numbers of members that are not unrolled share one."""
    chosen = [*itertools.product(("float32", "bfloat16", "float16", "int32"), ("sum",), (2, 3, 4, 8), (True,))]
    chosen += [("bfloat16", "sum", 4, False), ("float32", "max", 8, True), ("bfloat16", "avg", 8, True)]
    # What travels as fp8 has a kernel for all numbers of members.
    chosen += [(dtype, "coded", 0, True) for dtype in ("float32", "bfloat16", "float16")]
    chosen += [("bfloat16", "coded", 0, False)]
    # Of collectives that are no all-reduce: what is moved, as wide as the dtype, then what is reduced.
    chosen += [(dtype, "moved", 1, dtype == "int64") for dtype in ("int64", "int32", "int16", "uint8")]
    chosen += [*itertools.product(("float32", "bfloat16"), ("scattered",), (2, 3, 8), (True,))]
    chosen += [("bfloat16", "scattered", 8, False)]
    bits = [WarmVariant(*each, 3, True, each[0] == "uint8") for each in itertools.product(("int32", "uint8"), BITWISE)]
    return [*(WarmVariant(*each, small) for small in (False, True) for each in chosen), *bits]


def compile_each(chosen: list[WarmVariant]) -> None:
    """Compile them as their first launch would, without launching. Prints a line of JSON for each."""
    import torch

    from ftcomm.collective.plan import GroupView
    from ftcomm.engines.base import CollectiveCall
    from ftcomm.engines.gpu_kernel.collective import CollectiveOperation
    from ftcomm.engines.gpu_kernel.launch import collective_variant, variant
    from ftcomm.engines.gpu_kernel.layout import CUDA
    from ftcomm.engines.gpu_kernel.operation import KernelOperation
    from ftcomm.kernels.device.allreduce import allreduce, collective
    from ftcomm.kernels.device.variant import compiled_for

    for one in chosen:
        began = time.monotonic()
        array = torch.empty(64, dtype=getattr(torch, one.dtype), device="cuda")
        members = tuple(range(max(1, one.members)))
        view = GroupView(1, 0, members, frozenset(members))
        address, size = (16 if one.aligned else array.element_size()), array.element_size()
        if one.op in ("moved", "scattered"):
            call = CollectiveCall("allgather", members, 0)
            if one.op == "scattered":
                call = call._replace(kind="reduce_scatter", op="sum")
            op = CollectiveOperation(call, array, array, one.dtype, 16, size, CUDA.chunk, (address, address))
            compiled = compiled_for(collective_variant(op, CUDA, view), one.small)
            collective.warmup(*([1 << 40] * len(COLLECTIVE_SCALARS)), grid=(1,), **compiled)
        else:
            how = ("sum", "fp8") if one.op == "coded" else (one.op, "input")
            operation = KernelOperation(array, one.dtype, how[0], CUDA.chunk, compression=how[1])
            compiled = compiled_for(variant(operation, address, CUDA, view), one.small)
            allreduce.warmup(*([1 << 40] * len(SCALARS)), grid=(1,), **compiled)
        print(json.dumps({**one._asdict(), "seconds": round(time.monotonic() - began, 1)}), flush=True)


def main(arguments: list[str]) -> None:
    if arguments:
        compile_each([WarmVariant(*one) for one in json.loads(arguments[0])])
        return
    cores = len(os.sched_getaffinity(0))

    def some(which: int) -> list[dict[str, Any]]:
        chosen = variants()[which::cores]
        command = [sys.executable, "-m", __spec__.name, json.dumps(chosen)]
        lazily = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"}  # so many contexts with all kernels take gigabytes each
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, env=lazily)
        except subprocess.TimeoutExpired as late:
            output = late.stdout.decode() if isinstance(late.stdout, bytes) else ""
            return [*_rows(output), {"error": f"not all compiled within {DEADLINE:g} s: {chosen}"}]
        errors = [line for line in done.stderr.splitlines() if "Error" in line][-1:] if done.returncode else []
        return [*_rows(done.stdout), *({"error": error} for error in errors)]

    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(cores) as pool:
        for found in pool.map(some, range(min(cores, len(variants())))):
            rows += found
            for row in found:
                print(*row.values(), flush=True)
    print(json.dumps(rows))
    if any("error" in row for row in rows):
        raise SystemExit(1)


def _rows(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main(sys.argv[1:])
