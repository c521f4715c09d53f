"""The workers of `pytest -n` as forks of the server that forks ranks.

A worker takes 10 s of a core until it has its first test, two thirds of it to import torch, and starts a server of its
own, which imports it again. A run of `make test` has ten workers, and `.ci/run` twenty. Here pytest starts one server,
which forks all workers, and all ranks of their jobs.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker

import execnet.gateway_io
from execnet.gateway_base import Popen2IO

from tests.process import job
from tests.rigs.preforked_ranks import Rank, become_worker

SHARED = sys.version_info < (3, 14)  # later servers ask who comes for a secret that only who started them has


class _Worker:
    """What execnet needs of a `Popen` with pipes as stdin and stdout."""

    def __init__(self, command: Sequence[str]) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self._rank = Rank(command, os.environ, {0: theirs_in, 1: theirs_out, 2: 2}, become_worker)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
        self.wait, self.kill, self.pid = self._rank.wait, self._rank.kill, self._rank.pid


class _Connection(execnet.gateway_io.Popen2IOMaster):  # type: ignore[misc]
    """That of pytest to a worker."""

    def __init__(self, command: Sequence[str], execmodel: object) -> None:
        self.popen = _Worker(["-c", f"from tests import workers; workers.share(); {command[-1]}"])
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)


def fork() -> None:
    """In pytest itself: let the workers that it starts from now on be forks, and the server have what ranks of their
    jobs import first."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*job.PRELOADED, *job.trainers()])
    execnet.gateway_io.Popen2IOMaster = _Connection


def share() -> None:
    """In a worker: let the server that has forked it fork the ranks of its jobs."""
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
