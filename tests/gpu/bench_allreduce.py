"""The all-reduce kernel with eight ranks on one GPU: bandwidth, latency, and how fast it can be told to stop.

One GPU, so nothing goes over a link: the bound is the GPU's memory, which all ranks share. What is measured is the
protocol, with its waits and its staging. The ranks are streams of one process (`ranks`). Ops are captured in CUDA
graphs, one a rank, since one Python thread cannot launch for eight ranks as fast as they run; the rank whose graph is
started last is timed, for which all others are there already.

    limit      what the bytes that have to be moved take at the rate of a plain copy, measured in the same run
    abort      from the write of the abort word by the host until it sees that the last kernel has ended
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from ftcomm.bench.stats import median, percentile

RANKS = 8
WARMUP, REPLAYS, ABORTS = 3, 10, 200
BIG, SMALL = 256 << 20, 4 << 10
TARGETS = {"two_shot": 70.0, "one_shot": 15.0, "abort": 50.0}  # % of the limit at least, us at most, us at most

Row = dict[str, "str | int | float | None"]


def bytes_moved(size: int, ranks: int) -> int:
    """That all ranks together read and write in a two-shot op of `size` bytes, if nothing is found in a cache.

    Each copies its input to staging (2 size), reads a shard of everybody's (size), writes it reduced (size / ranks),
    and copies all reduced shards to its array (2 size).
    """
    return ranks * (5 * size + size // ranks)


def measure(say: Callable[[str], None] = print) -> list[Row]:
    """A row a measurement, for the table and the JSON of `ftcomm bench gpu-check`. Takes about a minute.

    Needs a GPU: raises `InitError` that says why there is none. Raises `RuntimeError` if a result is wrong.
    """
    from ftcomm.engines.gpu.probe import require_cuda

    require_cuda()
    from ftcomm.engines.gpu_kernel.cuda import CudaDevice
    from ftcomm.engines.gpu_kernel.layout import CUDA
    from tests.gpu.ranks import ON_GPU, Ranks

    ranks = Ranks(RANKS, CUDA, CudaDevice, deadline=ON_GPU)
    try:
        ranks.enter()
        rate = copy_rate()
        rows: list[Row] = [_row("copy", 1 << 30, None, gbps=rate / 1e9)]
        for sms in (None, 4, 8, 16):
            seconds = timed_op(ranks, BIG, 5, sms)
            limit = bytes_moved(BIG, RANKS) / rate
            target = TARGETS["two_shot"] if sms is None else None
            rows.append(_row("two_shot", BIG, sms, us=1e6 * seconds, limit=100 * limit / seconds, target=target))
        seconds = timed_op(ranks, SMALL, 100, None)
        rows.append(_row("one_shot", SMALL, None, us=1e6 * seconds, target=TARGETS["one_shot"]))
        aborts = [1e6 * seconds for seconds in abort_times(ranks)]
        rows.append(_row("abort", 0, None, us=median(aborts), p99=percentile(aborts, 99), target=TARGETS["abort"]))
    finally:
        ranks.close()
    for row in rows:
        say(", ".join(f"{name} {value}" for name, value in row.items() if value is not None))
    return rows


def main() -> None:
    """What `ftcomm bench gpu-check` runs in a process of its own: the rows as JSON in the last line."""
    print(json.dumps(measure()))


def _row(name: str, size: int, sms: int | None, **values: float | None) -> Row:
    columns = ("us", "p99", "gbps", "limit", "target")
    rounded = {column: None if (value := values.get(column)) is None else round(value, 2) for column in columns}
    return {"bench": "allreduce-gpu", "name": name, "ranks": RANKS, "bytes": size, "sms": sms, **rounded}


def copy_rate() -> float:
    """Bytes read and written a second by a copy of 1 GB within the GPU."""
    import torch

    source, to = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    took = []
    for i in range(WARMUP + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        to.copy_(source)
        end.record()
        end.synchronize()
        if i >= WARMUP:
            took.append(start.elapsed_time(end) / 1e3)
    return 2 * int(source.nbytes) / median(took)


def timed_op(ranks: Any, size: int, ops: int, sms: int | None) -> float:
    """Seconds of one average of `size` bytes of bfloat16, of `ops` behind each other."""
    import torch

    arrays = [torch.full((size // 2,), me + 1.0, dtype=torch.bfloat16, device="cuda") for me in range(RANKS)]
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    torch.cuda.synchronize()
    for me, array in enumerate(arrays):
        ranks.launch(me, array, "bfloat16", "avg", sms)
    ranks.settle()
    if not all(bool((array == (RANKS + 1) / 2).all()) for array in arrays):  # exact, and stays so in all that follow
        raise RuntimeError(f"the average of {size} bytes is wrong")
    graphs = [torch.cuda.CUDAGraph() for _ in range(RANKS)]
    for me, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=streams[me]):
            for _ in range(ops):
                ranks.launch(me, arrays[me], "bfloat16", "avg", sms)
                ranks.devices[me].release(ranks.devices[me].mark())
    took = []
    for i in range(WARMUP + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for me, graph in enumerate(graphs):
            with torch.cuda.stream(streams[me]):
                if me == RANKS - 1:
                    start.record()
                graph.replay()
        end.record(streams[-1])
        end.synchronize()
        if i >= WARMUP:
            took.append(start.elapsed_time(end) / 1e3 / ops)
    torch.cuda.synchronize()
    return median(took)


def abort_times(ranks: Any) -> list[float]:
    """Seconds, of ops that wait for one of the ranks."""
    import torch

    from ftcomm.kernels.device import words as w

    arrays = [torch.zeros(BIG // 4, device="cuda") for _ in range(RANKS - 1)]
    torch.cuda.synchronize()
    took = []
    for _ in range(ABORTS):
        waiting = [int(device.ctl[w.BEGUN]) + 1 for device in ranks.devices[:-1]]
        number = int(ranks.devices[0].ctl[w.RETURNED])
        for me, array in enumerate(arrays):
            ranks.launch(me, array, "float32")
        for me, launches in enumerate(waiting):
            ranks.begun(launches, [me])
        time.sleep(0.001)  # all programs are in their waits
        began = time.perf_counter()
        ranks.freeze()
        took.append(time.perf_counter() - began)
        ranks.enter(number + 1)
    ranks.settle()
    return took


if __name__ == "__main__":
    main()
