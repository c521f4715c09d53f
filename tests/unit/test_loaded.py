"""How a kernel that Triton has loaded is launched. The driver is played here; what Triton compiles is looked at in
tests/kernels/test_compiled.py."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from triton import knobs

pytest.importorskip("cupy")  # an optional dependency; it imports without a driver
from ftcomm.engines.gpu import driver
from ftcomm.engines.gpu_kernel.loaded import LoadedKernel
from tests.launch_path import compiled

WORDS, SCALARS = (11, 12, 13), (1 << 47, 0, 3, -4, 5, 6, 0)
CONTEXT, STREAM = 1 << 41, 1 << 42


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h has it: 56 bytes."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared", "filling")),
        *((name, ctypes.c_uint64) for name in ("stream", "attributes")),
        ("count", ctypes.c_uint32),
    )


class Calls:
    """A driver that keeps what it is called with, and returns `error` of a launch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.error = 0
        counts = {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": 1, "cuLaunchKernelEx": 4}
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count)(getattr(self, name))
            for name, count in counts.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._functions[name]

    def cuGetErrorName(self, error: int, name: object) -> int:
        return 1

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        self.seen.append(("push", context))
        return 0

    def cuCtxPopCurrent_v2(self, context: int) -> int:
        self.seen.append("pop")
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        if self.error:
            return self.error
        of = Config.from_address(config)
        addresses = (ctypes.c_void_p * 12).from_address(parameters)
        values = tuple(ctypes.c_int64.from_address(address or 0).value for address in addresses)
        grid, block = (of.gx, of.gy, of.gz), (of.bx, of.by, of.bz)
        self.seen.append((function, grid, block, of.shared, of.stream, (of.attributes, of.count), extra, values))
        return 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    played = Calls()
    monkeypatch.setattr(driver, "_libcuda", lambda: played)
    return played


def loaded(kernel: Any) -> LoadedKernel:
    return LoadedKernel(driver.Pushed(ctypes.c_void_p(CONTEXT)), kernel, WORDS, len(SCALARS), (7, 8))


def test_it_is_launched_with_its_values(calls: Calls) -> None:
    """Each launch with its own, in the context of its GPU. Scratch memory, which it has none of, is nowhere."""
    kernel = loaded(compiled(10))
    kernel.launch(8, STREAM, SCALARS)
    kernel.launch(9, STREAM + 8, SCALARS[::-1])
    for programs, stream, scalars in ((8, STREAM, SCALARS), (9, STREAM + 8, SCALARS[::-1])):
        assert calls.seen.pop(0) == ("push", CONTEXT)
        launched = (1 << 40, (programs, 1, 1), (256, 1, 1), 64, stream, (0, 0), None, (*WORDS, *scalars, 0, 0))
        assert calls.seen.pop(0) == launched
        assert calls.seen.pop(0) == "pop"
    assert not calls.seen


def test_what_the_driver_refuses_is_said(calls: Calls) -> None:
    kernel = loaded(compiled(10))
    calls.error = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx: CUresult 700"):
        kernel.launch(8, STREAM, SCALARS)
    assert calls.seen == [("push", CONTEXT), "pop"]


class ByTriton:
    """What Triton has compiled, and launches itself."""

    def __init__(self, of: Any) -> None:
        self.function, self.metadata, self.asm = of.function, of.metadata, of.asm
        self.seen: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: self.seen.append((grid, arguments, stream))


EXPECTED = [((8, 1, 1), (*WORDS, *SCALARS, 7, 8), STREAM)]


@pytest.mark.parametrize(
    "asked",
    [
        {"num_ctas": 2},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_a_plain_launch_does_not_do_is_left_to_triton(asked: dict[str, int], calls: Calls) -> None:
    kernel = ByTriton(compiled(10, **asked))
    loaded(kernel).launch(8, STREAM, SCALARS)
    assert kernel.seen == EXPECTED
    assert calls.seen == [("push", CONTEXT), "pop"]


@pytest.mark.parametrize(
    ("there", "instead"),
    [(".u64 allreduce_param_4", ".u32 allreduce_param_4"), (".param .u64", ""), (".entry", "")],
    ids=["32 bits", "none", "no entry"],
)
def test_parameters_of_another_kind_are_left_to_triton(there: str, instead: str, calls: Calls) -> None:
    """As of a Triton that makes them in another way."""
    kernel = ByTriton(compiled(10))
    assert there in kernel.asm["ptx"]
    kernel.asm["ptx"] = kernel.asm["ptx"].replace(there, instead)
    loaded(kernel).launch(8, STREAM, SCALARS)
    assert kernel.seen == EXPECTED


def test_fewer_parameters_are_left_to_triton(calls: Calls) -> None:
    kernel = ByTriton(compiled(7))
    loaded(kernel).launch(8, STREAM, SCALARS)
    assert kernel.seen == EXPECTED


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_launches(hook: str, calls: Calls) -> None:
    kernel = ByTriton(compiled(10))
    launches = loaded(kernel)
    chain = getattr(knobs.runtime, hook)
    seen = lambda metadata: None  # noqa: E731
    chain.add(seen)
    try:
        launches.launch(8, STREAM, SCALARS)
    finally:
        chain.remove(seen)
    assert kernel.seen == EXPECTED
    launches.launch(8, STREAM, SCALARS)
    assert len(kernel.seen) == 1
