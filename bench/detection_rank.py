"""One rank of `ftcomm bench detection`: python -m ftcomm.bench.detection_rank TASK_FILE, under the launcher.

A training as the kernel sees it: steps that compute on one thread, then wait for each other in an all-reduce, in a
process with torch and the memory of a model, which the kernel has to take apart when it is killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch

import ftcomm

FOREVER = 1 << 40  # steps
WIDTH = 256  # of the matrices; a product takes a millisecond


class Task(msgspec.Struct, frozen=True):
    count: int  # fp32 elements of the gradient
    compute: float  # seconds of computing in a step
    memory: int  # bytes of the model and its optimizer


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    torch.set_num_threads(1)
    ftcomm.init()
    gradient = torch.ones(task.count)
    model = torch.ones(task.memory // 4)
    left, right = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    for _ in ftcomm.steps(FOREVER):
        end = time.thread_time() + task.compute
        while time.thread_time() < end:
            torch.mm(left, right, out=gradient[: WIDTH * WIDTH].view(WIDTH, WIDTH))
        ftcomm.allreduce(gradient, "avg")
        model[: task.count] += gradient
    ftcomm.shutdown()


if __name__ == "__main__":
    main(sys.argv)
