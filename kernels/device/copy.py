"""Copy: program p of G copies tiles p, p + G, ... and nobody else writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ftcomm.kernels.check import check
from ftcomm.kernels.device.launch import on, plan, work
from ftcomm.kernels.device.tile import addresses_of, tiles, unspecialised


@triton.jit(launch_metadata=work, do_not_specialize=["w", "n"])
def copy_kernel(
    sources,  # tuple of one address, `unspecialised`
    w: tl.int32,  # 1
    outs,  # tuple of addresses, `unspecialised`
    n: tl.int64,  # elements
    T: tl.constexpr,
    OP: tl.constexpr,  # of no meaning for one source
    W: tl.constexpr,  # 1
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    STREAM: tl.constexpr,  # outs[0] is not read soon
):
    """outs[*][i] = sources[0][i], i < n; read once."""
    begin = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    n = tl.cast(n, tl.int64)
    sources = addresses_of(sources)
    outs = addresses_of(outs)
    tiles(sources, None, w, 0, outs, n, None, begin, step, W, T, OP, BLOCK, ALIGNED, STREAM, False)


def copy(source: torch.Tensor, out: torch.Tensor, *, sms: int | None = None) -> None:
    """See `ftcomm.kernels.copy`. On the current stream; does not wait."""
    launch_copy(source, [out], sms)


def launch_copy(source: torch.Tensor, outs: Sequence[torch.Tensor], sms: int | None) -> None:
    """Into all of `outs`, of which the first is no staging."""
    spans = check([source], outs, sms=sms)
    first, *rest = spans
    if first.count == 0:
        return
    launch = plan(spans, 1, "sum", sms)
    with on(first.device):
        copy_kernel[(launch.programs,)](
            unspecialised([first.address]),
            1,
            unspecialised([out.address for out in rest]),
            first.count,
            STREAM=True,
            **launch.constants(),
        )
