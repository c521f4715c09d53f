"""The worker of `torchft.reconfigure_test`, from its wheel: it resizes, aborts and recovers a process group."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp


def test_resize_worker() -> None:
    worker = pytest.importorskip("torchft.reconfigure_test")._resize_worker
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.spawn(worker, args=(store.port, os.environ["FTCOMM_UPSTREAM_BACKEND"]), nprocs=3)
