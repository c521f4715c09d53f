"""A training for soaks: a few numbers, many steps, quick to start, and a wrong bit anywhere stays visible for ever.

    ftcomm run --replicas 4 --ranks-per-replica 2 -m ftcomm.lab.chaos.train

The weights take in every reduced gradient, so two replicas that ever got different bits differ from then on. Every
few steps all compare a digest of their weights; if they differ, each reports `divergence` with its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import ftcomm
from ftcomm.control.timeouts import Timeouts
from ftcomm.lab.chaos.plan import FORKED, HOLD
from ftcomm.lab.chaos.process_faults import FORKS, HOLDS

RETURNED = 3  # exit code of a child whose call returned


class Weights:
    """The state that a joiner takes over. It has no optimizer, so the joiner waits for it, and begins with everybody's
    weights."""

    def __init__(self, elements: int) -> None:
        self.values = np.zeros(elements, np.float32)

    def state_dict(self) -> Mapping[str, Any]:
        return {"values": torch.from_numpy(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values[:] = state["values"].numpy()

    def digest(self) -> int:
        return zlib.crc32(self.values.data)


class Numbers(Dataset[int]):  # type: ignore[misc]
    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> int:
        return index


class Children:
    """Children of a rank: one calls an all-reduce, and three live for `seconds`, a daemon and a program among them.
    They are forked wherever the main thread is just then, so nothing of the group is called here but in a child."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pids: list[int] = []

    def fork(self) -> None:
        os.waitpid(self._forked(self._daemonize), 0)
        program = "sleep", str(self._seconds)
        self._pids += map(self._forked, (self._call, self._live, lambda: os.execvp(program[0], program)))

    def unrefused(self) -> list[str]:
        """Reap the children that have ended; returns how each ended whose call was not refused."""
        codes = []
        for pid in list(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._pids.remove(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        return ["its call returned" if code == RETURNED else f"it ended with {code}" for code in codes if code]

    @staticmethod
    def _forked(then: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                then()
                os._exit(0)
            finally:
                os._exit(1)
        return pid

    def _daemonize(self) -> None:
        os.setsid()
        self._forked(self._live)

    def _live(self) -> None:
        time.sleep(self._seconds)

    def _call(self) -> None:
        signal.alarm(math.ceil(self._seconds))  # one that waits is not refused
        with contextlib.suppress(ftcomm.FtcommError):
            ftcomm.allreduce(np.ones(1, np.float32))
            os._exit(RETURNED)


def differ(group: ftcomm.Group, digest: int) -> bool:
    """Whether the digests of those who contribute differ; all get the same answer."""
    # Exact in fp64. A member that catches up has nothing to compare yet, and is left out of both by the reduction.
    least, most = np.array([digest], np.float64), np.array([digest], np.float64)
    group.allreduce(least, "min")
    group.allreduce(most, "max")
    return bool(least[0] != most[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--elements", type=int, default=100_003, help="fp32 numbers that are reduced each step")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="what a step takes at least")
    parser.add_argument("--workers", type=int, default=0, help="processes of a DataLoader, forked as torch does")
    parser.add_argument("--compare-every", type=int, default=20, help="steps between comparisons of the weights")
    args = parser.parse_args()

    faulthandler.register(signal.SIGUSR1)  # where a rank stands, when the chaos finds that it hangs
    heartbeat = float(os.environ.get("FTCOMM_HEARTBEAT_TIMEOUT", Timeouts.derive().heartbeat))
    signal.signal(HOLDS, lambda *_: ctypes.PyDLL(None).usleep(int(1e6 * HOLD * heartbeat)))  # and keeps the lock
    asked: list[int] = []
    signal.signal(FORKS, lambda number, _: asked.append(number))  # until the loader has forked, see below
    group = ftcomm.init()
    loader = (
        iter(DataLoader(Numbers(), num_workers=args.workers, multiprocessing_context="fork")) if args.workers else None
    )
    # A fork holds a lock of the interpreter, and one in a handler that runs inside of it would wait for that for ever.
    children = Children(FORKED * heartbeat)
    signal.signal(FORKS, lambda *_: children.fork())
    for _ in asked:
        children.fork()
    weights = Weights(args.elements)
    gradient = np.empty(args.elements, np.float32)
    for step in ftcomm.steps(args.steps, {"weights": weights}):
        until = time.monotonic() + args.step_seconds
        if loader is not None:
            next(loader)
        gradient[:] = np.arange(step, step + args.elements, dtype=np.float32) * (group.replica + 1)
        group.allreduce(gradient, "avg")
        weights.values *= np.float32(0.99)  # so that they stay finite for any number of steps
        weights.values += gradient
        if step % args.compare_every == 0 and differ(group, weights.digest()):
            group.emit("divergence", step=step, digest=weights.digest(), what="weights")
        for how in children.unrefused():
            group.emit("trespass", step=step, how=how)
        if group.shard == 0:
            ftcomm.report(step=step, at=time.monotonic())
        time.sleep(max(0.0, until - time.monotonic()))
    if not group.drained:
        ftcomm.report(final_hash=f"{weights.digest():08x}")


if __name__ == "__main__":
    main()
