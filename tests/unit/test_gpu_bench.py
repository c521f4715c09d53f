"""What the GPU bench counts, and that its ranks stand where an exchange would put them, here with one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftcomm.errors import InitError
from tests.gpu.bench_allreduce import bytes_moved, measure

ROOT = Path(__file__).parents[2]
ONE_RANK = """
import numpy as np
from tests.gpu.ranks import Ranks
from ftcomm.engines.gpu_kernel.interpreted import InterpretDevice
from ftcomm.engines.gpu_kernel.layout import INTERPRETED
from ftcomm.kernels.device import words as w

ranks = Ranks(1, INTERPRETED, InterpretDevice)
ranks.enter()
x = np.arange(100_000, dtype=np.float32)
for op in ("sum", "avg", "max"):
    ranks.launch(0, x, "float32", op)
ranks.begun(1, [0])
ranks.settle()
ctl = ranks.devices[0].ctl
assert (ctl[w.RETURNED], ctl[w.STATUS]) == (3, w.OK)
ranks.freeze()
ranks.launch(0, x, "float32")
assert not ranks.devices[0].settle(0.05), "it runs while frozen"
ranks.enter()
ranks.settle()
assert (ctl[w.RETURNED], ctl[w.OPEN]) == (4, 2)
assert (x == np.arange(100_000)).all()
ranks.close()
print("done")
"""


@pytest.mark.parametrize(
    ("size", "ranks", "expected"), [(1024, 1, 6 * 1024), (1024, 2, 11 * 1024), (1024, 8, 41 * 1024)]
)
def test_bytes_moved(size: int, ranks: int, expected: int) -> None:
    assert bytes_moved(size, ranks) == expected


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(InitError, match="no NVIDIA driver"):
        measure()


def test_ranks_by_hand() -> None:
    """In a process of its own, since Triton has to be imported for the interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", ONE_RANK], cwd=ROOT, capture_output=True, text=True, timeout=230, env=env, check=False
    )
    assert ran.stdout.strip() == "done", ran.stderr
