"""What a job of NumPy arrays imports up to its first all-reduce: each module costs it a millisecond, some a second."""

from __future__ import annotations

from pathlib import Path

from ftcomm.launch import run

from .test_launch_training import Job, here

__all__ = ["here"]

HEAVY = {
    "torch",
    "jax",
    "cupy",
    "triton",
    "rich",
    "click",
    "cryptography",
    "prometheus_client",
    "opentelemetry",
    "multiprocessing",
    "sqlite3",
    "http",
    "email",
    "importlib.metadata",
    "ftcomm.cli",
    "ftcomm.groups.compare",
    "ftcomm.dashboard",
    "ftcomm.diagnosis",
    "ftcomm.engines.gpu",
    "ftcomm.launch",
    "ftcomm.groups.static_endpoint",
    "ftcomm.groups.static_group",
    "ftcomm.groups.subgroup",
    "ftcomm.groups.subgroup_internals",
    "ftcomm.torch",
    "ftcomm.training",
    "ftcomm.transport.nixl.context",
    "ftcomm.transport.nixl.mirror",
}

FIRST = """
import sys
import numpy as np
import ftcomm

ftcomm.init()
x = np.ones(8, np.float32)
ftcomm.allreduce(x)
print("first", x.sum(), *sorted(sys.modules))
"""


def test_a_first_all_reduce_imports_nothing_heavy(here: Path) -> None:
    job = Job(here, FIRST)
    assert job.run() == run.FINISHED, job.lines
    said = [line.split() for line in job.lines if line.startswith("first ")]
    assert [(first, total) for first, total, *_ in said] == [("first", "24.0")] * 3
    for _, _, *modules in said:
        assert "ftcomm.transport.shm" in modules
        assert not HEAVY & set(modules)
