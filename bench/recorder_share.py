"""Measures what the flight recorder takes of a training step: a part of `ftcomm bench overhead`.

    op       what a rank records of an op that no fast path takes: where it is called, the call, the first post, the
             arrival of all, and the return
    phase    a phase of the step loop, its beginning and its end; a step has three
    step     forward, backward and update of the demo's training, which exchanges nothing here: the least that it takes

The share is (op * ops of a step + phase * 3) / step. Times are those of the processor in this process, so what else the
machine does hardly matters. Waits of 10 ms and more are recorded as well, but whoever waits has the time.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from ftcomm.bench.stats import median
from ftcomm.recorder import callers
from ftcomm.recorder.layout import PROCESS_SHAPE, GroupKind, PhaseKind
from ftcomm.recorder.recorder import Recorder

PHASES = 3  # step, boundary and vote
MOST_PCT = 0.5  # of a step


class RecorderShare(msgspec.Struct, frozen=True):
    """The cost of the recorder in a step of the demo. Medians over the rounds."""

    op_us: float
    phase_us: float
    ops_per_step: int
    step_ms: float
    share_pct: float  # of the step

    @property
    def good(self) -> bool:
        return self.share_pct <= MOST_PCT


class _NoOthers:
    """A group without members, which counts its ops."""

    def __init__(self) -> None:
        self.ops = 0

    def allreduce(self, x: Any, op: str, **how: Any) -> Any:
        self.ops += 1
        return SimpleNamespace(wait=lambda: x)


def recorder_share(rounds: int, iterations: int = 5000) -> RecorderShare:
    """Returns the share. Blocks for seconds. Needs torch, as the demo does."""
    step_ms, ops = _step(rounds)
    recorder = Recorder(mmap.mmap(-1, PROCESS_SHAPE.size), PROCESS_SHAPE)
    group = recorder.group("*", 0, GroupKind.JOB)
    group.entered(1, "0-1", "shm")
    op = SimpleNamespace(place=1, call=1, detail=0, caller=0, record=0)

    def record_op() -> None:
        op.place += 1
        op.caller = callers.find(sys._getframe(), recorder.text)
        group.called(op, recorder.clock())
        group.posted(op, "ring")
        group.arrived(op)
        group.returned(op, recorder.clock())

    def record_phase() -> None:
        recorder.finish(recorder.begin(PhaseKind.STEP, step=1))

    op_us, phase_us = (
        median([1e6 * _cpu(record, iterations) / iterations for _ in range(rounds)])
        for record in (record_op, record_phase)
    )
    taken = op_us * ops + phase_us * PHASES
    return RecorderShare(op_us, phase_us, ops, step_ms, 100 * taken / (1000 * step_ms))


def _step(rounds: int) -> tuple[float, int]:
    """Returns milliseconds of the processor for a step with one thread, and how many ops it calls."""
    import torch

    from ftcomm.demo.model import Transformer
    from ftcomm.demo.train import BATCH, BUCKET, CONTEXT
    from ftcomm.torch.buckets import GradientBuckets

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        group: Any = _NoOthers()
        model = Transformer(context=CONTEXT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        buckets = GradientBuckets(model, group, bucket_bytes=BUCKET)
        batch = torch.randint(0, 256, (BATCH, CONTEXT + 1))

        def step() -> None:
            model(batch).backward()
            buckets.wait()
            optimizer.step()
            buckets.zero_grad()

        step()
        ops = group.ops
        return median([1e3 * _cpu(step) for _ in range(rounds)]), ops
    finally:
        torch.set_num_threads(before)


def _cpu(call: Callable[[], None], count: int = 1) -> float:
    """Returns the seconds of the processor for so many calls."""
    started = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - started
