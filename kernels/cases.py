"""What `ftcomm.kernels.compiled` compiles: each kernel with the types and constants with which it is launched.

A kernel more is a case more. Constants come from where launches take them, so that what is looked at is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import triton.language as tl

from ftcomm.kernels.check import MOST_SOURCES, Span
from ftcomm.kernels.device.allreduce import allreduce, compiled_for, gate
from ftcomm.kernels.device.copy import copy_kernel
from ftcomm.kernels.device.launch import element, plan
from ftcomm.kernels.device.quantise import constants as quantised_constants
from ftcomm.kernels.device.quantise import dequantise_kernel, quantise_kernel, reduce_kernel
from ftcomm.kernels.device.reduce import reduce_kernel as plain_reduce_kernel
from ftcomm.kernels.device.signal import signal_kernel, wait_kernel
from ftcomm.kernels.dtypes import OPS

_LARGE = 1 << 28  # elements: as many as any tile wants
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")  # of the compiler, among a launch's constants
_LINE = ":16"  # behind the type of an argument: a multiple of 16, as Triton finds when it is launched


class Case(NamedTuple):
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

    @property
    def portable(self) -> bool:
        return not self.signals and not self.waits

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.constants.items() if name in _OPTIONS}

    @property
    def constexprs(self) -> dict[str, Any]:
        return {name: value for name, value in self.constants.items() if name not in _OPTIONS}


def cases(converts: bool) -> Iterator[Case]:
    """`converts`: for a device that converts E4M3 itself."""
    yield from _copies()
    yield from _reductions()
    yield from _quantisations(converts)
    yield from _signals()
    yield from _allreduces()


# ---- arrays -------------------------------------------------------------------------------------------------------


def _constants(dtype: str, w: int, op: str) -> dict[str, Any]:
    """Of a launch for large arrays that begin at multiples of 16 bytes."""
    return plan([Span("array", 0, _LARGE, dtype, "cuda:0")], w, op, sms=1).constants()


def _copies() -> Iterator[Case]:
    for name, dtype, outs in (("bf16", "bfloat16", 1), ("uint8", "uint8", 1), ("forward bf16", "bfloat16", 2)):
        types = {"sources": ("i64",), "w": "i32", "outs": ("i64",) * outs, "n": "i64"}
        yield Case("copy", name, copy_kernel, types, {**_constants(dtype, 1, "sum"), "STREAM": True}, loops=1)


def _reductions() -> Iterator[Case]:
    chosen = [(w, "bfloat16", "sum", 1) for w in (2, 4, 8, 3)]
    chosen += [(w, "float32", "sum", 1) for w in (2, 4, 8, 3)]
    chosen += [(4, "float16", "avg", 1), (4, "float32", "max", 1), (2, "float64", "avg", 1), (4, "int64", "avg", 1)]
    chosen += [(4, "int8", "sum", 1), (8, "int8", "avg", 1), (2, "int32", "product", 1), (2, "bfloat16", "avg", 2)]
    for w, dtype, op, outs in chosen:
        constants = {**_constants(dtype, w, op), "STREAM": True}
        types = {
            "sources": ("i64",) * (constants["W"] or MOST_SOURCES),
            "rows": "i64",
            "w": "i32",
            "outs": ("i64",) * outs,
            "n": "i64",
            "divisor": "i32",
        }
        name = f"{w if constants['W'] else 'any'} {dtype} {op}{' copy' * (outs > 1)}"
        yield Case("reduce", name, plain_reduce_kernel, types, constants, loops=1)


# ---- quantised ----------------------------------------------------------------------------------------------------


def _quantisations(converts: bool) -> Iterator[Case]:
    for kind in ("fp8", "int8"):
        for dtype in ("bfloat16", "float32"):
            bits = "*i32" if dtype == "float32" else "*i16"
            source = "*fp32" if dtype == "float32" else "*u16"
            constants = {**quantised_constants(converts), "FP8": kind == "fp8", "T": element(dtype)}
            types = {"x": source + _LINE, "payload": "*i8" + _LINE, "scales": "*fp32", "count": "i64"}
            yield Case("quantise", f"{dtype} {kind}", quantise_kernel, types, constants, loops=1)
            types = {"payload": "*i8" + _LINE, "scales": "*fp32", "out": bits + _LINE, "count": "i64"}
            yield Case("dequantise", f"{kind} {dtype}", dequantise_kernel, types, constants, loops=1)
        for w in (2, 4, 8, MOST_SOURCES):
            types = {
                "payloads": ("*i8" + _LINE,) * w,
                "scales": ("*fp32",) * w,
                "w": "i32",
                "payload": "*i8" + _LINE,
                "out_scales": "*fp32",
                "blocks": "i64",
            }
            any_number = w == MOST_SOURCES
            constants = quantised_constants(converts, any_number)
            constants |= {"FP8": kind == "fp8", "W": w, "ANY": any_number, "AVG": False}
            name = f"{'any' if any_number else w} {kind}"
            yield Case("quantised reduce", name, reduce_kernel, types, constants, loops=1)


# ---- signals, and the all-reduce ----------------------------------------------------------------------------------


def _signals() -> Iterator[Case]:
    one = {"num_warps": 1, "enable_fp_fusion": False}
    yield Case("signal", "", signal_kernel, dict.fromkeys(("flag", "value"), "i64"), one, signals=1)
    words = ("flag", "low", "high", "abort", "expected", "deadline_ns", "status")
    yield Case("wait", "", wait_kernel, dict.fromkeys(words, "i64"), {**one, "THREADS": 32}, signals=1, waits=1)
    yield Case("gate", "", gate, dict.fromkeys(("ctl", "state"), "i64"), {**one, "THREADS": 32}, waits=1)


def _allreduces() -> Iterator[Case]:
    scalars = ("ctl", "state", "view", "array", "tasks", "ntasks", "count", "call", "template", "only", "deadline_ns")
    launch = {"ALIGNED": True, "LANES": 64, "CHUNK": 256 << 10, "ONE_SHOT": 64 << 10}
    for w, T, op in ((2, tl.bfloat16, "sum"), (4, tl.bfloat16, "sum"), (8, tl.bfloat16, "avg"), (0, tl.float32, "sum")):
        constants = compiled_for({**launch, "T": T, "OP": OPS.index(op), "W": w})
        # Posting reads what is the caller's; a holder's chunk and the posted inputs lie behind one wait, the reduced
        # shards behind two.
        yield Case(
            *("allreduce", f"{w or 'any'} {T} {op}", allreduce, dict.fromkeys(scalars, "i64"), constants),
            loops=4,
            unfenced=1,
            twice=1,
            signals=4,  # POSTED, REDUCED, TAKEN, RETURNED
            waits=2,
        )
