"""Reductions that a kernel makes for an exchange of the host, against the host's, bit for bit, wherever arrays lie."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from ftcomm.engines.gpu_reduce.reducer import DeviceReducer
from ftcomm.kernels.device import INTERPRETED
from ftcomm.kernels.dtypes import DTYPES, HOST_DTYPES, OPS, unsupported
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.kernels.spans import MemorySpan

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

from ftcomm.engines.gpu_reduce.interpreted import InterpretedReduceDevice

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # the interpreter's, of overflow
]

WITH_ALL = ("bfloat16", "bool", "complex64", "float32", "int32")
PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if unsupported(dtype, op) is None]
SIZE = 1 << 16  # bytes of a mapping


class Watched(InterpretedReduceDevice):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def map(self, address: int, nbytes: int) -> None:
        self.said.append(("map", address))
        super().map(address, nbytes)

    def unmap(self, address: int) -> None:
        self.said.append(("unmap", address))
        super().unmap(address)

    def scratch(self, nbytes: int) -> tuple[int, int]:
        self.said.append(("scratch", nbytes))
        return super().scratch(nbytes)

    def reduce(self, spans: list[MemorySpan], w: int, op: str, divisor: int | None) -> None:
        self.said.append(("reduce", spans[0].dtype))
        super().reduce(spans, w, op, divisor)


class Mapping:
    """Memory as a transport has it; arrays are carved out of it, one behind the other."""

    def __init__(self) -> None:
        self.buffer = memoryview(mmap.mmap(-1, SIZE))
        self._bytes = np.frombuffer(self.buffer, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._used = 0

    def put(self, array: np.ndarray, shift: int = 0) -> np.ndarray:
        """A copy of it here, `shift` elements behind a cache line."""
        begin = -(-self._used // 64) * 64 + shift * array.itemsize
        self._used = begin + array.nbytes
        there = self._bytes[begin : self._used].view(array.dtype)
        there[...] = array
        return there


def given(dtype: str, count: int, seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    if dtype == "bfloat16":
        return (chance.normal(0, 100, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    carrier = HOST_DTYPES[dtype].carrier
    if dtype == "bool":
        return chance.random(count) < 0.5
    return chance.normal(0, 100, count).astype(carrier)


def reduce(reducer: Reducer, dtype: str, op: str, divisor: int | None, sources: list[Any], out: Any) -> bytes:
    with np.errstate(all="ignore"):
        reducer.get(dtype, op, divisor)([operand(dtype, x) for x in sources], operand(dtype, out))
    return out.tobytes()


# Each type adds, and one of each kind does the other ops: test_reduce_kernels.py has all pairs of the same kernel.
EACH = [
    pytest.param(*pair, marks=[] if pair[1] == "sum" or pair[0] in WITH_ALL else pytest.mark.sweep) for pair in PAIRS
]


@pytest.mark.parametrize(("dtype", "op"), EACH)
def test_bits_are_those_of_the_host_wherever_arrays_lie(dtype: str, op: str) -> None:
    host, place = Reducer(), Watched()
    reducer = DeviceReducer(place)
    for w, count, shift in ((2, 1003, 0), (3, 517, 1), (5, 1, 0)):
        divisor = 7 if op == "avg" and w == 3 else None
        inputs = [given(dtype, count, seed) for seed in range(w)]
        want = reduce(host, dtype, op, divisor, inputs, np.empty_like(inputs[0]))
        near, far = Mapping(), Mapping()
        reducer.use([near.buffer])
        mapped = [near.put(x, shift) for x in inputs]
        assert reduce(reducer, dtype, op, divisor, mapped, near.put(inputs[0])) == want
        assert not [said for said in place.said if said[0] == "scratch"], "it could have reached all of them"
        mixed = [far.put(x) if i % 2 else y for i, (x, y) in enumerate(zip(inputs, mapped, strict=True))]
        assert reduce(reducer, dtype, op, divisor, mixed, far.put(inputs[0])) == want
        assert reduce(reducer, dtype, op, divisor, [mapped[0], *mixed[1:]], mapped[0]) == want  # in place
        own = inputs[1].copy()
        assert reduce(reducer, dtype, op, divisor, [inputs[0], own, *inputs[2:]], own) == want
        assert place.said[-1] == ("reduce", dtype)
        place.said.clear()
        reducer = DeviceReducer(place)


def test_what_no_kernel_has_is_reduced_by_the_host() -> None:
    host, place = Reducer(), Watched()
    reducer = DeviceReducer(place)
    for dtype, op in (("float8_e5m2", "sum"), ("float8_e4m3fn", "avg")):
        inputs = [np.arange(100, dtype=np.uint8) + seed for seed in range(3)]
        want = reduce(host, dtype, op, None, inputs, np.empty_like(inputs[0]))
        assert reduce(reducer, dtype, op, None, inputs, np.empty_like(inputs[0])) == want
    half, wide = given("float16", 100, 1), given("float32", 100, 2)
    sources, out = [operand("float16", half), operand("float16", wide, "float32")], np.empty(100, np.float32)
    reducer.get("float16", "sum")(sources, operand("float16", out, "float32"))
    assert np.array_equal(out, half.astype(np.float32) + wide)
    reducer.get("float32", "sum")([wide], out)  # alone, it only moves
    assert np.array_equal(out, wide)
    assert place.said == []


def test_partial_sums_in_float32_are_reduced_as_such() -> None:
    place = Watched()
    sums, out = [given("float32", 100, seed) for seed in range(2)], np.empty(100, np.float32)
    made = [operand("bfloat16", x, "float32") for x in (*sums, out)]
    DeviceReducer(place).get("bfloat16", "avg", 5)(made[:2], made[2])
    assert np.array_equal(out, (sums[0] + sums[1]) / np.float32(5))
    assert place.said[-1] == ("reduce", "float32")


def test_only_what_is_used_stays_mapped() -> None:
    """From the next reduction on, by the thread that makes it; what this process may not write to never is."""
    place = Watched()
    reducer = DeviceReducer(place)
    first, second, third = Mapping(), Mapping(), Mapping()
    reducer.use([first.buffer, second.buffer, third.buffer.toreadonly()])
    assert place.said == []
    x = first.put(np.ones(10, np.float32))
    add = reducer.get("float32", "sum")
    add([x, x], x)
    assert place.said == [("map", first.address), ("map", second.address), ("reduce", "float32")]
    place.said.clear()
    reducer.use([second.buffer])
    reducer.use([second.buffer, third.buffer])
    add([x, x], x)
    assert place.said[:2] == [("unmap", first.address), ("map", third.address)]
    assert x.tolist() == [4.0] * 10
    place.said.clear()
    add([x, x], x)
    assert place.said == [("reduce", "float32")]


def test_devices_of_other_kinds_are_not_alike() -> None:
    other = InterpretedReduceDevice()
    other.kind = "another"
    told = {DeviceReducer(InterpretedReduceDevice()).arithmetic, DeviceReducer(other).arithmetic, Reducer().arithmetic}
    assert len(told) == 3
    assert DeviceReducer(InterpretedReduceDevice()).arithmetic in told
