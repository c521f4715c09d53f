"""Reduction of several arrays into one on the host.

The arrays are one-dimensional, contiguous, of equal length, and given in an order that is the same on every member, so
that the same inputs give the same bits everywhere. NumPy does what NumPy has: an addition of 256 fp32 costs 0.25 us
where torch needs 0.9 us, and both run at the speed of the cache when it is large. fp16, bf16 and fp8 go through torch:
all sources are widened to fp32, summed (and divided) there, and rounded once, to nearest even; what is too large for
e4m3fn, which has no infinity, becomes NaN.

The output may be the same memory as one of the first two sources, never as a later one, and never overlap in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host import arithmetic
from ftcomm.kernels.host.fp8 import Packer
from ftcomm.kernels.host.tensors import HostArray, scratch, unlocked

Reduction = Callable[[Sequence[HostArray], HostArray], None]  # (sources in order, output)

# Elements that torch is given at once. From 32768 on it may use several threads, and where one ends, the last elements
# take another path, which can give a NaN other bits; the number of threads may differ between members.
_BLOCK = 30 << 10

_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32}  # that torch has in all versions
_BITS = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}


class Reducer:
    """Gives the reductions of one engine; they share scratch memory, so one thread at a time may run them."""

    def __init__(self) -> None:
        self._reductions: dict[tuple[str, str, int | None], Reduction] = {}
        self._scratch: dict[Any, HostArray] = {}

    @property
    def arithmetic(self) -> str:
        """Names how this process computes: equal names give equal bits for equal inputs. "" is equal to nothing."""
        return arithmetic.own()

    def use(self, buffers: Iterable[memoryview]) -> None:
        """Note that most of what is reduced from now on lies in these; others are left, and may go.

        Any thread, while none reduces. Does not block. The host reaches all memory alike.
        """

    @cached_property
    def packer(self) -> Packer:
        """Packs what is coded. Made when it is first needed."""
        return Packer()

    def get(self, dtype: str, op: str, divisor: int | None = None) -> Reduction:
        """Returns the reduction for a pair that `unsupported_on_host` accepts. "avg" divides by `divisor`, or the
        number of sources."""
        key = (dtype, op, divisor)
        found = self._reductions.get(key)
        if found is None:
            found = self._reductions[key] = self._make(HOST_DTYPES[dtype].kind, op, divisor)
        return found

    def _make(self, kind: str, op: str, divisor: int | None) -> Reduction:
        if op in _BITS:
            return _Fold(_BITS[op])
        if kind == "half":
            return self._half(op, divisor)
        if kind == "int" and op == "avg":
            return self._integer_average(divisor)
        if kind == "bool":
            return _Fold(np.logical_or if op in ("sum", "max") else np.logical_and)
        if op == "avg":
            return _float_average(divisor)
        return _Fold({"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op])

    def _half(self, op: str, divisor: int | None) -> Reduction:
        import torch

        # A source is widened into scratch, which stays in the cache, and then added: faster than to add a bf16 tensor
        # to an fp32 one (docs/transports.md, Measured choices). Of two zeros torch.minimum gives one or the other, by
        # where they stand in the array; NumPy gives the second.
        step = {
            "sum": torch.Tensor.add_,
            "avg": torch.Tensor.add_,
            "product": torch.Tensor.mul_,
            "min": lambda acc, wide: np.minimum(acc.numpy(), wide.numpy(), out=acc.numpy()),
            "max": lambda acc, wide: np.maximum(acc.numpy(), wide.numpy(), out=acc.numpy()),
        }[op]

        acc, wide = scratch(_BLOCK), scratch(_BLOCK)

        def reduce(sources: Sequence[HostArray], out: HostArray) -> None:
            count = out.numel()
            for start in range(0, count, _BLOCK):
                stop = min(count, start + _BLOCK)
                a, w = acc[: stop - start], wide[: stop - start]
                a.copy_(sources[0][start:stop])
                for source in sources[1:]:
                    w.copy_(source[start:stop])
                    step(a, w)
                if op == "avg":
                    a.div_(divisor or len(sources))
                out[start:stop].copy_(a)

        return reduce

    def _integer_average(self, divisor: int | None) -> Reduction:
        """Summed in 64 bits, so that the average of narrow integers is exact; truncated toward zero, as in C."""

        def reduce(sources: Sequence[HostArray], out: HostArray) -> None:
            wide = np.dtype("uint64" if out.dtype.kind == "u" else "int64")
            acc = self._buffer(wide, out.size, lambda size: np.empty(size, wide))
            acc[...] = sources[0]
            for source in sources[1:]:
                np.add(acc, source, out=acc)
            n = divisor or len(sources)
            quotient = acc // n
            if wide.kind == "i":
                quotient += (acc < 0) & (quotient * n != acc)
            np.copyto(out, quotient, casting="same_kind" if wide == out.dtype else "unsafe")

        return reduce

    def _buffer(self, key: Any, n: int, new: Callable[[int], HostArray]) -> HostArray:
        """Returns `n` elements of scratch, kept for the next call."""
        buffer = self._scratch.get(key)
        if buffer is None or len(buffer) < n:
            buffer = self._scratch[key] = new(n)
        return buffer[:n]


def is_operand(dtype: str) -> bool:
    """Whether the reductions of `dtype` take carrier arrays as they are, so that nobody has to call `operand`."""
    return HOST_DTYPES[dtype].kind != "half"


def operand(dtype: str, carrier: HostArray, held: str | None = None) -> HostArray:
    """Returns what the reductions of `dtype` take for a carrier array: the array itself, or a torch view of its memory.

    Those of halves take float32 as well, source or output, and `held` says so of a carrier of partial sums.
    """
    if is_operand(dtype):
        return carrier
    import torch

    if not carrier.flags.writeable:
        carrier = unlocked(carrier)
    return torch.from_numpy(carrier.view(_INTEGERS[carrier.itemsize])).view(getattr(torch, held or dtype))


class _Fold:
    """The `Reduction` by one function of NumPy, step by step."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self.ufunc = ufunc

    def __call__(self, sources: Sequence[HostArray], out: HostArray) -> None:
        if len(sources) == 1:
            out[...] = sources[0]
            return
        ufunc = self.ufunc
        ufunc(sources[0], sources[1], out=out)  # by its name: NumPy takes no other of min and max without a warning
        for other in sources[2:]:
            ufunc(out, other, out=out)


def of_two(reduction: Reduction) -> Callable[..., object]:
    """Returns the same of two sources: (first, second, out=...). A fold is its function itself, without a call of ours
    around it."""
    return reduction.ufunc if isinstance(reduction, _Fold) else lambda a, b, out: reduction((a, b), out)


_sum = _Fold(np.add)


def _float_average(divisor: int | None) -> Reduction:
    def reduce(sources: Sequence[HostArray], out: HostArray) -> None:
        _sum(sources, out)
        np.true_divide(out, divisor or len(sources), out=out)

    return reduce


def reduce(sources: Sequence[HostArray], out: HostArray, op: str = "sum", *, divisor: int | None = None) -> None:
    """Reduce contiguous tensors of the host, of which the output may be one: what kernels are compared with."""
    import torch

    dtype = str(out.dtype).removeprefix("torch.")
    *flat, result = [
        (x.view(torch.uint16) if dtype == "bfloat16" else x).detach().reshape(-1).numpy() for x in (*sources, out)
    ]
    flat = [x.copy() if x.ctypes.data == result.ctypes.data else x for x in flat]
    with np.errstate(all="ignore"):  # overflow and NaN are results like any other
        Reducer().get(dtype, op, divisor)([operand(dtype, x) for x in flat], operand(dtype, result))
