"""One rank of `ftcomm bench recovery`: python -m ftcomm.bench.recovery_rank TASK_FILE, under the launcher.

All-reduces back to back, one a step, until the job is drained. Replica r puts in 2^r times a common pattern, so every
element of a result tells whose inputs are in it. Around a change of the view the bytes of the results are hashed, for
the command to compare between the survivors, and every element has to hold the inputs of all that contributed before,
or of all that contribute after.

Hashing takes longer than an op. It waits until the next op has returned, so that it holds up no op that is timed;
two arrays take turns for that.
"""

from __future__ import annotations

import collections
import hashlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

import ftcomm
from ftcomm.bench.data import PERIOD
from ftcomm.launch.hosts import settle
from ftcomm.settings import Settings

FOREVER = 1 << 40  # steps


class Task(msgspec.Struct, frozen=True):
    count: int  # fp32 elements
    folder: str  # each replica appends its ops to replica-N.jsonl here
    apart: bool = False  # each replica takes itself for a host of its own


class Op(msgspec.Struct, frozen=True):
    """Times are of `time.monotonic()`, one clock for all processes of a host. Written again once `digest` is known."""

    replica: int
    pid: int
    step: int
    epoch: int  # of the view in force when it returned
    start: float
    end: float
    digest: str = ""  # of the result
    wrong: int = 0  # elements


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    torch.set_num_threads(1)
    if task.apart:
        settle(f"host-{Settings.from_env().replica}")
    group = ftcomm.init()
    pattern = torch.arange(PERIOD, dtype=torch.float32) % 7 + 1
    mine = pattern * 2.0**group.replica
    x, other = torch.empty(task.count), torch.empty(task.count)
    # Of the last two ops: a replica may learn of a loss while it leaves one op and the others are in the next already.
    epochs = collections.deque([group.epoch] * 2, maxlen=2)
    contributing = collections.deque([group.contributing] * 3, maxlen=3)
    due: Op | None = None  # its result, in `other`, is to be hashed
    encoder = msgspec.json.Encoder()
    with (Path(task.folder) / f"replica-{group.replica}.jsonl").open("ab", buffering=0) as out:

        def write(op: Op) -> None:
            # One write a line: a reader, or the next process of this replica, never sees half of it.
            out.write(encoder.encode(op) + b"\n")

        for step in ftcomm.steps(FOREVER):
            _fill(x, mine)
            start = time.monotonic()
            ftcomm.allreduce(x)
            op = Op(group.replica, os.getpid(), step, group.epoch, start, time.monotonic())
            write(op)
            if due is not None:
                digest = hashlib.sha256(other.numpy().data).hexdigest()
                write(msgspec.structs.replace(due, digest=digest, wrong=_wrong(other, pattern, set(contributing))))
            contributing.append(group.contributing)
            due = op if op.epoch != epochs[0] else None
            epochs.append(op.epoch)
            x, other = other, x
    ftcomm.shutdown()


def _fill(x: torch.Tensor, row: torch.Tensor) -> None:
    whole = x.numel() // PERIOD * PERIOD
    x[:whole].view(-1, PERIOD).copy_(row)
    x[whole:].copy_(row[: x.numel() - whole])


def _wrong(x: torch.Tensor, pattern: torch.Tensor, allowed: Iterable[Iterable[int]]) -> int:
    """Elements of `x` (count,) that are no sum over one of the `allowed` sets of replicas."""
    wanted = torch.empty_like(x)
    right = torch.zeros_like(x, dtype=torch.bool)
    for replicas in allowed:
        _fill(wanted, pattern * float(sum(1 << replica for replica in replicas)))
        right |= x == wanted
    return x.numel() - int(right.sum())


if __name__ == "__main__":
    main(sys.argv)
