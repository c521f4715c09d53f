"""The all-reduce on a real GPU, of eight ranks that are streams of one process.

What is promised without a GPU is shown in tests/kernels and tests/process by the interpreter; here is what only a GPU
can show: that the memory model holds, that programs of several ranks run at once, that a kernel can be told to stop.
"""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from ftcomm.kernels.device import words as w
from tests.process.test_kills import SEED

from .rig import gpu, inputs, ranks_on_gpu, same_bits, total

pytestmark = [*gpu, pytest.mark.timeout(300)]

CHUNK = 256 << 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int32": torch.int32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_sums_to_the_bit(count: int, dtype: str) -> None:
    item = DTYPES[dtype].itemsize
    sizes = [1, 1000, CHUNK // item - 1, CHUNK // item + 1, 3 * CHUNK // item + 7, (16 << 20) // item]
    with ranks_on_gpu(count) as ranks:
        for seed, elements in enumerate(sizes):
            sources = inputs(count, elements, DTYPES[dtype], seed)
            arrays = [source.cuda() for source in sources]
            for me, array in enumerate(arrays):
                ranks.launch(me, array, dtype)
            ranks.settle()
            expected = total(sources)
            for me, array in enumerate(arrays):
                assert same_bits(array.cpu(), expected), f"rank {me} of {count}, {elements} elements of {dtype}"


@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_bits_of_integers(op: str) -> None:
    combined = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
    with ranks_on_gpu(3) as ranks:
        for elements, dtype in ((1000, torch.uint8), (300_001, torch.int32)):
            sources = inputs(3, elements, dtype, elements)
            arrays = [source.cuda() for source in sources]
            for me, array in enumerate(arrays):
                ranks.launch(me, array, str(dtype).removeprefix("torch."), op)
            ranks.settle()
            assert all(same_bits(array.cpu(), functools.reduce(combined, sources)) for array in arrays)


@pytest.mark.parametrize("offset", [1, 3])
def test_addresses_that_allow_no_vectors(offset: int) -> None:
    with ranks_on_gpu(4) as ranks:
        sources = inputs(4, 300_001, torch.bfloat16, offset)
        whole = [torch.zeros(300_010, dtype=torch.bfloat16, device="cuda") for _ in sources]
        for me, source in enumerate(sources):
            view = whole[me][offset : offset + len(source)]
            view.copy_(source)
            ranks.launch(me, view, "bfloat16")
        ranks.settle()
        for array in whole:
            assert same_bits(array[offset : offset + 300_001].cpu(), total(sources))
            assert not array[:offset].any()
            assert not array[offset + 300_001 :].any()


def test_staging_in_pinned_memory() -> None:
    """As between GPUs that cannot read each other's memory."""
    with ranks_on_gpu(4, staging="host") as ranks:
        for seed, elements in enumerate([1, 1000, 1_000_003]):
            sources = inputs(4, elements, torch.bfloat16, seed)
            arrays = [source.cuda() for source in sources]
            for me, array in enumerate(arrays):
                ranks.launch(me, array, "bfloat16")
            ranks.settle()
            assert all(same_bits(array.cpu(), total(sources)) for array in arrays)


def test_members_may_launch_different_grids() -> None:
    with ranks_on_gpu(4) as ranks:
        for seed in range(20):
            sources = inputs(4, 3_000_001, torch.float32, seed)
            arrays = [source.cuda() for source in sources]
            for me, array in enumerate(arrays):
                ranks.launch(me, array, "float32", sms=(1, 2, 7, 16)[(me + seed) % 4])
            ranks.settle()
            assert all(same_bits(array.cpu(), total(sources)) for array in arrays)


def test_ops_in_flight_behind_each_other() -> None:
    """Two hundred of all sizes, queued without waiting: slots and words are used again and again."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    with ranks_on_gpu(8) as ranks:
        expected, arrays = [], []
        for op in range(200):
            elements = rng.choice([1, 100, 5_000, 70_000, 400_000])
            sources = inputs(8, elements, torch.float32, SEED + op)
            expected.append(total(sources))
            arrays.append([source.cuda() for source in sources])
        torch.cuda.synchronize()
        for op in range(200):
            for me in range(8):
                ranks.launch(me, arrays[op][me], "float32")
        ranks.settle()
        for op in range(200):
            assert all(same_bits(array.cpu(), expected[op]) for array in arrays[op]), f"seed {SEED}: op {op}"


def test_the_callers_stream_waits_and_the_host_does_not() -> None:
    with ranks_on_gpu(2) as ranks:
        streams = [torch.cuda.Stream() for _ in range(2)]
        arrays = [torch.zeros(1 << 20, device="cuda") for _ in range(2)]
        for me, array in enumerate(arrays):
            array.add_(0).mul(10)  # as the ops below: what is used for the first time is loaded
            ranks.launch(me, array, "float32")  # which may wait for all that runs
        ranks.settle()
        torch.cuda.synchronize()
        results = []
        for me, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)  # the input is only there when the stream gets here
                arrays[me].add_(me + 1)
                ranks.launch(me, arrays[me], "float32")
                device = ranks.devices[me]
                device.release(device.mark())
                results.append(arrays[me] * 10)  # queued behind the op
        assert not streams[0].query(), "launching has waited for the GPU"
        torch.cuda.synchronize()
        assert all((result == 30).all() for result in results)


# ---- aborts -------------------------------------------------------------------------------------------------------


def test_a_thousand_aborts_then_a_correct_op(record_property: Any) -> None:
    """Seven of eight come to an op and wait for the last, until they are told to stop: nothing has changed, the context
    lives. The time from the abort word to the end of the kernels is measured here and asserted nowhere."""
    aborts, took = 1000, []
    with ranks_on_gpu(8) as ranks:
        sources = inputs(8, 1_000_003, torch.float32, 5)
        arrays = [source.cuda() for source in sources]
        torch.cuda.synchronize()
        for number in range(1, aborts + 1):
            for me in range(7):
                ranks.launch(me, arrays[me], "float32")
            ranks.begun(number, range(7))
            began = time.perf_counter()
            ranks.freeze()
            took.append(time.perf_counter() - began)
            assert [int(device.ctl[w.STATUS]) for device in ranks.devices[:7]] == [w.ABORTED] * 7
            ranks.enter(number)
        ranks.settle()
        for me in range(8):
            assert same_bits(arrays[me].cpu(), sources[me]), "an op that nobody could complete has changed its input"
            ranks.launch(me, arrays[me], "float32")
        ranks.settle()
        assert all(same_bits(array.cpu(), total(sources)) for array in arrays)
    record_property("abort_us", {"p50": 1e6 * float(np.median(took)), "max": 1e6 * max(took)})
    print(f"abort word to end of 7 kernels: median {1e6 * float(np.median(took)):.0f} us, max {1e6 * max(took):.0f} us")


def test_an_abort_in_mid_op_leaves_each_chunk_input_or_final() -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    elements = CHUNK // 4
    with ranks_on_gpu(4) as ranks:
        sources = inputs(4, 200 * elements, torch.float32, SEED)
        expected, split = total(sources), 0
        for number in range(1, 51):
            arrays = [source.cuda() for source in sources]
            torch.cuda.synchronize()
            for me, array in enumerate(arrays):
                ranks.launch(me, array, "float32", sms=2)
            ranks.begun(number, range(4))
            time.sleep(rng.uniform(0, 0.001))
            ranks.freeze()
            finals = 0
            for me, array in enumerate(arrays):
                got = array.cpu().view(200, elements)
                for chunk in range(200):
                    here = slice(chunk * elements, (chunk + 1) * elements)
                    final = same_bits(got[chunk], expected[here])
                    assert final or same_bits(got[chunk], sources[me][here]), f"seed {SEED}: rank {me}, chunk {chunk}"
                    finals += final
            split += 0 < finals < 800
            ranks.enter(number)
        ranks.settle()
    print(f"{split} of 50 ops were broken off in the middle")


def test_a_launch_waits_while_frozen() -> None:
    with ranks_on_gpu(2) as ranks:
        ranks.freeze()
        arrays = [torch.ones(1000, device="cuda") for _ in range(2)]
        for me in range(2):
            ranks.launch(me, arrays[me], "float32")
        assert not ranks.devices[0].settle(0.1)
        assert [int(device.ctl[w.BEGUN]) for device in ranks.devices] == [0, 0]
        ranks.enter()
        ranks.settle()
        assert all((array == 2).all() for array in arrays)


def test_other_calls_are_told_apart() -> None:
    with ranks_on_gpu(2) as ranks:
        arrays = [torch.ones(1000 + me, device="cuda") for me in range(2)]
        for me in range(2):
            ranks.launch(me, arrays[me], "float32")
        ranks.begun(1, range(2))
        assert not any(device.settle(0.2) for device in ranks.devices), "the op does not wait until the host has heard"
        for device in ranks.devices:
            assert device.ctl[w.STATUS] == w.MISMATCH
            assert device.ctl[w.SEEN + 1] != device.ctl[w.SEEN + 3]
            device.ctl[w.HEARD] = device.ctl[w.MISMATCHED]
        ranks.settle()
        assert all((array == 1).all() for array in arrays)
        for me in range(2):
            ranks.launch(me, arrays[me][:1000], "float32")
        ranks.settle()
        assert all((array[:1000] == 2).all() for array in arrays)
