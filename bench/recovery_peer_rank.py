"""One rank of a peer in `ftcomm bench recovery`: python -m ftcomm.bench.recovery_peer_rank TASK_FILE LIBRARY REPLICA

All-reduces back to back, as in recovery_rank.py, one a step. Plain gloo ends with its first error. torchft's manager
swallows it, discards the step and forms a quorum of who is left.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)  # of an op; the default of gloo is half an hour, of torchft a minute
Note = Callable[[int, float, bool, int], None]


class Task(msgspec.Struct, frozen=True):
    count: int  # fp32 elements
    replicas: int
    folder: str  # each replica appends its attempts to replica-N.jsonl here
    life: int = 0  # of the whole job, for gloo, which begins anew after each fault


class Attempt(msgspec.Struct, frozen=True):
    """Times are of `time.monotonic()`. Not `committed`: failed, or thrown away."""

    replica: int
    pid: int
    step: int
    start: float
    end: float
    committed: bool
    members: int


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    library, replica = argv[2], int(argv[3])
    torch.set_num_threads(1)
    x = torch.empty(task.count)
    with (Path(task.folder) / f"replica-{replica}.jsonl").open("ab", buffering=0) as out:

        def note(step: int, start: float, committed: bool, members: int) -> None:
            attempt = Attempt(replica, os.getpid(), step, start, time.monotonic(), committed, members)
            out.write(msgspec.json.encode(attempt) + b"\n")

        (_gloo if library == "gloo" else _torchft)(task, replica, x, note)


def _gloo(task: Task, replica: int, x: torch.Tensor, note: Note) -> None:
    where = f"file://{task.folder}/rendezvous-{task.life}"
    dist.init_process_group("gloo", init_method=where, rank=replica, world_size=task.replicas, timeout=TIMEOUT)
    step = 0
    while True:
        x.fill_(1)
        start = time.monotonic()
        try:
            dist.all_reduce(x)
        except RuntimeError:
            note(step, start, False, 0)
            os._exit(0)  # what gloo destroys on the way out may wait for the dead
        note(step, start, True, task.replicas)
        step += 1


def _torchft(task: Task, replica: int, x: torch.Tensor, note: Note) -> None:
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,
        state_dict=lambda: {"nothing": torch.zeros(1)},
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        replica_id=f"replica_{replica}_",
    )
    while True:
        x.fill_(1)
        start, step = time.monotonic(), manager.current_step()
        manager.start_quorum()
        manager.allreduce(x, reduce_op=dist.ReduceOp.SUM).wait()
        members = manager.num_participants()
        note(step, start, manager.should_commit(), members)


if __name__ == "__main__":
    main(sys.argv)
