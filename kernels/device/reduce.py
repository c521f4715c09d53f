"""Reduce of W sources in one pass.

    sources[0..w-1] --read once, in order--> fp32 / own type --rounded once--> out

Program p of G computes tiles p, p + G, ... and no other program reads or writes them, so that nothing is to be awaited
and the output may be one of the sources. Where W is not a constant (0), each program first writes the addresses
into a row of `rows` of its own, for a loop to index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ftcomm.kernels.device.launch import on, plan, work
from ftcomm.kernels.device.tile import addresses_of, tiles, unspecialised
from ftcomm.kernels.spans import MOST_SOURCES, MemorySpan

_MOST = tl.constexpr(MOST_SOURCES)


@triton.jit(launch_metadata=work, do_not_specialize=["rows", "w", "out", "n", "divisor"])
def reduce_kernel(
    sources,  # tuple of W addresses, of 16 if W == 0; `unspecialised`
    rows: tl.int64,  # W == 0: address of 16 words for each program
    w: tl.int32,
    out: tl.int64,  # address
    n: tl.int64,  # elements
    divisor: tl.int32,  # of an average
    T: tl.constexpr,
    OP: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out[i] = OP over the sources' [i], i < n."""
    begin = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    sources = addresses_of(sources)
    out = tl.cast(out, tl.int64)
    table = tl.cast(rows, tl.int64).to(tl.pointer_type(tl.int64)) + begin * _MOST
    if W == 0:
        for i in tl.static_range(_MOST):
            tl.store(table + i, sources[i])
        tl.debug_barrier()
    n = tl.cast(n, tl.int64)
    tiles(sources, table, w, 0, out, n, divisor, begin, step, W, T, OP, BLOCK, ALIGNED, True)


def reduce_spans(spans: list[MemorySpan], w: int, op: str, divisor: int | None, sms: int | None) -> None:
    """Reduce on the current stream; does not wait. The first `w` spans, of one dtype, are the sources, the last is the
    output: one of these exactly, or apart from them. `divisor` of an average; None: w. `sms`: programs at most; None:
    as many as pay."""
    n, device = spans[0].count, spans[0].device
    if n == 0:
        return
    divides = w == 1 and divisor not in (None, 1)  # the kernel of one source only copies
    launch = plan(spans, 0 if divides else w, op, sms)
    *sources, out = (span.address for span in spans)
    padded = sources if launch.W else sources + sources[:1] * (MOST_SOURCES - w)
    with on(device):
        rows = torch.empty(0 if launch.W else launch.programs * MOST_SOURCES, dtype=torch.int64, device=device)
        reduce_kernel[(launch.programs,)](
            unspecialised(padded),
            rows.data_ptr(),
            w,
            out,
            n,
            divisor or w,
            **launch.constants(),
        )


def reduce(
    sources: Sequence[torch.Tensor],
    out: torch.Tensor,
    op: str = "sum",
    *,
    divisor: int | None = None,
    sms: int | None = None,
) -> None:
    """`reduce_spans` of contiguous tensors."""
    spans = [
        MemorySpan(x.data_ptr(), x.numel(), str(x.dtype).removeprefix("torch."), str(x.device)) for x in (*sources, out)
    ]
    reduce_spans(spans, len(sources), op, divisor, sms)
