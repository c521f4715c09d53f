"""examples/train_ray.py, whose worker 1 is killed once, inside of a backward: killed.py FOLDER ARGS...

While one is away, the other trains slowly, so that the training does not end before Ray has started it again.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import ray
import train_ray


def setup(folder: str, killed_at: int) -> None:
    """In each process of Ray, which has this function by value, before it is a worker."""
    import os
    import signal
    import time
    from pathlib import Path

    from torch.nn.parallel import DistributedDataParallel

    made, backwards = DistributedDataParallel.__init__, iter(range(10**9))

    def backward(*_: Any) -> None:
        """The first parameter gets its gradient last, so other gradients of its step are reduced."""
        import ftcomm

        me, killed = os.environ["FTCOMM_REPLICA"], Path(folder, "killed")
        if next(backwards) == killed_at and me == "1" and not killed.exists():
            killed.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        together = set(ftcomm.default_group().contributors) == {0, 1}
        if killed.exists():
            Path(folder, f"{'together' if together else 'alone'} {me}").touch()
        if not together:
            time.sleep(0.3)

    def make(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        next(self.parameters()).register_hook(backward)

    DistributedDataParallel.__init__ = make


if __name__ == "__main__":
    hook = functools.partial(setup, sys.argv[1], 20)
    ray.init = functools.partial(ray.init, runtime_env={"worker_process_setup_hook": lambda: hook()})
    os.environ["RAY_DEDUP_LOGS"] = "0"
    sys.argv = [train_ray.__file__, *sys.argv[2:]]
    train_ray.main()
