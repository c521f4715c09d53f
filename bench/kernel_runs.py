"""The kernels as `ftcomm bench kernels` calls them: with arrays on the device, timed, compared with the host form.

On a GPU each call lies between two CUDA events. Before it 256 MB are written, so that it finds nothing of its own in
the cache, and before all of them the GPU is given something to do for as long as it takes to put the calls into its
queue, so that it never waits for the host. Without a GPU the interpreter runs them, and a clock measures that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ftcomm.bench.header import available_memory
from ftcomm.bench.kernel_points import INTERPRETED, MEMCPY, Point, Request
from ftcomm.bench.sizes import format_size
from ftcomm.errors import SettingsError
from ftcomm.kernels import device as mode
from ftcomm.kernels.device import copy, forward, quantise, reduce
from ftcomm.kernels.device.copy import copy_kernel
from ftcomm.kernels.host import copy as host_copy
from ftcomm.kernels.host import forward as host_forward
from ftcomm.kernels.host import quantise as host_quantise
from ftcomm.kernels.host import reduce as host_reduce
from ftcomm.kernels.host.quantise import BLOCK, Quantised

FLUSHED = 256 << 20  # bytes, several times the largest cache
_WINDOW = 64 * BLOCK  # elements that are compared at the start, in the middle and at the end
_QUEUED = 100  # calls in the GPU's queue at once, which has about 1000 places
_CYCLES = 2e9  # of a GPU in a second, or fewer


class Timings(NamedTuple):
    seconds: list[float]
    blocks: int | None
    registers: int | None
    checked: int
    wrong: int


class Call(NamedTuple):
    run: Callable[[], Any]  # returns what it has made, if it does
    wrong: Callable[[Any, slice], int]  # elements of what it returned, and of its outputs, in a window of them


class Bench:
    """Arrays are made once for a dtype and a size, and the calls of a point go over them."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.device = INTERPRETED if mode.INTERPRETED else torch.cuda.get_device_name()
        most = max(request.sources) if any("reduce" in kernel for kernel in request.kernels) else 1
        self._arrays = most + 2
        need = 2 * self._arrays * max(request.sizes) + FLUSHED  # twice, for what is quantised, in both kinds
        free = available_memory() if mode.INTERPRETED else torch.cuda.mem_get_info()[0]
        if need > free:
            raise SettingsError(
                f"{most} sources of {format_size(max(request.sizes))} need about {need / 1e9:.1f} GB on the device, "
                f"{free / 1e9:.1f} GB are free; lower -e or --sources."
            )
        self._made: tuple[str, int] | None = None
        self._sources: list[torch.Tensor] = []
        self._outs: list[torch.Tensor] = []
        self._quantised: dict[str, list[Quantised]] = {}
        self._flushed = (
            None if mode.INTERPRETED or request.hot else torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
        )

    def run(self, point: Point) -> Timings:
        """Launch, compare, and time."""
        self._make(point)
        call = self._call(point)
        with _launches() as launched:
            result = call.run()
        windows = list(_windows(point.count))
        wrong = sum(call.wrong(result, window) for window in windows)
        iterations, warmup = self.request.turns(point.size, interpreted=mode.INTERPRETED)
        for _ in range(warmup):
            call.run()
        if mode.INTERPRETED:
            seconds = _clocked(call.run, iterations)
        else:
            parts = (min(_QUEUED, iterations - done) for done in range(0, iterations, _QUEUED))
            seconds = [second for part in parts for second in self._timed(call.run, part)]
        grid, kernel = launched[0] if launched else (None, None)
        return Timings(
            seconds,
            blocks=None if grid is None else grid[0],
            registers=getattr(kernel, "n_regs", None),
            checked=sum(window.stop - window.start for window in windows),
            wrong=wrong,
        )

    def _make(self, point: Point) -> None:
        if self._made == (point.dtype, point.size):
            return
        self._sources, self._outs, self._quantised = [], [], {}  # frees the former
        generator = torch.Generator(mode.DEVICE).manual_seed(point.size)
        dtype = getattr(torch, point.dtype)
        for _ in range(self._arrays - 2):
            self._sources.append(_random(point.count, dtype, generator))
        self._outs = [torch.empty(point.count, dtype=dtype, device=mode.DEVICE) for _ in range(2)]
        self._made = point.dtype, point.size

    def _packed(self, kind: str, w: int) -> list[Quantised]:
        """The first w sources, quantised."""
        made = self._quantised.setdefault(kind, [])
        made += [quantise.quantise(source, kind) for source in self._sources[len(made) : w]]
        return made[:w]

    def _call(self, point: Point) -> Call:
        sources, outs, redop, sms = self._sources[: point.sources], self._outs, self.request.redop, point.sms
        first, out, kind = sources[0], outs[0], point.kind or ""
        if point.kernel == MEMCPY:
            return Call(lambda: out.copy_(first), self._plain(host_copy.copy, first, outs[:1]))
        if point.kernel == "copy":
            return Call(lambda: copy.copy(first, out, sms=sms), self._plain(host_copy.copy, first, outs[:1]))
        if point.kernel == "copy_forward":
            return Call(
                lambda: forward.copy_forward(first, outs, sms=sms), self._plain(host_forward.copy_forward, first, outs)
            )
        if point.kernel == "reduce":
            return Call(
                lambda: reduce.reduce(sources, out, redop, sms=sms),
                self._plain(host_reduce.reduce, sources, outs[:1], redop),
            )
        if point.kernel == "reduce_copy":
            return Call(
                lambda: forward.reduce_copy(sources, outs, redop, sms=sms),
                self._plain(host_forward.reduce_copy, sources, outs, redop),
            )
        if point.kernel == "quantise":
            return Call(
                lambda: quantise.quantise(first, kind, sms=sms),
                lambda made, window: _unequal(
                    made.blocks(*_blocks(window)), host_quantise.quantise(_host(first[window]), kind)
                ),
            )
        packed = self._packed(kind, point.sources)
        if point.kernel == "dequantise":
            return Call(
                lambda: quantise.dequantise(packed[0], out=out, sms=sms),
                lambda made, window: _differ(made[window], host_quantise.dequantise(_host_blocks(packed[0], window))),
            )
        return Call(
            lambda: quantise.dequantise_reduce_requantise(packed, redop, sms=sms),
            lambda made, window: _unequal(
                made.blocks(*_blocks(window)),
                host_quantise.dequantise_reduce_requantise([_host_blocks(p, window) for p in packed], redop),
            ),
        )

    def _plain(
        self, form: Callable[..., None], inputs: Any, outs: Sequence[torch.Tensor], *more: Any
    ) -> Callable[[Any, slice], int]:
        """What a host form of arrays gives from the same inputs, element for element."""

        def wrong(_: Any, window: slice) -> int:
            there = [_host(x[window]) for x in inputs] if isinstance(inputs, list) else _host(inputs[window])
            expected = [torch.empty_like(_host(out[window])) for out in outs]
            single = form in (host_copy.copy, host_reduce.reduce)
            form(there, expected[0] if single else expected, *more)
            return sum(_differ(out[window], right) for out, right in zip(outs, expected, strict=True))

        return wrong

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
    """What Triton launches meanwhile: grids, and compiled kernels, which know their registers (None: interpreted).

    Triton's hooks of a launch are told neither of the two, so its method is wrapped for as long as this lasts.
    """
    found: list[tuple[tuple[int, ...], Any]] = []
    kind = type(copy_kernel)
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
    """Whole blocks at the start, in the middle and at the end, or all of a small array; the last takes the tail."""
    if count <= 3 * _WINDOW:
        yield slice(0, count)
        return
    last = (count - _WINDOW) // BLOCK * BLOCK
    middle = count // 2 // BLOCK * BLOCK
    for start, stop in ((0, _WINDOW), (middle, middle + _WINDOW), (last, count)):
        yield slice(start, stop)


def _blocks(window: slice) -> tuple[int, int]:
    return window.start // BLOCK, -(-window.stop // BLOCK)


def _host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu() if x.is_cuda else x


def _host_blocks(source: Quantised, window: slice) -> Quantised:
    part = source.blocks(*_blocks(window))
    return Quantised(part.kind, _host(part.payload), _host(part.scales), part.count, part.dtype)


def _differ(there: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements of which a bit differs."""
    size = there.element_size()
    raw = (_host(x).contiguous().view(torch.uint8).view(-1, size) for x in (there, expected))
    a, b = raw
    return int((a != b).any(dim=1).sum())


def _unequal(there: Quantised, expected: Quantised) -> int:
    return _differ(there.payload, expected.payload) + _differ(there.scales, expected.scales)


def _random(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, dtype=dtype, device=mode.DEVICE, generator=generator)
    top = 2 if dtype == torch.bool else 100
    return torch.randint(0, top, (count,), dtype=torch.int8, device=mode.DEVICE, generator=generator).to(dtype)
