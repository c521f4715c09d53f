"""A rank of `ftcomm bench train --compare restart`: the training of train_rank.py over plain gloo, with checkpoints.

Ends with the first error. Whoever started it starts all ranks again, which then begin with the last checkpoint.
REPLICA=2 REPLICAS=4 LIFE=0 python -m ftcomm.bench.train_restart_rank TASK_FILE
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftcomm.bench.train_rank import FOREVER, Step, Task, Writer, batch, build, noting, read_task

EVERY = 5  # steps between checkpoints
TIMEOUT = timedelta(seconds=30)


def main(argv: list[str]) -> None:
    task = read_task(argv)
    replica, life = int(os.environ["REPLICA"]), os.environ["LIFE"]
    where = f"file://{task.folder}/rendezvous-{life}"
    world = int(os.environ["REPLICAS"])
    dist.init_process_group("gloo", init_method=where, rank=replica, world_size=world, timeout=TIMEOUT)
    model = build(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = Path(task.folder) / "checkpoint.pt"
    first = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    furthest = last_step(task, replica)
    parallel = DistributedDataParallel(model)
    note = noting(Writer(task, replica), replica)
    for step in range(first, FOREVER):
        try:
            optimizer.zero_grad()
            parallel(batch(task, step, replica)).backward()
        except RuntimeError:
            os._exit(0)  # what gloo destroys on the way out may wait for the dead
        optimizer.step()
        note(step, step > furthest, True)  # a step that had been done before is one that was lost
        if replica == 0 and (step + 1) % EVERY == 0:
            new = path.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, new)
            os.replace(new, path)


def last_step(task: Task, replica: int) -> int:
    """That an earlier life of this replica has done; -1: none."""
    path = Path(task.folder) / f"replica-{replica}.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return max((msgspec.json.decode(line, type=Step).step for line in lines), default=-1)


if __name__ == "__main__":
    main(sys.argv)
