"""The script of the ranks. Replica 2 takes a command from the folder of the job, tells the others in an all-reduce, and
all do what it says: one does not come to the next op, or all come in another order.

What heals reads from a FIFO, and goes on when something is written there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ftcomm
from ftcomm.training import StepLoop
from tests.verdicts.kinds import CULPRIT, NAMED

BEGINS = 20  # steps before the first command, so that it is known how long ops take
BIG = 500_000  # elements of the ops that a slow network holds up
FIFO, COMMAND, TAKEN, LATE, FULL, KEPT, MANY = "fifo", "command", "taken", "late", "full", "kept", 64
_NAMES = list(NAMED)


class Acts:
    """What replica 2 does, by the name of the stall."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept = [[object()] for _ in range(1_000_000 if (folder / KEPT).exists() else 0)]  # before others wait
        self.named: dict[str, Callable[[], None]] = {
            "own code": self.own_code,
            "own code, held": self.holds_the_interpreter,
            "data loader": self.data_loader,
            "compilation": self.compilation,
            "garbage collector": self.garbage,
            "frozen process": self.own_code,  # it is stopped there
            "no CPU": self.computes,
            "full disk": self.full_disk,
        }

    def own_code(self) -> None:
        with open(self._folder / FIFO, "rb") as fifo:
            fifo.read()

    def holds_the_interpreter(self) -> None:
        re.match(r"(a+)+$", "a" * 60 + "b")

    def data_loader(self) -> None:
        import torch.utils.data

        fifo = self._folder / FIFO

        class Endless(torch.utils.data.Dataset[int]):
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> int:
                with open(fifo, "rb") as file:
                    return len(file.read())

        next(iter(torch.utils.data.DataLoader(Endless())))

    def compilation(self) -> None:
        import torch

        def slow_compiler(graph: Any, inputs: Any) -> Any:
            with open(self._folder / FIFO, "rb") as fifo:
                fifo.read()
            return graph

        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=slow_compiler)(torch.ones(3))

    def garbage(self) -> None:
        with self._healed() as healed:
            while self._kept and not healed():
                gc.collect()

    def computes(self) -> None:
        while os.sched_getscheduler(0) != os.SCHED_IDLE:  # until it gets no CPU
            time.sleep(0.01)
        with self._healed() as healed:
            begun = time.thread_time()
            while time.thread_time() - begun < 0.5 and not healed():
                pass

    @contextlib.contextmanager
    def _healed(self) -> Iterator[Callable[[], bool]]:
        """Gives a function that tells whether something was written into the FIFO."""
        fd = os.open(self._folder / FIFO, os.O_RDONLY | os.O_NONBLOCK)

        def healed() -> bool:
            try:
                return bool(os.read(fd, 1))
            except BlockingIOError:
                return False

        try:
            yield healed
        finally:
            os.close(fd)

    def full_disk(self) -> None:
        with open(self._folder / FULL / "checkpoint", "wb", buffering=0) as file:
            while not (self._folder / FULL / "healed").exists():
                with contextlib.suppress(OSError):  # a writer that tries again, as many do
                    file.write(b"x" * (1 << 20))
                time.sleep(0.05)


def main(folder: Path) -> None:
    culprit = int(os.environ["FTCOMM_REPLICA"]) == CULPRIT
    if culprit and (folder / LATE).exists():
        threading.Event().wait()
    acts = Acts(folder).named if culprit else {}
    ftcomm.init()
    group = ftcomm.default_group()
    pair = [] if group.replica == 1 else [group.subgroup(name, [0, CULPRIT]) for name in "ab"]
    if culprit and (folder / "torch").exists():  # imports take long, so before the others wait
        import torch._dynamo
        import torch.utils.data  # noqa: F401
    small, big, other = np.ones(1000, np.float32), np.ones(BIG, np.float32), np.ones(700, np.float64)
    many = 0  # steps with big ops
    loop = StepLoop(group=group)  # with a vote, so that a mismatch ends an attempt, and not the job
    for step in loop.steps(10_000_000):
        with loop.guard():
            time.sleep(0.03)
            group.allreduce(small)
            if many or step < BEGINS:
                group.allreduce(big)
                many = max(0, many - 1)
            told = np.zeros(1, np.int64)
            if culprit and step > BEGINS and group.contributes and (folder / COMMAND).exists():
                told[0] = 1 + _NAMES.index((folder / COMMAND).read_text())
                (folder / f"{TAKEN}.new").write_text(str(os.getpid()))
                (folder / f"{TAKEN}.new").rename(folder / TAKEN)
                (folder / COMMAND).unlink()
            group.allreduce(told)
            name = _NAMES[int(told[0]) - 1] if told[0] else ""
            if name == "other group" and pair:
                for each in reversed(pair) if culprit else pair:
                    each.barrier()
            elif name == "slow network":
                many = MANY
            elif name == "mismatch of calls":
                group.allreduce(other if culprit else small)
            elif name == "swapped order of ops":
                order = (other, small) if culprit else (small, other)
                works = [
                    group.allreduce(x, async_op=True) for x in order
                ]  # else the first fails, and there is no second
                for work in works:
                    work.wait()
            elif culprit and name in acts:
                acts[name]()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
