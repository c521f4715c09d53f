"""One rank of `ftcomm bench rejoin`: python -m ftcomm.bench.rejoin_rank TASK_FILE, under the launcher.

Data-parallel training of a stack of linear layers by AdamW until the job is drained. What each step took, and what of
it, is written down for the command.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import torch
from torch import nn

import ftcomm
from ftcomm.hsdp import Replica
from ftcomm.torch.buckets import GradientBuckets

WIDTH = 1024
FOREVER = 1 << 40  # steps


class Task(msgspec.Struct, frozen=True):
    layers: int  # of WIDTH x WIDTH weights
    batch: int  # samples of a step
    folder: str  # each replica appends its steps to replica-N.jsonl here


class Step(msgspec.Struct, frozen=True):
    """Times are of `time.monotonic()`, one clock for all processes of a host."""

    replica: int
    pid: int
    number: int
    counted: int  # replicas that contributed
    members: int  # of the view it ended in
    start: float  # when the loop gave it out
    end: float  # when the body was through


def layers_for(nbytes: int) -> int:
    """That make a state of about `nbytes`: weights and two moments of each, in fp32."""
    return max(1, round(nbytes / (12 * WIDTH * WIDTH)))


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(task.layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(task.batch, WIDTH)
    group = ftcomm.init()
    buckets = GradientBuckets(model, group)
    replica = Replica({"model": model, "optimizer": optimizer}, group)
    encoder = msgspec.json.Encoder()
    with (Path(task.folder) / f"replica-{group.replica}.jsonl").open("ab", buffering=0) as out:
        for number in replica.steps(FOREVER):
            start = time.monotonic()
            model(x).square().mean().backward()
            buckets.wait()
            optimizer.step()
            buckets.zero_grad()
            end = time.monotonic()
            step = Step(group.replica, os.getpid(), number, len(group.contributing), len(group.members), start, end)
            out.write(encoder.encode(step) + b"\n")
    ftcomm.shutdown()


if __name__ == "__main__":
    main(sys.argv)
