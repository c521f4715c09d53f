"""What the ranks of a training with checkpoints run."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import ftcomm
from ftcomm.errors import FtcommError
from ftcomm.training.checkpoint import Checkpoints
from ftcomm.training.state import digest

from ..process.job import Notes

EVERY = 20


def die_while_writing(group: ftcomm.Group, marks: Path) -> None:
    """Once: all of the data is written by then, and nothing says yet that it is."""
    finish = FileSystemWriter.finish

    def instead(*args: Any, **kwargs: Any) -> None:
        mark = marks / "died"
        if group.replica == 0 and not mark.exists() and list(marks.glob("checkpoints/step-*")):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        finish(*args, **kwargs)

    FileSystemWriter.finish = instead  # type: ignore[method-assign]


def train(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    marks = Path(arguments["marks"])
    die_while_writing(group, marks)
    torch.manual_seed(1 if not group.contributes or arguments.get("other") else 0)
    model = nn.Sequential(nn.Linear(4, arguments.get("width", 300)), nn.GELU(), nn.Linear(300, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    checkpoints = Checkpoints(arguments["checkpoints"], state, every=EVERY, keep=2, group=group)
    first = checkpoints.restore()
    notes.write(kind="restored", step=first, digest=digest(state))
    for step in ftcomm.steps(arguments["steps"], state, group):
        checkpoints.before(step)
        if step % EVERY == EVERY // 2:
            checkpoints.close()  # the disk may be slow, and the next one is to be written
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1000 * step + group.replica))
        model(x).square().mean().backward()
        for p in model.parameters():
            group.allreduce(p.grad, "avg")
        optimizer.step()
        optimizer.zero_grad()
        notes.write(kind="step", step=step, digest=digest(state) if group.contributes else "")
        waits = "back" in arguments and step >= 3 * EVERY and not (marks / "back").exists()
        time.sleep(0.5 if waits else 0.01)  # for a replica that died, which can come back at a boundary only
    checkpoints.close(arguments["steps"])
    notes.write(kind="final", digest=digest(state), contributes=group.contributes)


def fail(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """The second of two checkpoints is larger than a file may be, until that may be larger."""
    folder = Path(arguments["checkpoints"])
    checkpoints = Checkpoints(folder, {"w": nn.Linear(300, 300)}, every=1, group=group)
    checkpoints.before(1)
    checkpoints.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    checkpoints.before(2)
    try:
        checkpoints.close(2)
    except FtcommError as error:
        notes.write(kind="failed", error=str(error), left=sorted(path.name for path in folder.iterdir()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.close(2)


def fail_in_one_rank(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Rank 0 cannot write its part when rank 1 has written its own; both call `close` again, as the error says."""
    checkpoints = Checkpoints(arguments["checkpoints"], {"w": nn.Linear(300, 300)}, group=group)
    written = Path(arguments["marks"]) / "written"
    if group.shard == 1:
        checkpoints.close(5)
        written.touch()
    else:
        while not written.exists():
            time.sleep(0.01)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            checkpoints.close(5)
        except FtcommError as error:
            notes.write(kind="failed", error=str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.close(5)
