"""The collectives that are no all-reduce on a real GPU, and all-reduces that travel as fp8, of ranks that are streams
of one process. What is left of them after a loss is shown in tests/kernels; here is that the memory model holds, that
the GPU codes as the host does, and that they are broken off and go on."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from ftcomm.engines.base import CollectiveCall
from ftcomm.engines.gpu_kernel.collective import CALLS
from tests.gpu.ranks import Ranks
from tests.process.test_kills import SEED
from tests.rigs import results_of_collectives as results
from tests.rigs.fp8_results import coded
from tests.rigs.results_of_collectives import REDUCING, ROOTED

from .rig import gpu, inputs, ranks_on_gpu, same_bits, total

pytestmark = [*gpu, pytest.mark.timeout(120)]


class Played:
    """One call among `size` ranks of `count` elements each, from `offset` on in arrays on the GPU."""

    def __init__(
        self, kind: str, size: int, count: int, dtype: torch.dtype, seed: int, offset: int = 0,
        counts: results.Counts = (),
    ) -> None:  # fmt: skip
        self.kind, self.size, self.count, self.dtype, self.root = kind, size, count, dtype, size - 1
        self.counts = counts
        lengths = [results.lengths(kind, size, count, me, self.root, counts) for me in range(size)]
        values = inputs(size, offset + max(given for given, _ in lengths), dtype, seed)
        self.sources = [x[offset : offset + given] for x, (given, _) in zip(values, lengths, strict=True)]
        self.given = [self._empty(offset, len(source)).copy_(source) for source in self.sources]
        self.out = [self._empty(offset, taken) for _, taken in lengths]
        if kind in ("broadcast", "reduce"):
            self.out = self.given

    def _empty(self, offset: int, elements: int) -> torch.Tensor:
        return torch.zeros(offset + elements, dtype=self.dtype, device="cuda")[offset:]

    def launch(self, ranks: Ranks, me: int) -> None:
        reduces = self.kind in REDUCING
        root = self.root if self.kind in ROOTED else None
        call = CollectiveCall(self.kind, tuple(range(self.size)), me, root, "sum" if reduces else "", self.counts)
        array, source = self.out[me], self.given[me]
        if not reduces:
            array, source = array.view(torch.uint8), source.view(torch.uint8)
        name = str(self.dtype).removeprefix("torch.")
        ranks.collective(me, call, array, source, name, self.count, self.dtype.itemsize)

    def check(self, what: str) -> None:
        for me, out in enumerate(self.out):
            who = range(self.size)
            wanted = results.wanted(self.kind, self.sources, self.count, me, self.root, who, total, self.counts)
            assert same_bits(out.cpu(), wanted), f"{what}: {self.kind} at rank {me} of {self.size}, {self.count}"


MOVING = [kind for kind in CALLS if kind != "barrier"]


def aligned(kind: str, count: int) -> int:
    """So many elements, or a few more, of which what is reduced begins at multiples of 16 bytes: each variant of the
    kernel that allows for less is compiled, which takes seconds. One is tested, below."""
    return -(-count // 8) * 8 if kind == "reduce_scatter" else count


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_what_is_moved(count: int) -> None:
    """Sizes that are multiples of 16 bytes and others, few and many rows, one behind the other without waiting."""
    with ranks_on_gpu(count) as ranks:
        for dtype in (torch.float32, torch.bfloat16):
            sizes = (1, 1000, 65_537, 1 << 20)
            made = [
                Played(kind, count, aligned(kind, n), dtype, seed) for seed, n in enumerate(sizes) for kind in MOVING
            ]
            torch.cuda.synchronize()
            for each in made:
                for me in range(count):
                    each.launch(ranks, me)
            ranks.settle()
            for each in made:
                each.check(str(dtype))


@pytest.mark.parametrize("offset", [1, 4])
def test_addresses_that_allow_no_vectors(offset: int) -> None:
    with ranks_on_gpu(8) as ranks:
        for kind in MOVING:
            each = Played(kind, 8, 30_001, torch.bfloat16, offset, offset)
            torch.cuda.synchronize()
            for me in range(8):
                each.launch(ranks, me)
            ranks.settle()
            each.check(f"offset {offset}")


@pytest.mark.parametrize("count", [2, 8])
def test_alltoall_of_unequal_parts(count: int) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    with ranks_on_gpu(count) as ranks:
        for unit in (1, 8):
            counts = [[unit * rng.choice((0, 3, 1000, 70_001)) for _ in range(count)] for _ in range(count)]
            each = Played("alltoall", count, 0, torch.bfloat16, unit, counts=counts)
            torch.cuda.synchronize()
            for me in range(count):
                each.launch(ranks, me)
            ranks.settle()
            each.check(f"seed {SEED}, {counts}")


def test_among_all_reduces_and_barriers() -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    with ranks_on_gpu(8) as ranks:
        made: list[Played] = []
        sums = []
        for op in range(60):
            kind, n = rng.choice(MOVING), rng.choice([1, 100, 5_000, 70_000])
            made.append(Played(kind, 8, aligned(kind, n), torch.float32, SEED + op))
            sums.append([source.cuda() for source in inputs(8, 3_000, torch.float32, op)])
        torch.cuda.synchronize()
        for each, arrays in zip(made, sums, strict=True):
            for me in range(8):
                each.launch(ranks, me)
                ranks.launch(me, arrays[me], "float32")
                ranks.collective(
                    me, CollectiveCall("barrier", tuple(range(8)), me), arrays[me], arrays[me], "bytes", 0, 1
                )
        ranks.settle()
        for op, (each, arrays) in enumerate(zip(made, sums, strict=True)):
            each.check(f"seed {SEED}, op {op}")
            assert same_bits(arrays[0].cpu(), total(inputs(8, 3_000, torch.float32, op)))


@pytest.mark.parametrize("kind", MOVING)
def test_one_that_is_broken_off_goes_on(kind: str) -> None:
    """Its peer has not come yet: a hundred epochs begin and end, at any moment of it, before that does."""
    rng = random.Random(SEED)
    with ranks_on_gpu(2) as ranks:
        warm, each = Played(kind, 2, 70_000, torch.float32, 1), Played(kind, 2, 70_000, torch.float32, SEED)
        for me in range(2):
            warm.launch(ranks, me)
        ranks.settle()
        each.launch(ranks, 0)
        for _ in range(100):
            ranks.begun(2, of=[0])
            time.sleep(rng.random() * 1e-4)
            ranks.freeze()
            ranks.enter()
        each.launch(ranks, 1)
        ranks.settle()
        each.check(f"seed {SEED}")


# -- all-reduces whose elements travel as fp8 --------------------------------------------------------------------------

CHUNK = 256 << 10  # bytes
ODD = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3e-8, 65504.0)


class Coded:
    """One of `elements` among `count` ranks, and what it has to give: by the definition, to the bit."""

    def __init__(self, count: int, elements: int, dtype: str, op: str, seed: int, *, offset: int = 0) -> None:
        self.dtype, self.op = dtype, op
        self.sources = inputs(count, elements, getattr(torch, dtype), seed)
        for me, source in enumerate(self.sources):
            source[: elements // 2] *= 2.0**-9  # a scale of its own for almost every block
            source[256:512] = 0.0
            source[600 : 600 + 256 * len(ODD) : 256] = source.new_tensor(ODD)[: len(source[600:2648:256])].roll(me)
        carrier = torch.float32 if dtype == "float32" else torch.uint16 if dtype == "bfloat16" else torch.float16
        with np.errstate(all="ignore"):
            self.wanted = coded([source.view(carrier).numpy() for source in self.sources], dtype, op)
        self.whole = [torch.zeros(elements + offset, dtype=source.dtype, device="cuda") for source in self.sources]
        self.arrays = [x[offset:].copy_(source) for x, source in zip(self.whole, self.sources, strict=True)]

    def launch(self, ranks: Ranks, me: int) -> None:
        ranks.launch(me, self.arrays[me], self.dtype, self.op, compression="fp8")

    def check(self, what: str) -> None:
        for me, array in enumerate(self.arrays):
            got = array.cpu().view(torch.uint8).numpy()
            assert got.tobytes() == self.wanted.tobytes(), f"{what}: rank {me}, {array.numel()} of {self.dtype}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_what_travels_coded(count: int, dtype: str) -> None:
    """One behind the other without waiting; one-shot and two-shot, chunks that end within a block."""
    item = getattr(torch, dtype).itemsize
    with ranks_on_gpu(count) as ranks:
        sizes = [1, 255, 1000, CHUNK // item - 1, CHUNK // item + 1, 3 * CHUNK // item + 7, 20 * CHUNK // item]
        made = [Coded(count, n, dtype, ("sum", "avg")[seed % 2], seed) for seed, n in enumerate(sizes)]
        torch.cuda.synchronize()
        for each in made:
            for me in range(count):
                each.launch(ranks, me)
        ranks.settle()
        for each in made:
            each.check(f"{count} ranks")


def test_coded_at_addresses_that_allow_no_vectors() -> None:
    with ranks_on_gpu(4) as ranks:
        each = Coded(4, 300_001, "bfloat16", "sum", 3, offset=3)
        torch.cuda.synchronize()
        for me in range(4):
            each.launch(ranks, me)
        ranks.settle()
        each.check("offset 3")
        assert not any(whole[:3].any() for whole in each.whole)


def test_a_coded_one_that_is_broken_off_goes_on() -> None:
    rng = random.Random(SEED)
    with ranks_on_gpu(2) as ranks:
        warm, each = (Coded(2, 300_001, "float32", "sum", seed) for seed in (1, SEED))
        torch.cuda.synchronize()
        for me in range(2):
            warm.launch(ranks, me)
        ranks.settle()
        each.launch(ranks, 0)
        for _ in range(100):
            ranks.begun(2, of=[0])
            time.sleep(rng.random() * 1e-4)
            ranks.freeze()
            ranks.enter()
        each.launch(ranks, 1)
        ranks.settle()
        each.check(f"seed {SEED}")
