"""A script whose replica is killed inside of a backward when the test asks for it: killed.py FOLDER SCRIPT ARGS...

The first parameter of a model, and the first module that is sharded, get their gradient last, so when the rank dies
other gradients of its step are reduced. Until the test lets it, it does not begin again. Each backward pauses there, so
that a replica which waits for the other one to come back leaves it the cores.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

PAUSE = 0.05  # s


def main() -> None:
    here, replica = Path(sys.argv[1]), os.environ["FTCOMM_REPLICA"]
    asked, away = here / f"kill-{replica}", here / f"away-{replica}"
    while away.exists():  # the test has a deadline
        time.sleep(0.05)
    sys.argv = sys.argv[2:]
    made, sharded = DistributedDataParallel.__init__, fsdp.fully_shard

    def die(*_: Any) -> None:
        time.sleep(PAUSE)
        if asked.exists() and os.environ.get("FTCOMM_SHARD", "0") == "0":
            asked.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def make(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        next(p for p in self.parameters() if p.requires_grad).register_hook(die)

    def shard(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        fsdp.fully_shard = sharded
        module.register_full_backward_hook(die)
        return sharded(module, *args, **kwargs)

    DistributedDataParallel.__init__ = make
    fsdp.fully_shard = shard
    runpy.run_path(sys.argv[0], run_name="__main__")


main()
