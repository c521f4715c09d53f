"""The kernels as `ftcomm bench kernels` calls them: with arrays on the device, timed, compared with the host form.

On a GPU each call lies between two CUDA events. Before each, 256 MB are written, so that it finds nothing of its own in
the cache. Before the first, the GPU is given something to do until all calls are in its queue, so that it never waits
for the host. Without a GPU the interpreter runs them, and a clock measures that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ftcomm.bench.header import available_memory
from ftcomm.bench.kernel_points import INTERPRETED, MEMCPY, KernelPoint, KernelPointsRequest
from ftcomm.bench.sizes import format_size
from ftcomm.errors import SettingsError
from ftcomm.kernels import device as mode
from ftcomm.kernels.device.reduce import reduce, reduce_kernel
from ftcomm.kernels.host.reduce import reduce as host_reduce

FLUSHED = 256 << 20  # bytes, several times the largest cache
_WINDOW = 16 << 10  # elements that are compared at the start, in the middle and at the end
_QUEUED = 100  # calls in the GPU's queue at once, which has about 1000 places
_CYCLES = 2e9  # of a GPU in a second, or fewer


class Timings(NamedTuple):
    seconds: list[float]
    blocks: int | None
    registers: int | None
    checked: int
    wrong: int


class Bench:
    """Arrays are made once for a dtype and a size, and the calls of a point go over them."""

    def __init__(self, request: KernelPointsRequest) -> None:
        self.request = request
        self.device = INTERPRETED if mode.INTERPRETED else torch.cuda.get_device_name()
        self._most = most = max(request.sources) if "reduce" in request.kernels else 1
        need = (most + 1) * max(request.sizes) + FLUSHED
        free = available_memory() if mode.INTERPRETED else torch.cuda.mem_get_info()[0]
        if need > free:
            raise SettingsError(
                f"{most} sources of {format_size(max(request.sizes))} need about {need / 1e9:.1f} GB on the device, "
                f"{free / 1e9:.1f} GB are free; lower -e or --sources."
            )
        self._made: tuple[str, int] | None = None
        self._sources: list[torch.Tensor] = []
        self._out = torch.empty(0)
        self._flushed = (
            None if mode.INTERPRETED or request.hot else torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
        )

    def run(self, point: KernelPoint) -> Timings:
        """Launch, compare, and time."""
        self._make(point)
        call = self._call(point)
        with _launches() as launched:
            call()
        windows = list(_windows(point.count))
        wrong = sum(self._wrong(point, window) for window in windows)
        iterations, warmup = self.request.turns(point.size, interpreted=mode.INTERPRETED)
        for _ in range(warmup):
            call()
        if mode.INTERPRETED:
            seconds = _clocked(call, iterations)
        else:
            parts = (min(_QUEUED, iterations - done) for done in range(0, iterations, _QUEUED))
            seconds = [second for part in parts for second in self._timed(call, part)]
        grid, kernel = launched[0] if launched else (None, None)
        return Timings(
            seconds,
            blocks=None if grid is None else grid[0],
            registers=getattr(kernel, "n_regs", None),
            checked=sum(window.stop - window.start for window in windows),
            wrong=wrong,
        )

    def _make(self, point: KernelPoint) -> None:
        if self._made == (point.dtype, point.size):
            return
        self._sources, self._out = [], torch.empty(0)  # frees the former
        generator = torch.Generator(mode.DEVICE).manual_seed(point.size)
        dtype = getattr(torch, point.dtype)
        self._sources = [_random(point.count, dtype, generator) for _ in range(self._most)]
        self._out = torch.empty(point.count, dtype=dtype, device=mode.DEVICE)
        self._made = point.dtype, point.size

    def _call(self, point: KernelPoint) -> Callable[[], object]:
        sources, out = self._sources[: point.sources], self._out
        if point.kernel == MEMCPY:
            return lambda: out.copy_(sources[0])
        return lambda: reduce(sources, out, self.request.redop, sms=point.sms)  # of one source: a copy

    def _wrong(self, point: KernelPoint, window: slice) -> int:
        """Elements that are not, bit for bit, what the host gives from the same inputs."""
        there = [_host(x[window]) for x in self._sources[: point.sources]]
        expected = torch.empty_like(there[0])
        host_reduce(there, expected, self.request.redop)
        return _differ(self._out[window], expected)

    def _timed(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """Seconds of each call on the GPU."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        each = time.perf_counter() - began  # for the host to put it into the queue
        torch.cuda._sleep(int((iterations * (each + 50e-6) * 1.5 + 2e-3) * _CYCLES))
        for start, end in events:
            if self._flushed is not None:
                self._flushed.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


def _clocked(call: Callable[[], Any], iterations: int) -> list[float]:
    seconds = []
    for _ in range(iterations):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


@contextlib.contextmanager
def _launches() -> Iterator[list[tuple[tuple[int, ...], Any]]]:
    """Records what Triton launches meanwhile: grids, and compiled kernels, which know their registers (None:
    interpreted).

    Triton's hooks of a launch are told neither of the two, so its method is wrapped for as long as this lasts.
    """
    found: list[tuple[tuple[int, ...], Any]] = []
    kind = type(reduce_kernel)
    original = kind.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = original(self, *arguments, grid=grid, warmup=warmup, **options)
        found.append((grid, kernel))
        return kernel

    kind.run = run
    try:
        yield found
    finally:
        kind.run = original


# ---- what is compared ---------------------------------------------------------------------------------------------


def _windows(count: int) -> Iterator[slice]:
    """Yields windows at the start, in the middle and at the end, or all of a small array."""
    if count <= 3 * _WINDOW:
        yield slice(0, count)
        return
    for start in (0, count // 2, count - _WINDOW):
        yield slice(start, start + _WINDOW)


def _host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu() if x.is_cuda else x


def _differ(there: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements of which a bit differs."""
    size = there.element_size()
    raw = (_host(x).contiguous().view(torch.uint8).view(-1, size) for x in (there, expected))
    a, b = raw
    return int((a != b).any(dim=1).sum())


def _random(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, dtype=dtype, device=mode.DEVICE, generator=generator)
    top = 2 if dtype == torch.bool else 100
    return torch.randint(0, top, (count,), dtype=torch.int8, device=mode.DEVICE, generator=generator).to(dtype)
