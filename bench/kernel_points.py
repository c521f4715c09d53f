"""The calls that `ftcomm bench kernels` times: which kernels, sizes, types and caps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ftcomm.bench.data import item_size
from ftcomm.bench.harness import INTS, SIZE, option
from ftcomm.bench.sizes import sweep
from ftcomm.errors import SettingsError
from ftcomm.kernels.dtypes import DTYPES, unsupported
from ftcomm.kernels.spans import MOST_SOURCES
from ftcomm.launch.commands.option_types import Several

KERNELS = ("copy", "reduce")  # a copy is the reduction of one source
MEMCPY = "memcpy"  # the CUDA runtime's copy on the device
INTERPRETED = "interpreted"

COPIES = (MEMCPY, "copy")


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class MostBlocks(click.ParamType):
    """A number, or all: None."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        return None if value in ("all", None) else click.INT.convert(value, param, ctx)

    @staticmethod
    def show(value: int | None) -> str:
        return "all" if value is None else str(value)


@dataclasses.dataclass(frozen=True)
class KernelPointsRequest:
    """Copy and reduce on one GPU: time, bytes moved a second, and that beside a copy in the same run.

    "% copy" is of the best copy of that size, the CUDA runtime's (memcpy) included; "% same blocks" of the copy with
    the same --sms. What is written is compared with the host's, bit for bit, at both ends and in the middle; #wrong
    counts elements. Without a GPU Triton's interpreter runs the kernels, and there are no speeds: those would be its
    own.
    """

    kernels: Sequence[str] = option(KERNELS, kind=Several(click.STRING, "NAME,..."), help="Only these.", show="all")
    minbytes: int | None = option(
        None, "-b", "--minbytes", kind=SIZE, help="Smallest array.", show="64M; without a GPU 64K"
    )
    maxbytes: int | None = option(
        None, "-e", "--maxbytes", kind=SIZE, help="Largest array.", show="1G; without a GPU 64K"
    )
    stepfactor: int = option(4, "-f", "--stepfactor", help="Factor between sizes.")
    dtypes: Sequence[str] = option(("bfloat16", "float32"), "-d", "--datatypes", kind=Several(click.STRING, "TYPE,..."))
    redop: str = option("sum", "-o", "--op", help="sum, avg, min, max or product.")
    sources: Sequence[int] = option((2, 4, 8), kind=INTS, help="Of reductions.")
    sms: Sequence[int | None] = option((None,), kind=Several(MostBlocks(), "N,..."), help="Most blocks; all.")
    iterations: int | None = option(
        None, "-n", "--iters", kind=click.INT, help="Timed calls of a point.", show="100 or 30, by size"
    )
    warmup: int | None = option(
        None, "-w", "--warmup_iters", kind=click.INT, help="Calls before them.", show="20 or 10, by size"
    )
    hot: bool = option(False, help="Do not flush the cache before each call.")

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of one array."""
        there = on_gpu()
        first = self.minbytes or (64 << 20 if there else 64 << 10)
        return sweep(first, self.maxbytes or max(first, 1 << 30 if there else 64 << 10), factor=self.stepfactor)

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

    def points(self, *, memcpy: bool) -> Iterator[KernelPoint]:
        """Yields all copies of a size before what is compared with them."""
        for dtype in self.dtypes:
            for size in self.sizes:
                base = KernelPoint(MEMCPY, dtype, size)
                if memcpy:
                    yield base
                # Copies are measured in any case: without them the figures of the others say little.
                for kernel in dict.fromkeys(("copy", *self.kernels)):
                    for w in self.sources if kernel == "reduce" else (1,):
                        for sms in self.sms:
                            yield dataclasses.replace(base, kernel=kernel, sources=w, sms=sms)

    def turns(self, size: int, *, interpreted: bool) -> tuple[int, int]:
        """-> (timed calls, calls before them) of one point."""
        few, many = ((2, 1), (2, 1)) if interpreted else ((30, 10), (100, 20))
        iterations, warmup = many if size < 64 << 20 else few
        return self.iterations or iterations, warmup if self.warmup is None else self.warmup


@dataclasses.dataclass(frozen=True)
class KernelPoint:
    """One call that is timed."""

    kernel: str
    dtype: str
    size: int  # bytes of one array
    sources: int = 1
    sms: int | None = None

    @property
    def count(self) -> int:
        return self.size // DTYPES[self.dtype].itemsize

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return (self.sources + 1) * self.count * DTYPES[self.dtype].itemsize
