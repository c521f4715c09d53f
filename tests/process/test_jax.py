"""All-reduce inside `jax.jit`: a replica is killed between dispatch and result, comes back, and all end alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_launch_training import FOREVER, Job, here

__all__ = ["here"]

pytestmark = [pytest.mark.usefixtures("preforked"), pytest.mark.protocol]

TRAIN = """
import os, sys, time, zlib
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np
import ftcomm, ftcomm.jax
from ftcomm.errors import ArgumentError
from ftcomm.process import pending

group = ftcomm.init()
try:
    jax.jit(lambda x: ftcomm.jax.allreduce(x, "median"))(jnp.ones(3))
except ArgumentError as error:
    assert "expected one of sum" in str(error)

def loss(params, x):
    return jnp.sum((params["w"] - x) ** 2) + jnp.sum(params["b"].astype(jnp.float32) ** 2)

@jax.jit
def train(params, x):
    gradients = ftcomm.jax.allreduce(jax.grad(loss)(params, x), "avg")
    count = ftcomm.jax.allreduce(jnp.ones((), jnp.int32))
    new = jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)
    return new, count

waits, steps = [], 0
pending.waits.append(lambda: waits.append(step))
step = -1
kept = {"params": {"w": jnp.zeros((300, 500)), "b": jnp.ones(7)}}
for step in ftcomm.steps(int(sys.argv[1]), {"kept": kept}):
    kept["params"], count = train(kept["params"], float(step % 7 + group.replica))  # is not waited for
    steps += 1
    ftcomm.report(step=step)
    time.sleep(0.02)  # leaves the cores to who comes back
assert len(waits) >= 2 * steps, "at each boundary, and before each step is settled"  # on CPUs none is late
digests = [zlib.crc32(np.asarray(each)) for each in jax.tree.leaves(kept["params"])]
print("state", step, *digests, flush=True)
"""


@pytest.mark.shows("ftcomm run", "JAX in jit", "RSJE")
def test_a_replica_is_killed_and_comes_back(here: Path) -> None:
    pytest.importorskip("jax")
    Job(here, TRAIN, FOREVER).kill_and_drain()
