"""`ftcomm bench kernels`: the calls that are timed, and what follows from their timings.

What a kernel reaches is told beside what a copy reaches in the same run at the same size, since that is what the memory
gives: once the best copy of all, the CUDA runtime's own included, and once a copy with as many blocks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, figure_text
from ftcomm.bench.kernel_points import COPIES, INTERPRETED, MEMCPY, KernelPoint, KernelPointsRequest, on_gpu
from ftcomm.bench.stats import percentile

if TYPE_CHECKING:
    from ftcomm.bench.kernel_runs import Timings


class KernelRow(msgspec.Struct, frozen=True):
    """One point. What would be a speed is None where kernels are interpreted."""

    kernel: str
    device: str  # "interpreted": no figure of this row says anything about a GPU
    l2: str  # "cold": flushed before each call; "hot"; "" without a GPU
    dtype: str
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
    """The rates of the copies that were measured, by dtype and size."""

    def __init__(self) -> None:
        self._best: dict[tuple[str, int], float] = {}
        self._by_sms: dict[tuple[str, int, int | None], float] = {}

    def add(self, point: KernelPoint, gbps: float) -> None:
        place = point.dtype, point.size
        if point.kernel in COPIES:
            self._best[place] = max(gbps, self._best.get(place, 0.0))
        if point.kernel == "copy":
            self._by_sms[(*place, point.sms)] = gbps

    def compared(self, point: KernelPoint, row: KernelRow) -> KernelRow:
        """Compares a row with the copies of its size, all of which were measured."""
        if row.gbps is None:
            return row
        same = None if point.kernel == MEMCPY else self._by_sms[point.dtype, point.size, point.sms]
        return msgspec.structs.replace(
            row,
            of_best_copy=row.gbps / self._best[point.dtype, point.size],
            of_same_blocks=same and row.gbps / same,
        )


def row(request: KernelPointsRequest, point: KernelPoint, timings: Timings, device: str) -> KernelRow:
    """Makes a row without the comparison with copies, which may still be to come."""
    p20, p50, p80 = (percentile(timings.seconds, q) * 1e6 for q in (20, 50, 80))
    return KernelRow(
        kernel=point.kernel,
        device=device,
        l2="" if device == INTERPRETED else "hot" if request.hot else "cold",
        dtype=point.dtype,
        redop=request.redop if point.kernel == "reduce" else None,
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


def measure(request: KernelPointsRequest, report: BenchReport) -> None:
    """Time every point in this process, and report each row as soon as all that it is compared with is known."""
    if not on_gpu():
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    from ftcomm.bench.kernel_runs import Bench

    bench = Bench(request)
    interpreted = bench.device == INTERPRETED
    points = list(request.points(memcpy=not interpreted))
    rates = Rates()
    waiting: list[tuple[KernelPoint, KernelRow]] = []
    for i, point in enumerate(points):
        report.progress(f"{point.kernel} {point.dtype}", i / len(points))
        new = row(request, point, bench.run(point), bench.device)
        if new.gbps is not None:
            rates.add(point, new.gbps)
        waiting.append((point, new))
        following = points[i + 1] if i + 1 < len(points) else None
        if following is None or following.kernel not in COPIES or following.size != point.size:
            for one in waiting:
                report.add(rates.compared(*one))
            waiting.clear()


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


# A dash for what would be a speed and is none.
COLUMNS = (
    Column("kernel", "", 16, lambda row: row.kernel),
    Column("dtype", "", 8, lambda row: row.dtype),
    Column("srcs", "", 4, lambda row: str(row.sources)),
    Column("size", "(B)", 11, lambda row: str(row.bytes)),
    Column("sms", "", 4, lambda row: str(row.sms or "all")),
    Column("blocks", "", 6, lambda row: str(row.blocks or "-")),
    Column("regs", "", 4, lambda row: str(row.registers or "-")),
    Column("p50", "(us)", 10, lambda row: figure_text(row.time_us_p50)),
    Column("p20", "(us)", 10, lambda row: figure_text(row.time_us_p20)),
    Column("p80", "(us)", 10, lambda row: figure_text(row.time_us_p80)),
    Column("GB/s", "", 10, lambda row: figure_text(row.gbps, "-")),
    Column("% copy", "", 7, lambda row: _share(row.of_best_copy)),
    Column("% same", "blocks", 7, lambda row: _share(row.of_same_blocks)),
    Column("#wrong", "", 7, lambda row: str(row.wrong)),
    Column(" device", "", -7, lambda row: f" {row.device} {row.l2}"),
)


def _footer(report: BenchReport) -> list[str]:
    wrong = sum(row.wrong for row in report["rows"])
    return [f"# Wrong elements: {wrong} {'OK' if wrong == 0 else 'FAILED'}"]


EXPERIMENT = Experiment(
    "kernels",
    KernelPointsRequest,
    measure,
    [Table("rows", KernelRow, COLUMNS)],
    csv="rows",
    footer=_footer,
    good=lambda report: not any(row.wrong for row in report["rows"]),
    on_device=lambda request: True,
)
