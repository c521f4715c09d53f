"""What `tests.kernels.compiled` compiles: each kernel with the types and constants with which it is launched.

A kernel more is a case more. Constants come from where launches take them, so that what is looked at is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import triton.language as tl

from ftcomm.kernels.device.allreduce import allreduce, collective
from ftcomm.kernels.device.launch import plan
from ftcomm.kernels.device.reduce import reduce_kernel
from ftcomm.kernels.device.variant import (
    COLLECTIVE_SCALARS,
    MOVED,
    REDUCED,
    SCALARS,
    CollectiveVariant,
    Variant,
    compiled_for,
)
from ftcomm.kernels.dtypes import OPS
from ftcomm.kernels.spans import MOST_SOURCES, MemorySpan

_LARGE = 1 << 28  # elements: as many as any tile wants
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")  # of the compiler, among a launch's constants


class KernelCase(NamedTuple):
    kernel: str
    name: str
    function: Any
    types: Mapping[str, Any]  # of arguments, as Triton writes them, or a tuple of such
    constants: Mapping[str, Any]  # arguments that are compiled in, and options of the compiler
    loops: int = 0  # main loops that there are at least
    unfenced: int | None = None  # main loops that may lie before all fences; None: no matter
    twice: int = 0  # main loops that lie behind two at least
    signals: int = 0  # releases at system scope that there are at least
    waits: int = 0  # fences or acquiring loads likewise
    local: int = 0  # bytes a thread that may lie in local memory
    coded: int = 0  # main loops that only move codes of fp8, four at a time: others move elements on one side at least
    typical: bool = False  # of its kernel: one whose text for another target tells as much as that of all
    crowded: bool = False  # of its kernel: one that needs the most registers

    @property
    def portable(self) -> bool:
        return not self.signals and not self.waits

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.constants.items() if name in _OPTIONS}

    @property
    def constexprs(self) -> dict[str, Any]:
        return {name: value for name, value in self.constants.items() if name not in _OPTIONS}


def cases() -> Iterator[KernelCase]:
    yield from _reductions()
    yield from _allreduces()
    yield from _coded()
    yield from _collectives()


# ---- arrays -------------------------------------------------------------------------------------------------------


def _constants(dtype: str, w: int, op: str) -> dict[str, Any]:
    """Of a launch for large arrays that begin at multiples of 16 bytes."""
    return plan([MemorySpan(0, _LARGE, dtype, "cuda:0")], w, op, sms=1).constants()


def _reductions() -> Iterator[KernelCase]:
    """Of one source: a copy."""
    chosen = [(w, "bfloat16", "sum") for w in (1, 2, 4, 8, 3)] + [(w, "float32", "sum") for w in (2, 4, 8, 3)]
    chosen += [(4, "float16", "avg"), (4, "float32", "max"), (2, "float64", "avg"), (4, "int64", "avg")]
    chosen += [(4, "int8", "sum"), (8, "int8", "avg"), (2, "int32", "product"), (1, "uint8", "max")]
    chosen += [(4, "uint8", "bxor"), (3, "int64", "band")]
    for w, dtype, op in chosen:
        constants = _constants(dtype, w, op)
        types = {
            "sources": ("i64",) * (constants["W"] or MOST_SOURCES),
            "rows": "i64",
            "w": "i32",
            "out": "i64",
            "n": "i64",
            "divisor": "i32",
        }
        name = f"{w if constants['W'] else 'any'} {dtype} {op}"
        typical = dtype in ("bfloat16", "float32") and w == 4
        yield KernelCase("reduce", name, reduce_kernel, types, constants, loops=1, typical=typical)


# ---- the all-reduce -----------------------------------------------------------------------------------------------


def _allreduces() -> Iterator[KernelCase]:
    chosen = [(2, tl.bfloat16, "sum"), (4, tl.bfloat16, "sum"), (8, tl.bfloat16, "avg"), (0, tl.float32, "sum")]
    for w, T, op, small in (*((*each, False) for each in chosen), (8, tl.bfloat16, "avg", True)):
        constants = compiled_for(Variant(T, OPS.index(op), w, True, 64, 256 << 10, 64 << 10, False), small)
        # Posting reads what is the caller's, or its copy; a holder's chunk and the posted inputs lie behind one wait,
        # the reduced shards behind two.
        yield KernelCase(
            "allreduce",
            f"{w or 'any'} {T} {op}{' small' * small}",
            allreduce,
            dict.fromkeys(SCALARS, "i64"),
            constants,
            loops=4,
            unfenced=1,
            twice=1,
            signals=6,  # BEGUN, POSTED, REDUCED, TAKEN, RETURNED, FINISHED
            waits=2,
            typical=w == 2,
        )


def _coded() -> Iterator[KernelCase]:
    """An all-reduce whose elements travel as fp8: inputs are encoded, and copied where a chunk is handed on, in front
    of all waits; the records of all are reduced behind one, and decoded behind two."""
    chosen = (
        (tl.float32, "sum", False),
        (tl.bfloat16, "avg", False),
        (tl.float16, "sum", False),
        (tl.float32, "sum", True),
    )
    for T, op, small in chosen:
        yield KernelCase(
            "allreduce",
            f"fp8 {T} {op}{' small' * small}",
            allreduce,
            dict.fromkeys(SCALARS, "i64"),
            compiled_for(Variant(T, OPS.index(op), 0, True, 64, 256 << 10, 64 << 10, True), small),
            loops=5,
            local=8,  # on sm_80 with Triton 3.7; none with 3.6 and 3.9
            coded=1,
            unfenced=2,
            twice=1,
            signals=6,
            waits=2,
            crowded=op == "avg",
        )


def _collectives() -> Iterator[KernelCase]:
    """The rows that a member gives it reads in front of all waits, and takes those of others behind one."""
    for name, T, op, w, rows in (("moved", tl.int64, "sum", 1, MOVED), ("reduced", tl.bfloat16, "avg", 8, REDUCED)):
        yield KernelCase(
            "collective",
            f"{w} {T} {op} {name}",
            collective,
            dict.fromkeys(COLLECTIVE_SCALARS, "i64"),
            compiled_for(CollectiveVariant(T, OPS.index(op), w, True, 64, 256 << 10, rows), False),
            loops=2 if rows == MOVED else 3,
            unfenced=1,
            signals=5,  # BEGUN, POSTED, TAKEN, RETURNED, FINISHED
            waits=2,
            typical=rows == MOVED,
            crowded=rows == MOVED,
        )
