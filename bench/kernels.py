"""`ftcomm bench kernels`: which calls are timed, and what comes of their timings.

What a kernel reaches is told beside what a copy reaches in the same run at the same size, since that is what the memory
gives: once the best copy of all, the CUDA runtime's own included, and once a copy with as many blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ftcomm.bench.data import item_size
from ftcomm.bench.stats import percentile
from ftcomm.errors import SettingsError
from ftcomm.kernels.check import MOST_SOURCES
from ftcomm.kernels.dtypes import DTYPES, unsupported

if TYPE_CHECKING:
    from ftcomm.bench.kernel_runs import Timings

KERNELS = ("copy", "copy_forward", "reduce", "reduce_copy", "quantise", "dequantise", "quantised_reduce")
KINDS = ("fp8", "int8")
MEMCPY = "memcpy"  # the CUDA runtime's copy on the device
INTERPRETED = "interpreted"

_COPIES = (MEMCPY, "copy")
_QUANTISED = ("quantise", "dequantise", "quantised_reduce")
_QUANTISABLE = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Request:
    """One sweep. `iterations` and `warmup` None: by size."""

    sizes: Sequence[int]  # bytes of one array
    kernels: Sequence[str] = KERNELS
    dtypes: Sequence[str] = ("bfloat16", "float32")
    redop: str = "sum"
    sources: Sequence[int] = (2, 4, 8)
    sms: Sequence[int | None] = (None,)  # most blocks of a kernel; None: as many as it likes
    iterations: int | None = None
    warmup: int | None = None
    hot: bool = False  # leave in the cache what is there

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        for kernel in self.kernels:
            if kernel not in KERNELS:
                raise SettingsError(f"--kernels {kernel}: expected some of {', '.join(KERNELS)}.")
        for dtype in self.dtypes:
            problem = unsupported(dtype, self.redop)
            if problem is not None:
                raise SettingsError(f"-d {dtype} -o {self.redop}: {problem}")
            if min(self.sizes) < item_size(dtype):
                raise SettingsError(f"{min(self.sizes)} bytes are less than one element of {dtype}; raise -b.")
        if not all(1 <= w <= MOST_SOURCES for w in self.sources):
            raise SettingsError(f"--sources: expected 1 to {MOST_SOURCES}.")
        if not all(n is None or n >= 1 for n in self.sms):
            raise SettingsError('--sms: expected numbers of at least 1, or "all".')
        if (1 if self.iterations is None else self.iterations) < 1 or (self.warmup or 0) < 0:
            raise SettingsError("-n has to be at least 1, -w at least 0.")

    def points(self, *, memcpy: bool) -> Iterator[Point]:
        """In this order: all copies of a size before what is compared with them."""
        for dtype in self.dtypes:
            for size in self.sizes:
                base = Point(MEMCPY, dtype, size)
                if memcpy:
                    yield base
                # Copies are measured in any case: without them the figures of the others say little.
                for kernel in dict.fromkeys(("copy", *self.kernels)):
                    if kernel in _QUANTISED and dtype not in _QUANTISABLE:
                        continue
                    for kind in KINDS if kernel in _QUANTISED else (None,):
                        for w in self.sources if "reduce" in kernel else (1,):
                            for sms in self.sms:
                                yield dataclasses.replace(base, kernel=kernel, kind=kind, sources=w, sms=sms)

    def turns(self, size: int, *, interpreted: bool) -> tuple[int, int]:
        """-> (timed calls, calls before them) of one point."""
        few, many = ((2, 1), (2, 1)) if interpreted else ((30, 10), (100, 20))
        iterations, warmup = many if size < 64 << 20 else few
        return self.iterations or iterations, warmup if self.warmup is None else self.warmup


@dataclasses.dataclass(frozen=True)
class Point:
    """What is called."""

    kernel: str
    dtype: str
    size: int  # bytes of one array; of a quantised one, before it was
    sources: int = 1
    sms: int | None = None
    kind: str | None = None  # of the quantised form

    @property
    def count(self) -> int:
        return self.size // DTYPES[self.dtype].itemsize

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        size = self.count * DTYPES[self.dtype].itemsize
        blocks = -(-self.count // 256)
        packed = blocks * (256 + 4)  # a byte an element, and a scale a block
        return {
            MEMCPY: 2 * size,
            "copy": 2 * size,
            "copy_forward": 3 * size,
            "reduce": (self.sources + 1) * size,
            "reduce_copy": (self.sources + 2) * size,
            "quantise": size + packed,
            "dequantise": packed + size,
            "quantised_reduce": (self.sources + 1) * packed,
        }[self.kernel]


class Row(msgspec.Struct, frozen=True):
    """One point. What would be a speed is None where kernels are interpreted."""

    kernel: str
    device: str  # "interpreted": no figure of this row says anything about a GPU
    l2: str  # "cold": flushed before each call; "hot"; "" without a GPU
    dtype: str
    kind: str | None
    redop: str | None
    sources: int
    bytes: int
    count: int
    sms: int | None  # asked for; None: any
    blocks: int | None  # launched; None: not by a kernel of ours
    registers: int | None  # of a thread
    iterations: int
    time_us_p50: float
    time_us_p20: float
    time_us_p80: float
    moved_bytes: int
    gbps: float | None
    of_best_copy: float | None  # gbps over that of the best copy of this size
    of_same_blocks: float | None  # gbps over that of the copy with this `sms`
    checked: int  # elements that were compared with the host form
    wrong: int


class Rates:
    """Of the copies that were measured: by dtype and size."""

    def __init__(self) -> None:
        self._best: dict[tuple[str, int], float] = {}
        self._by_sms: dict[tuple[str, int, int | None], float] = {}

    def add(self, point: Point, gbps: float) -> None:
        place = point.dtype, point.size
        if point.kernel in _COPIES:
            self._best[place] = max(gbps, self._best.get(place, 0.0))
        if point.kernel == "copy":
            self._by_sms[(*place, point.sms)] = gbps

    def compared(self, point: Point, row: Row) -> Row:
        """With all copies of its size measured."""
        if row.gbps is None:
            return row
        same = None if point.kernel == MEMCPY else self._by_sms[point.dtype, point.size, point.sms]
        return msgspec.structs.replace(
            row,
            of_best_copy=row.gbps / self._best[point.dtype, point.size],
            of_same_blocks=same and row.gbps / same,
        )


def row(request: Request, point: Point, timings: Timings, device: str) -> Row:
    """Without the comparison with copies, which may still be to come."""
    p20, p50, p80 = (percentile(timings.seconds, q) * 1e6 for q in (20, 50, 80))
    return Row(
        kernel=point.kernel,
        device=device,
        l2="" if device == INTERPRETED else "hot" if request.hot else "cold",
        dtype=point.dtype,
        kind=point.kind,
        redop=request.redop if "reduce" in point.kernel else None,
        sources=point.sources,
        bytes=point.size,
        count=point.count,
        sms=point.sms,
        blocks=timings.blocks,
        registers=timings.registers,
        iterations=len(timings.seconds),
        time_us_p50=p50,
        time_us_p20=p20,
        time_us_p80=p80,
        moved_bytes=point.moved,
        gbps=None if device == INTERPRETED else point.moved / p50 / 1e3,
        of_best_copy=None,
        of_same_blocks=None,
        checked=timings.checked,
        wrong=timings.wrong,
    )


def measure(request: Request, on_row: Callable[[Row], None], progress: Callable[[str, float], None]) -> None:
    """Time every point in this process, and hand over each row as soon as all that it is compared with is known."""
    from ftcomm.bench.kernel_runs import Bench

    bench = Bench(request)
    interpreted = bench.device == INTERPRETED
    points = list(request.points(memcpy=not interpreted))
    rates = Rates()
    waiting: list[tuple[Point, Row]] = []
    for i, point in enumerate(points):
        progress(f"{point.kernel} {point.dtype}", i / len(points))
        new = row(request, point, bench.run(point), bench.device)
        if new.gbps is not None:
            rates.add(point, new.gbps)
        waiting.append((point, new))
        following = points[i + 1] if i + 1 < len(points) else None
        if following is None or following.kernel not in _COPIES or following.size != point.size:
            for one in waiting:
                on_row(rates.compared(*one))
            waiting.clear()
