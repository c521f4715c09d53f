"""How many programs a kernel gets, of what tiles, and what a profiler is told."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.kernels.device.launch import operator, plan, work
from ftcomm.kernels.dtypes import BITWISE, DTYPES, OPS
from ftcomm.kernels.spans import MemorySpan
from tests.kernels.samples import PAIRS


def span(dtype: str, count: int, address: int = 4096) -> MemorySpan:
    return MemorySpan(address, count, dtype, "cpu")


@given(st.sampled_from(PAIRS), st.integers(1, 16), st.integers(1, 1 << 40), st.integers(1, 300))
def test_programs_and_tiles(pair: tuple[str, str], w: int, count: int, sms: int) -> None:
    launch = plan([span(pair[0], count)], w, pair[1], sms)
    tiles = -(-count // launch.BLOCK)
    assert launch.programs == min(sms, tiles)  # none without a tile, and no more than asked for
    assert launch.BLOCK.bit_count() == 1  # as tl.arange wants it
    specialised = launch.W
    assert specialised == (w if w in (1, 2, 4, 8) else 0)


def test_a_small_array_is_spread_over_the_sms_that_there_are() -> None:
    few, many = (plan([span("float32", 1 << 18)], 2, "sum", sms) for sms in (4, 128))
    assert few.programs == 4
    assert many.programs == 128
    assert many.BLOCK < few.BLOCK


def test_a_copy_without_a_cap_has_a_program_a_tile() -> None:
    launch = plan([span("float32", 1 << 24)], 1, "sum", None)
    assert launch.programs * launch.BLOCK == 1 << 24
    assert plan([span("float32", 1 << 24)], 1, "sum", 4).programs == 4


@pytest.mark.parametrize(("addresses", "aligned"), [((16, 4096), True), ((16, 4104), False), ((2, 2), False)])
def test_only_what_all_addresses_are_is_aligned(addresses: tuple[int, ...], aligned: bool) -> None:
    assert plan([span("int16", 100, address) for address in addresses], 1, "sum", None).ALIGNED is aligned


def test_bool_is_reduced_as_bytes() -> None:
    assert [OPS[operator("bool", op)] for op in ("sum", "max", "product", "min")] == ["max", "max", "min", "min"]
    assert [OPS[operator("bool", op)] for op in BITWISE] == [*BITWISE]
    assert [operator(dtype, "sum") for dtype in DTYPES if dtype != "bool"] == [0] * (len(DTYPES) - 1)


def test_a_profiler_is_told_the_bytes_moved() -> None:
    arguments = {"w": 3, "n": 1000, "T": tl.bfloat16}
    told = work((7, 1, 1), SimpleNamespace(name="reduce_kernel"), arguments)
    assert told == {"name": "reduce_kernel [w=3 n=1000 bf16 programs=7]", "bytes": (3 + 1) * 1000 * 2}


VARIANTS = """
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from ftcomm.kernels.device.reduce import reduce_kernel
from ftcomm.kernels.device.tile import unspecialised

backend = make_backend(GPUTarget("cuda", 90, 32))


def variants(kernel, *calls):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    constants = {parameter.name: 1 for parameter in kernel.params if parameter.is_constexpr}
    return len({str(bind(*call, **constants)[1]) for call in calls})


base = 0x7F0000000000
pairs = [unspecialised([base + i, base + 16 * i]) for i in (0, 1, 8, 15, 16, 31)]
print(variants(reduce_kernel, *[(pair, base + 8 * n, n, base + n, n, n) for pair in pairs for n in (1, 2, 3, 16)]))
"""


def test_one_variant_whatever_addresses_are_multiples_of() -> None:
    """Else each pattern of alignments would be compiled when it first comes, in the middle of an op. As Triton's own
    binder tells variants apart, in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", VARIANTS], env=environment, capture_output=True, text=True, timeout=230, check=False
    )
    assert done.stdout.split() == ["1"], done.stderr
