"""`ftcomm run --nnodes 2` as one of two hosts, and what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.rigs.deadlines import DEADLINE

SCRIPT = """
import hashlib, os, time
import numpy as np, ftcomm

ftcomm.init()
group = ftcomm.default_group()
state = {"x": np.zeros(64, np.float32)}
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
print("variables", *(os.environ[name] for name in names), flush=True)
for step in ftcomm.steps(1_000_000, state):
    time.sleep(0.02)  # leaves the cores to those who start
    given = np.full(64, step * (group.replica + 1), np.float32)
    state["x"] += np.sqrt(ftcomm.allreduce(given, op="avg"))
    if step % 20 == 0:
        print("step", step, "of", os.getpid(), "with", group.world_size, flush=True)
        if ftcomm.allreduce(np.array([os.path.exists("enough")], np.float32), op="min")[0]:
            break
print("ended", step, hashlib.sha256(state["x"].tobytes()).hexdigest(), flush=True)
"""


class Host:
    """Host `rank` of two, with two processes; host 0 is at `endpoint`. It runs in the network of the thread that makes
    it."""

    def __init__(self, here: Path, rank: int, endpoint: str, *more: str, **variables: str) -> None:
        runtime = here / f"host-{rank}"
        runtime.mkdir(mode=0o700, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith("FTCOMM_")}
        env |= {"FTCOMM_TOKEN": "0123456789abcdef", "XDG_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"}
        env |= variables
        self.lines: list[str] = []
        self._heard = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from ftcomm.cli import main; main()", "run", "--nnodes", "2"),
                *("--node-rank", str(rank), "--rdzv-endpoint", endpoint, "--nproc-per-node", "2", *more),
                "script.py",
            ],
            cwd=here,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self.lines.append(line.rstrip())
                self._heard.notify_all()
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    def hears(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Wait for a line that matches, from line `after` on."""
        found: list[re.Match[str]] = []

        def there() -> bool:
            found.extend(match for line in self.lines[after:] if (match := re.search(pattern, line)))
            return bool(found) or self._ended

        with self._heard:
            self._heard.wait_for(there, DEADLINE)
            assert found, f"no {pattern!r} in:\n" + "\n".join(self.lines[-40:])
        return found[-1]

    def kill(self) -> None:
        """As when the host loses power: the launcher and all that it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
