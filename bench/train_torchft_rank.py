"""A replica of `ftcomm bench train --compare torchft`: the training of train_rank.py as torchft has it, with gloo.

REPLICA=2 TORCHFT_LIGHTHOUSE=http://... python -m ftcomm.bench.train_torchft_rank TASK_FILE
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from ftcomm.bench.train_rank import Writer, batch, build, noting, read_task

TIMEOUT = timedelta(seconds=30)


def main(argv: list[str]) -> None:
    task = read_task(argv)
    replica = int(os.environ["REPLICA"])
    model = build(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(batch(task, 0, 0)).backward()  # to warm up, as train_rank.py does

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        replica_id=f"replica_{replica}_",
    )
    parallel = DistributedDataParallel(manager, model)
    managed = Optimizer(manager, optimizer)
    note = noting(Writer(task, replica), replica)
    while True:
        managed.zero_grad()
        step = manager.current_step()
        parallel(batch(task, step, replica)).backward()
        contributes = manager.is_participating()
        managed.step()
        committed = manager.current_step() > step
        note(manager.current_step() - committed, committed, contributes)


if __name__ == "__main__":
    main(sys.argv)
