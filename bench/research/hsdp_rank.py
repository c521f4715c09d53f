"""One rank of `ftcomm bench hsdp`.

FSDP2 inside each replica, ftcomm between them, under the step loop; each sample of the text is trained once. The
command kills ranks from outside. As long as it keeps the file `hold`, those that are left stop after a step: the
new processes take as long to start as many such small steps, and the deaths are to lie in one training of a sane
length. They go on as soon as the new ones are about to join, slowly until those contribute.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ftcomm
from ftcomm.bench.research.convergence_rank import Diary, held_out_samples, wait_until
from ftcomm.demo.data import library_text, windows
from ftcomm.demo.llama import Llama
from ftcomm.demo.train import learning_rate
from ftcomm.settings import Settings
from ftcomm.torch import init_device_mesh
from ftcomm.training import Batches, Outcome, StepLoop
from ftcomm.training.state import digest

CONTEXT = 64  # bytes of a sequence
PEAK = 4e-3  # learning rate
ALONE = 1  # steps that the survivors do before they hold
PACE = 0.1  # s before each of their steps from then until all contribute
SOON, SLOW = 10, 0.5  # and so long after so many steps: on a busy machine it takes longer to join


class Task(msgspec.Struct, frozen=True):
    folder: str
    seed: int
    steps: int
    width: int
    layers: int
    batch: int  # sequences of a rank in a step
    validate_every: int
    windows: int  # of held-out text

    @property
    def hold(self) -> Path:
        return Path(self.folder) / "hold"


class Hold:
    """Outcomes are the same on all ranks, so all stop before the same step."""

    def __init__(self, task: Task, replicas: int) -> None:
        self._file, self._replicas = task.hold, replicas
        self._alone = 0  # steps without all

    def after(self, outcome: Outcome | None) -> None:
        if outcome is None or len(outcome.counted) == self._replicas:
            self._alone = 0
            return
        self._alone += 1
        if self._alone == ALONE:
            wait_until("the replica that was killed had started again", lambda: not self._file.exists())
        elif self._alone > ALONE:
            time.sleep(PACE if self._alone < SOON else SLOW)


def main(task: Task, settings: Settings) -> None:
    diary, hold = Diary(task.folder, settings.replica, settings.shard), Hold(task, settings.replicas)
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)  # the same first weights everywhere
    text, held_out = library_text()
    samples = held_out_samples(held_out, task.windows, CONTEXT)
    model = Llama(task.width, task.layers)
    diary.ready()

    ftcomm.init(settings)
    mesh = init_device_mesh("cpu", mesh_dim_names=("replicate", "shard"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Batches((len(text) - 1) // CONTEXT, task.batch, seed=task.seed)
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    loop = StepLoop(state)
    for step in loop.steps(task.steps):
        outcome = loop.outcome
        diary.settled(outcome)
        hold.after(outcome)
        if step % task.validate_every == 0:
            before = range(settings.replicas) if step == 0 else outcome.counted if outcome else ()
            diary.validate(step, model, samples, list(before), settings.ranks_per_replica)
        for options in optimizer.param_groups:
            options["lr"] = learning_rate(step, task.steps, PEAK)
        optimizer.zero_grad()
        starts = np.array(batches.samples) * CONTEXT
        model(windows(text, starts, CONTEXT)).backward()
        optimizer.step()
    assert loop.outcome is not None
    diary.settled(loop.outcome)
    diary.validate(task.steps, model, samples, list(loop.outcome.counted), settings.ranks_per_replica)
    diary.ended(digest(state))
    dist.destroy_process_group()
