"""The common part of the ranks of `accuracy` and `hsdp`: what they write down, and how they measure the loss on text
that was held out.

Nobody waits for the command that reads the records of the ranks, and what a rank wrote before it was killed is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from ftcomm.bench.job import Records
from ftcomm.demo.data import windows
from ftcomm.training import Outcome

LOOK = 0.02  # s between two looks whether a file is there
WAIT_TIMEOUT = 300.0  # s that ranks wait for one that was killed, and the command for anything at all


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    steps: int
    width: int  # of the model
    layers: int
    batch: int  # sequences in a step
    validate_every: int
    windows: int  # of held-out text
    folder: str = ""


class Built(msgspec.Struct, frozen=True, tag=True):
    """All is built and nothing joined yet."""

    replica: int
    rank: int
    pid: int


class Settled(msgspec.Struct, frozen=True, tag=True):
    """A step that is over, as one rank was told. `at` is of `time.monotonic()`, one clock for all of a host."""

    replica: int
    rank: int
    pid: int
    step: int
    decision: str
    counted: tuple[int, ...]  # replicas, ascending
    at: float


class Validated(msgspec.Struct, frozen=True, tag=True):
    """The loss of a share of the windows with the weights before `step`."""

    step: int
    windows: int
    loss: float  # nats a byte, mean


class FinalState(msgspec.Struct, frozen=True, tag=True):
    """The state of this rank after the last step."""

    replica: int
    rank: int
    digest: str


ConvergenceRecord = Built | Settled | Validated | FinalState


class RankRecords:
    """The records of one rank. One write each: no reader, and no next process in this place, sees half of one."""

    def __init__(self, folder: str, replica: int, rank: int = 0, ranks: int = 1) -> None:
        self.folder, self.replica, self.rank, self.ranks = Path(folder), replica, rank, ranks
        self.life = self._count_lives()  # 0 for the first process in this place
        self._write = Records(folder, replica * ranks + rank).write
        self._last: Outcome | None = None

    def built(self) -> None:
        self._write(Built(self.replica, self.rank, os.getpid()))

    def settled(self, outcome: Outcome | None) -> None:
        """Note what the step before came to. Called at the beginning of every step, and after the last one."""
        if outcome is None or outcome is self._last:
            return
        self._last = outcome
        counted = tuple(sorted(outcome.counted))
        now = time.monotonic()
        self._write(Settled(self.replica, self.rank, os.getpid(), outcome.step, outcome.decision.name, counted, now))

    @torch.no_grad()
    def validate(self, step: int, model: nn.Module, samples: Tensor, replicas: list[int]) -> None:
        """This rank's share of `samples` (int64 [windows, context + 1]), if its replica is one of `replicas`, which
        have the same weights. Each rank of a replica calls it, and has as many samples as the others if they divide."""
        if self.replica not in replicas:
            return
        place = sorted(replicas).index(self.replica) * self.ranks + self.rank
        mine = samples[place :: len(replicas) * self.ranks]
        self._write(Validated(step, len(mine), model(mine).item()))

    def ended(self, digest: str) -> None:
        self._write(FinalState(self.replica, self.rank, digest))

    def _count_lives(self) -> int:
        life = 0
        while (self.folder / f"life-{self.replica}-{self.rank}-{life}").exists():
            life += 1
        (self.folder / f"life-{self.replica}-{self.rank}-{life}").touch()
        return life


def held_out_samples(text: np.ndarray, count: int, context: int) -> Tensor:
    """Returns int64 [count, context + 1], spread evenly over the text; the same on all ranks and in all runs."""
    return windows(text, np.linspace(0, len(text) - context - 1, count, dtype=np.int64), context)


def wait_until(what: str, true: Callable[[], bool], seconds: float = WAIT_TIMEOUT) -> None:
    """Block until it is so. Raises `TimeoutError`: the rank fails, and with it the measurement."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come to pass within {seconds:g} s that {what}")
        time.sleep(LOOK)
